"""Errors in user input as one message that names what to change; checks and value ranges of config fields.

A config field states its range in its type: `steps: PositiveInt = 100`. Checks run before anything slow.

Invalid input raises `ConfigError`, which `command_line.run_main` prints without a traceback. Other errors are bugs and
keep their traceback.
"""

import contextlib
import dataclasses
import difflib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

# Random keys have 32-bit seeds: the upper bits of a larger seed would be dropped silently.
LARGEST_SEED = 2**32 - 1
# Pixels per side of an image: a larger value is a typing error and would not fit into memory.
LARGEST_SIDE = 2**14
LONGEST = 2**10  # frames of a clip


class ConfigError(ValueError):
    """Invalid user input; the message states what is wrong and what to change.

    Each of several errors found by `collect_errors` is one argument and one line of the message.
    """

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        messages = [" ".join(message.split()) for message in self.args]
        return "\n  ".join([f"{len(messages)} errors:", *messages])

    def shown(self) -> str:
        """Text that a script prints: one message on one line."""
        return str(self) if len(self.args) > 1 else " ".join(str(self).split())


class FieldError(ConfigError):
    """A ConfigError whose message already names its field; `prefix_errors` leaves it unchanged."""


@contextlib.contextmanager
def prefix_errors(
    field: str, errors: tuple[type[Exception], ...] = (ValueError, OSError)
) -> Iterator[None]:
    """Prefixes error messages in a block with the config field that they concern."""
    try:
        yield
    except FieldError:
        raise
    except errors as error:
        messages = error.args if isinstance(error, ConfigError) else [error]
        raise ConfigError(*(" ".join(f"{field}{one}".split()) for one in messages)) from error


def user_input() -> contextlib.AbstractContextManager:
    """Converts errors in reading user input (files, folders, a reward) to `ConfigError`.

    Wrap only code whose ValueError, ImportError, AttributeError or OSError is about that input.
    """
    return prefix_errors("", (ValueError, ImportError, AttributeError, OSError))


@contextlib.contextmanager
def collect_errors() -> Iterator[Callable[[], contextlib.AbstractContextManager]]:
    """Collects the errors of several checks, so that a user sees all of them at once.

        with collect_errors() as one:
            for name in names:
                with one():
                    check_positive(name, values[name])

    The code inside `one` must not depend on an earlier check.

    Raises:
      ConfigError: After the block, the only error raised in it, or one with all messages.
    """
    errors: list[ConfigError] = []

    @contextlib.contextmanager
    def one() -> Iterator[None]:
        try:
            yield
        except ConfigError as error:
            errors.append(error)

    with one():
        yield one
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(*dict.fromkeys(message for error in errors for message in error.args))


def check_positive(name: str, value: float | int) -> None:
    """Refuses a value that is not above 0, NaN included."""
    if not value > 0:
        raise ConfigError(f"{name} must be above 0, not {value!r}")


def check_range(
    name: str, value: float | int, least: float, most: float = math.inf, excluded: str = ""
) -> None:
    """Refuses NaN, and values below `least`, above `most` or at the end `excluded`, "least" or "most"."""
    if least <= value <= most and value != {"least": least, "most": most}.get(excluded):
        return
    bound = f"above {least}" if excluded == "least" else f"{least} or more"
    if excluded == "most":
        bound = f"in [{least}, {most})"
    elif value > most:
        bound = f"at most {most}"
    raise ConfigError(f"{name} must be {bound}, not {value!r}")


