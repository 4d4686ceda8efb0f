"""The configuration reference: every field with its type, default, meaning and allowed values, as Markdown.

python -m digen_jax.config.reference > docs/configuration.md

All of it is read from the code: a field's meaning is the comment at the end of its line or, where there is none, the
comment lines above it.
"""

import ast
import dataclasses
import functools
import inspect
import io
import math
import sys
import tokenize
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from digen_jax.config.algorithm_section import CLASSES
from digen_jax.config.checks.choices import choices
from digen_jax.config.checks.numbers import MAY_BE_INFINITE, RANGES
from digen_jax.config.fields import flat
from digen_jax.config.recipe import MAY_CHANGE, Recipe, reference
from digen_jax.config.sections import AdvantagesSection
from digen_jax.errors import ConfigError
from digen_jax.flow.steps import KINDS
from digen_jax.rewards.settings import RewardSettings

HEAD = """# Configuration

<!-- Generated from the code: edit the comments there, then run `make docs`. -->

Every field of a training config, with its default. A file in [`configs/`](../configs) sets the fields that matter to
it and leaves the others at their defaults; the command line overrides both:

```
python launch/train.py --config configs/shapes_demo.py --workdir runs/shapes --config.trainer.learning_rate=1e-4
```

A misspelt field, a value of another type or outside of its range, and fields that cannot work together are refused
with one sentence each before anything is computed. Numbers are finite; only
{infinite} may be `inf`.
"""
# The fields that most users change.
FIRST = (
    "model.folder", "rewards[i].name", "prompts.file", "evaluation.prompts", "steps", "batch.groups", "batch.images",
    "sampler.steps", "trainer.learning_rate", "trainer.micro_batch",
)  # fmt: skip
RESUMED = """## What a resumed run may change

The same command with the same `--workdir` continues a run. These fields and sections may differ from the first start;
the run says which ones do. All others must be as they were.

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
        """As a row of a Markdown table."""
        cells = [f"`{self.name}`", type(self.default).__name__, f"`{_literal(self.default)}`"]
        cells += [self.meaning, self.allowed]
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def document() -> str:
    """The whole page."""
    infinite = " and ".join(f"`{name}`" for name in MAY_BE_INFINITE)
    parts = [HEAD.format(infinite=infinite)]
    alone = []
    for field in dataclasses.fields(Recipe):
        section = AdvantagesSection() if field.name == "advantages" else field.default
        if field.name == "algorithm":
            parts += [_algorithms()]
        elif field.name == "rewards":
            parts += [_part("## rewards", RewardSettings.__doc__, described("rewards"))]
        elif dataclasses.is_dataclass(section):
            parts += [_part(f"## {field.name}", type(section).__doc__, described(field.name))]
        elif section is not dataclasses.MISSING:
            alone += described(field.name)
    parts.insert(1, _part("## The run", "Fields outside of all sections.", alone))
    first = {field.name: field for name in map(_section_of, FIRST) for field in described(name)}
    told = "The ten fields that most users change; `model.height`, `lora.rank` and `placement` come next."
    parts.insert(1, _part("## Ten fields to begin with", told, [first[name] for name in FIRST]))
    may_change = "\n".join(f"- `{name}`" for name in sorted(MAY_CHANGE))
    return "\n".join([*parts, RESUMED.format(fields=may_change)])


def _section_of(name: str) -> str:
    return name.partition(".")[0].partition("[")[0]


def described(section: str, algorithm: str = "policy_gradient") -> list[Field]:
    """The fields of a section, or the single field of that name outside of all sections.

    Raises:
      ConfigError: a field without a comment.
    """
    if section == "rewards":
        told, allowed = comments(RewardSettings), _allowed(algorithm)
        return [
            Field(f"rewards[i].{name}", value, told[name], allowed.get(f"rewards[i].{name}", ""))
            for name, value in vars(RewardSettings()).items()
        ]
    holder = {"algorithm": CLASSES[algorithm], "advantages": AdvantagesSection}.get(section)
    if holder is not None:
        return list(_fields(holder, section, algorithm))
    default = next(f.default for f in dataclasses.fields(Recipe) if f.name == section)
    if dataclasses.is_dataclass(default):
        return list(_fields(type(default), section, algorithm))
    return [_field(section, comments(Recipe)[section], algorithm)]


def comments(kind: type) -> dict[str, str]:
    """The comment of each annotated field of a class: at its line's end, else the lines above it."""
    source = inspect.getsource(kind)
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    told = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.type == tokenize.COMMENT}
    found = {}
    for node in ast.parse(source).body[0].body:
        if isinstance(node, ast.AnnAssign):
            above, row = [], node.lineno - 1
            while lines[row - 1].lstrip().startswith("#"):
                above.insert(0, told[row])
                row -= 1
            beside = [told[row] for row in range(node.lineno, node.end_lineno + 1) if row in told]
            found[node.target.id] = " ".join(beside or above)
    return found


