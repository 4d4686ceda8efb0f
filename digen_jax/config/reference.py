"""The configuration reference: every field with its type, default, meaning and allowed values, as Markdown.

python -m digen_jax.config.reference > docs/configuration.md

All of it is read from the code: a field's meaning is the comment at the end of its line or, if there is none, the
comment lines above it.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterable
from typing import Any, cast

from ml_collections import ConfigDict

from digen_jax.config.checks import allowed_of
from digen_jax.config.fields import flat
from digen_jax.config.load import default_config
from digen_jax.config.train_config import ALGORITHMS, MAY_CHANGE, TrainConfig, algorithm_class
from digen_jax.diffusion.steps import KINDS
from digen_jax.errors import ConfigError, Range
from digen_jax.rewards import RewardSettings

HEAD = """# Configuration

<!-- Generated from the code: edit the comments there, then run `make docs`. -->

Every field of a training config, with its default. A file in [`configs/`](../configs) sets the fields that matter to
it and leaves the others at their defaults; the command line overrides both:

```
python launch/train.py --config configs/shapes_demo.py --workdir runs/shapes --config.trainer.learning_rate=1e-4
```

Unknown fields, values of a wrong type or outside of their range, and incompatible fields are rejected with one message
each, before anything is computed. Numbers are finite; only
{infinite} may be `inf`.
"""
# The fields that most users change.
FIRST = (
    "model.folder", "rewards[i].name", "prompts.file", "evaluation.prompts", "steps", "batch.groups", "batch.images",
    "sampler.steps", "trainer.learning_rate", "trainer.micro_batch",
)  # fmt: skip
OTHERS = (
    "algorithm",
    "algorithm_section",
    "rewards",
)  # sections whose rows are not those of a default
RESUMED = """## What a resumed run may change

The same command with the same `--workdir` resumes a run. These fields and sections may differ from the first start,
and the run reports the differences. All other fields must be unchanged.

{fields}
"""
TABLE = """| field | type | default | meaning | allowed |
| --- | --- | --- | --- | --- |
"""


def document() -> str:
    """Returns the complete page."""
    infinite = [
        f"`config.{name}`"
        for name, allowed in allowed_of("policy_gradient").items()
        if isinstance(allowed, Range) and allowed.infinite
    ]
    every = rows(TrainConfig) | rows(RewardSettings, "rewards[i].")
    parts = []
    for field in dataclasses.fields(TrainConfig):
        if field.name == "algorithm":
            parts += [_algorithms()]
        elif field.name == "rewards" or dataclasses.is_dataclass(field.default):
            kind = RewardSettings if field.name == "rewards" else type(field.default)
            own = [row for name, row in every.items() if re.match(rf"{field.name}[.\[]", name)]
            parts += [_part(f"## {field.name}", inspect.cleandoc(kind.__doc__ or ""), own)]
    single = [row for name, row in every.items() if "." not in name]
    first = "The ten fields that most users change; `model.height`, `lora.rank` and `placement` come next."
    may_change = "\n".join(f"- `{name}`" for name in sorted(MAY_CHANGE))
    return "\n".join(
        [
            HEAD.format(infinite=" and ".join(sorted(infinite, reverse=True))),
            _part("## Ten fields to start with", first, [every[name] for name in FIRST]),
            _part("## Top level", "Fields outside of the sections.", single),
            *parts,
            RESUMED.format(fields=may_change),
        ]
    )


def rows(kind: type, path: str = "", algorithm: str = "policy_gradient") -> dict[str, str]:
    """Returns a table row for each field of a dataclass and of nested dataclasses, by dotted name.

    Raises:
      ConfigError: A field has no comment.
    """
    meanings, found = comments(kind), dict[str, str]()
    allowed, defaults = allowed_of(algorithm), flat(default_config(algorithm))
    for field in dataclasses.fields(kind):
        name = f"{path}{field.name}"
        if dataclasses.is_dataclass(field.default):
            found |= rows(type(field.default), f"{name}.", algorithm)
        elif "derived" not in field.metadata and name not in OTHERS:
            if not (meaning := meanings[field.name]):
                raise ConfigError(f"{name} has no comment with its meaning: write one next to it")
            values = tuple(KINDS) if name == "sampler.kind" else allowed.get(name, "")
            if isinstance(values, tuple):
                values = ", ".join(f"`{_literal(value)}`" for value in values)
            default = defaults[f"config.{name.replace('[i]', '[0]')}"]
            if isinstance(default, ConfigDict):
                default = default.to_dict()
            cells = f"`{name}`", type(default).__name__, f"`{_literal(default)}`", meaning
            escaped = (cell.replace("|", "\\|") for cell in (*cells, str(values)))
            found[name] = f"| {' | '.join(escaped)} |\n"
    return found


def comments(kind: type) -> dict[str, str]:
    """Returns the comment of each annotated field of a class: at the end of its line, or else the lines above it."""
    inherited = {
        name: meaning
        for base in reversed(kind.__mro__[1:])
        if dataclasses.is_dataclass(base)
        for name, meaning in comments(base).items()
    }
    source = inspect.getsource(kind)
    lines, meanings = source.splitlines(), {}
    for node in cast(Any, ast.parse(source).body[0]).body:
        if isinstance(node, ast.AnnAssign):
            start, end = node.lineno - 1, cast(int, node.end_lineno)
            found = [line.partition("  # ")[2] for line in lines[start:end]]
            while not any(found) and lines[start - 1].lstrip().startswith("#"):
                start -= 1
            found = found if any(found) else [one.lstrip("# ") for one in lines[start : end - 1]]
            meanings[ast.unparse(node.target)] = " ".join(filter(None, found))
    return inherited | meanings


def _literal(value: Any) -> str:
    """Returns a value as written in a config file."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _algorithms() -> str:
    """Returns the section whose fields depend on the algorithm's name."""
    names = ", ".join(f"`{_literal(name)}`" for name in ALGORITHMS)
    intro = (
        f"`algorithm.name` is one of {names}. It determines the\nother fields of the section; "
        "[algorithms.md](algorithms.md) lists the settings of each published method.\n"
    )
    parts = ["## algorithm\n", intro]
    for name in ALGORITHMS:
        kind = algorithm_class(name)
        first = str(inspect.getmodule(kind).__doc__).splitlines()[0]
        parts += [_part(f"### {name}", first, rows(kind, "algorithm.", name).values())]
    return "\n".join(parts)


def _part(heading: str, text: str, rows: Iterable[str]) -> str:
    """Returns a heading, a paragraph on the section, and a table of its fields."""
    return f"{heading}\n\n{text}\n\n{TABLE}{''.join(rows)}"


if __name__ == "__main__":
    sys.stdout.write(document())
