"""Ranges of config fields, stated in their types: `steps: PositiveInt = 100`."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from digen_jax.errors import check_choice, check_finite, check_range


@dataclasses.dataclass(frozen=True)
class Range:
    """Range of a number.

    Attributes:
      least: Smallest value.
      most: Largest value; infinity itself is allowed only if `infinite`.
      excluded: End that is not included, "least" or "most".
      infinite: Whether infinity is allowed.
    """

    least: float = -math.inf
    most: float = math.inf
    excluded: Literal["", "least", "most"] = ""
    infinite: bool = False

    def check(self, name: str, value: float | int) -> None:
        """Raises ConfigError if a value of the field `name` is outside the range."""
        check_finite(name, value, self.infinite)
        check_range(name, value, self.least, self.most, self.excluded)

    def __str__(self) -> str:
        """Returns the range as an interval or bound, such as [0, 1) or > 0."""
        if math.isinf(self.least) and math.isinf(self.most):
            return ""
        if math.isinf(self.most):
            return f"{'>' if self.excluded == 'least' else '≥'} {self.least}"
        if math.isinf(self.least):
            return f"≤ {self.most}"
        first = "(" if self.excluded == "least" else "["
        return f"{first}{self.least}, {self.most}{')' if self.excluded == 'most' else ']'}"


# Metadata of a dataclass field that is derived from other sections and not set by a config.
DERIVED = {"derived": True}
ANY = Range()
PositiveInt = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, excluded="least")]
NonNegativeFloat = Annotated[float, Range(0)]
Scale = Annotated[float, Range(0, 1000)]  # guidance scale
Decay = Annotated[float, Range(0, 1, "most")]


def allowed_values(kind: type, path: str = "") -> Iterator[tuple[str, tuple[Any, ...] | Range]]:
    """Yields (dotted name, choices or range) of the fields of a dataclass and of nested dataclasses.

    A field whose type is a `Literal` has choices; numbers have a range, by default all finite numbers.
    """
    for field in dataclasses.fields(kind):
        hint = get_type_hints(kind, include_extras=True)[field.name]
        name, plain = f"{path}{field.name}", getattr(hint, "__origin__", hint)
        if get_origin(hint) is Literal:
            yield name, get_args(hint)
        elif get_origin(hint) is Annotated:
            yield name, hint.__metadata__[0]
        elif dataclasses.is_dataclass(plain):
            yield from allowed_values(plain, f"{name}.")
        elif plain is float:
            yield name, ANY


def check_allowed(name: str, value: Any, allowed: tuple[Any, ...] | Range) -> None:
    """Raises ConfigError if `allowed_values` does not allow a value of the field `name`."""
    if isinstance(allowed, Range):
        allowed.check(name, value)
    else:
        check_choice(name, value, allowed)