def _fields(kind: type, path: str, algorithm: str) -> Iterator[Field]:
    """The fields of a dataclass and of the dataclasses in it."""
    meanings, defaults = comments(kind), flat(reference(algorithm))
    for field in dataclasses.fields(kind):
        name, default = f"{path}.{field.name}", field.default
        if dataclasses.is_dataclass(default):
            yield from _fields(type(default), name, algorithm)
        elif f"config.{name}" in defaults:
            yield _field(name, meanings[field.name], algorithm)


def _field(name: str, meaning: str, algorithm: str) -> Field:
    if not meaning:
        raise ConfigError(f"{name} has no comment that says what it means: write one next to it")
    allowed = _allowed(algorithm).get(name, "")
    return Field(name, flat(reference(algorithm))[f"config.{name}"], meaning, allowed)


@functools.cache
def _allowed(algorithm: str) -> Mapping[str, str]:
    """The allowed values of each field that has a choice or a range of its own."""
    words = choices(CLASSES[algorithm]) | {"sampler.kind": tuple(KINDS)}
    defaults = flat(reference(algorithm))
    found = {
        name: _range(defaults[f"config.{name}".replace("[i]", "[0]")], *limits)
        for name, limits in RANGES.items()
    }
    return found | {
        name: ", ".join(f"`{_literal(word)}`" for word in allowed)
        for name, allowed in words.items()
    }


def _range(default: float | int, least: float, most: float, excluded: str = "") -> str:
    """A range in the words of a table."""
    if isinstance(default, int) and excluded == "least":
        least, excluded = least + 1, ""
    if math.isinf(most):
        return f"{'>' if excluded == 'least' else '≥'} {least}"
    if math.isinf(least):
        return f"≤ {most}"
    return (
        f"{'(' if excluded == 'least' else '['}{least}, {most}{')' if excluded == 'most' else ']'}"
    )


def _literal(value: Any) -> str:
    """A value as a config file has it."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _algorithms() -> str:
    """The section that depends on the algorithm's name."""
    names = ", ".join(f"`{_literal(name)}`" for name in CLASSES)
    intro = (
        f"`algorithm.name` is one of {names}. It decides which other\nfields the section has; "
        "[algorithms.md](algorithms.md) says which settings make which published method.\n"
    )
    parts = ["## algorithm\n", intro]
    for name, kind in CLASSES.items():
        told = inspect.getmodule(kind).__doc__.splitlines()[0]
        parts += [_part(f"### {name}", told, described("algorithm", name))]
    return "\n".join(parts)


def _part(heading: str, told: str, fields: list[Field]) -> str:
    """A heading, what the section is about, and a table of its fields."""
    rows = "".join(f"{field.row()}\n" for field in fields)
    return f"{heading}\n\n{inspect.cleandoc(told)}\n\n{TABLE}{rows}"


if __name__ == "__main__":
    sys.stdout.write(document())
