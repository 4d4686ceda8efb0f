"""The configuration reference: every field with its type, default, meaning and allowed values, as Markdown.

python -m digen_jax.config.reference > docs/configuration.md

All of it is read from the code: a field's meaning is the comment at the end of its line or, if there is none, the
comment lines above it.
"""

import ast
import dataclasses
import inspect
import io
import sys
import tokenize
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

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
RESUMED = """## What a resumed run may change

The same command with the same `--workdir` resumes a run. These fields and sections may differ from the first start,
and the run reports the differences. All other fields must be unchanged.

{fields}
"""
TABLE = """| field | type | default | meaning | allowed |
| --- | --- | --- | --- | --- |
"""


class Field(NamedTuple):
    """A row of the reference."""

    name: str
    default: Any
    meaning: str
    allowed: str

    def row(self) -> str:
        """Returns the field as a row of a Markdown table."""
        cells = [f"`{self.name}`", type(self.default).__name__, f"`{_literal(self.default)}`"]
        cells += [self.meaning, self.allowed]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def document() -> str:
    """Returns the complete page."""
    infinite = [
        f"`config.{name}`"
        for name, allowed in allowed_of("policy_gradient").items()
        if isinstance(allowed, Range) and allowed.infinite
    ]
    parts, single = [], []
    for field in dataclasses.fields(TrainConfig):
        if field.name == "algorithm":
            parts += [_algorithms()]
        elif field.name == "rewards" or dataclasses.is_dataclass(field.default):
            kind = RewardSettings if field.name == "rewards" else type(field.default)
            text = inspect.cleandoc(kind.__doc__ or "")
            parts += [_part(f"## {field.name}", text, described(field.name))]
        elif field.default is not dataclasses.MISSING:
            single += described(field.name)
    named = {field.name: field for name in FIRST for field in described(_section_of(name))}
    first = "The ten fields that most users change; `model.height`, `lora.rank` and `placement` come next."
    may_change = "\n".join(f"- `{name}`" for name in sorted(MAY_CHANGE))
    return "\n".join(
        [
            HEAD.format(infinite=" and ".join(sorted(infinite, reverse=True))),
            _part("## Ten fields to start with", first, [named[name] for name in FIRST]),
            _part("## Top level", "Fields outside of the sections.", single),
            *parts,
            RESUMED.format(fields=may_change),
        ]
    )


def _section_of(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def described(section: str, algorithm: str = "policy_gradient") -> list[Field]:
    """Returns the fields of a section, or the field of that name outside all sections.

    Raises:
      ConfigError: A field has no comment.
    """
    default = {field.name: field.default for field in dataclasses.fields(TrainConfig)}[section]
    if section == "rewards":
        return list(_fields(RewardSettings, "rewards[i]", algorithm))
    if section == "algorithm":
        return list(_fields(algorithm_class(algorithm), section, algorithm))
    if dataclasses.is_dataclass(default):
        return list(_fields(type(default), section, algorithm))
    return [_field(section, comments(TrainConfig)[section], algorithm)]


def comments(kind: type) -> dict[str, str]:
    """Returns the comment of each annotated field of a class: at the end of its line, or else the lines above it."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    found = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    meanings = {}
    for node in cast(Any, ast.parse(source).body[0]).body:
        if isinstance(node, ast.AnnAssign):
            above, row = list[str](), node.lineno - 1
            while lines[row - 1].lstrip().startswith("#"):
                above.insert(0, found[row])
                row -= 1
            last = node.end_lineno or node.lineno
            inline = [found[row] for row in range(node.lineno, last + 1) if row in found]
            meanings[ast.unparse(node.target)] = " ".join(inline or above)
    return meanings


def _fields(kind: type, path: str, algorithm: str) -> Iterator[Field]:
    """Yields the fields of a dataclass and of nested dataclasses."""
    meanings = comments(kind)
    for field in dataclasses.fields(kind):
        name, default = f"{path}.{field.name}", field.default
        if dataclasses.is_dataclass(default):
            yield from _fields(type(default), name, algorithm)
        elif "derived" not in field.metadata:
            yield _field(name, meanings[field.name], algorithm)


def _field(name: str, meaning: str, algorithm: str) -> Field:
    if not meaning:
        raise ConfigError(f"{name} has no comment with its meaning: write one next to it")
    default = flat(default_config(algorithm))[f"config.{name.replace('[i]', '[0]')}"]
    if isinstance(default, ConfigDict):
        default = default.to_dict()
    allowed = allowed_of(algorithm).get(name, "")
    if name == "sampler.kind":
        allowed = tuple(KINDS)
    if isinstance(allowed, tuple):
        allowed = ", ".join(f"`{_literal(value)}`" for value in allowed)
    return Field(name, default, meaning, str(allowed))


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
        first = str(inspect.getmodule(algorithm_class(name)).__doc__).splitlines()[0]
        parts += [_part(f"### {name}", first, described("algorithm", name))]
    return "\n".join(parts)


def _part(heading: str, text: str, fields: list[Field]) -> str:
    """Returns a heading, a paragraph on the section, and a table of its fields."""
    rows = "".join(f"{field.row()}\n" for field in fields)
    return f"{heading}\n\n{text}\n\n{TABLE}{rows}"


if __name__ == "__main__":
    sys.stdout.write(document())