def check_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Refuses a value that is not among the choices, and names the closest choice."""
    if value in choices:
        return
    close = difflib.get_close_matches(str(value), map(str, choices), n=1)
    hint = f"did you mean {close[0]!r}? It" if close else "it"
    raise ConfigError(f"{name} is {value!r}; {hint} must be one of {', '.join(map(repr, choices))}")


def check_divides(name_a: str, a: int, name_b: str, b: int, why: str) -> None:
    """Refuses an `a` that does not divide `b`; `why` ends the message."""
    if b % a:
        nearest = " or ".join(map(str, sorted({max(a, b - b % a), b - b % a + a})))
        must = f"{name_a} = {a} must divide {name_b} = {b}"
        raise ConfigError(f"{must}, {why}: set {name_b} to {nearest}, or change {name_a}")


def check_output(name: str, path: str | Path, folder: bool = False) -> None:
    """Refuses a file (or a `folder`) that cannot be written; call it before computing the content.

    Does not create missing folders; an existing file would be replaced. Links are followed.
    """
    if not str(path):
        raise ConfigError(f"{name} is empty: give the name of a {'folder' if folder else 'file'}")
    given, kind = Path(path), "folder" if folder else "file"
    path = Path(os.path.realpath(given))
    above = next(p for p in (path, *path.parents) if p.exists() or p.is_symlink())
    written = path.parent if above == path and not folder else above  # a file is replaced
    wrong = ""
    if given.exists() and not (given.is_file() or given.is_dir()):
        wrong = f"is a device or a pipe: give the name of a {kind}"
    elif above.is_symlink():
        wrong = "is a link to itself: delete it, or give another name"
    elif above == path and path.is_dir() != folder:
        wrong = f"is a {'file' if folder else 'folder'} already: give the name of a {kind}"
    elif above != path and not above.is_dir():
        wrong = f"is inside {above}, which is a file: choose another path"
    elif not os.access(written, os.W_OK):
        wrong = f"cannot be written, as {written} is not writable: choose another path"
    if wrong:
        raise ConfigError(f"{name} = {str(given)!r} {wrong}")


def check_no_images(name: str, folder: str | Path) -> None:
    """Refuses a folder with images of an earlier command, which would mix with new ones."""
    for pattern in ("*.png", "guidance_*/*.png"):
        if found := next(Path(folder).glob(pattern), None):
            has = f"{name} = {str(folder)!r} has images already, such as {found.name}"
            raise ConfigError(f"{has}: choose another folder, or delete them")


def check_folder(name: str, path: str | Path) -> None:
    """Refuses a path that is not an existing folder."""
    if not Path(path).is_dir():
        wrong = "a file, not a folder" if Path(path).exists() else "no folder"
        raise ConfigError(f"{name} = {str(path)!r} is {wrong}: set it to a folder that exists")


class DivergedError(ArithmeticError):
    """Names a value that is not finite, as the start of a message, such as "gradient_norm is nan"."""


def check_metrics(metrics: Mapping[str, float]) -> None:
    """Raises DivergedError if a metric of a step is not finite; names losses and norms first.

    The norms of gradient and update are finite only if every parameter is.
    """
    wrong = {name: value for name, value in metrics.items() if not math.isfinite(value)}
    first = [name for name in ("loss", "gradient_norm", "update_norm") if name in wrong]
    if wrong:
        name = [*first, *wrong][0]
        raise DivergedError(f"{name} is {wrong[name]}")


@dataclasses.dataclass(frozen=True)
class Range:
    """Range of a number."""

    least: float = -math.inf
    most: float = math.inf  # infinity itself is allowed only if `infinite`
    excluded: Literal["", "least", "most"] = ""  # end that is not included
    infinite: bool = False

    def check(self, name: str, value: float | int) -> None:
        """Raises ConfigError if a value of the field `name` is outside the range."""
        is_finite = not isinstance(value, float) or math.isfinite(value)
        if not is_finite and (math.isnan(value) or not self.infinite):
            raise ConfigError(f"{name} must be a finite number, not {value!r}")
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
ANY = Range()  # all finite numbers
PositiveInt = Annotated[int, Range(1)]
Count = Annotated[int, Range(0)]
PositiveFloat = Annotated[float, Range(0, excluded="least")]
NonNegativeFloat = Annotated[float, Range(0)]
Scale = Annotated[float, Range(0, 1000)]  # guidance scale
Decay = Annotated[float, Range(0, 1, "most")]
Share = Annotated[float, Range(0, 1)]


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
        elif isinstance(plain, type) and dataclasses.is_dataclass(plain):
            yield from allowed_values(plain, f"{name}.")
        elif plain is float:
            yield name, ANY
