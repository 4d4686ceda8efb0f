"""Command line of a script: checks overrides before the config is read, and reports each error in one line."""

import inspect
import logging
import re
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from absl import app, flags
from ml_collections import ConfigDict

from digen_jax.config.fields import check_known, flat
from digen_jax.errors import ConfigError, check_choice
from digen_jax.files import in_home, shipped
from digen_jax.process import shutdown
from digen_jax.process.terminal import keep_writable

OVERRIDE = re.compile(r"--?(?:no)?(config(?:\.\w+(?:\[[^]=]*\])?)+)(?:=|$)")
PATH = re.compile(r"(-[^=]*=|)([^:]*)(.*)", re.DOTALL)  # option, path, the config's arguments
# Groups of fields that accept a single word, and the field that the word sets.
SHORT_FLAGS = {"config.placement": "config.placement.mode"}
# Options of earlier versions, and their new names.
MOVED_FLAGS = {"pictures": "image_folder", "true_guidance": "true_cfg_scale"}

_OTHER_DEVICES = "install JAX for these devices, check their driver, or unset JAX_PLATFORMS"
# Function of a script, or several by name.
Main = Callable[[], Any] | Mapping[str, Callable[[], Any]]


class _PathParser(flags.ArgumentParser):
    """Parses the path of a file or folder; see `in_home`."""

    def parse(self, argument: str) -> str:
        return in_home(argument)


def define_path(name: str, default: str | None, help_: str, several: bool = False) -> Any:
    """Defines a flag for the path of a file or folder, in which `~` is the home folder.

    If `several`, the flag can be repeated, and its value is a list.
    """
    if several:
        return flags.DEFINE_multi(_PathParser(), flags.ArgumentSerializer(), name, default, help_)
    return flags.DEFINE(_PathParser(), name, default, help_)


# Lists the flag in --help under the script that calls `define_path`.
flags.disclaim_key_flags()


def profiled_steps(text: str | None, steps: int) -> range:
    """Returns the steps of --profile, counted from 1; empty without the option. A run has `steps` steps.

    Raises:
      ConfigError: It is neither a step of the run nor a range that starts with one.
    """
    if text is None:
        return range(0)
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    first, last = map(int, (found[1], found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= min(last, steps):
        raise ConfigError(
            f"--profile={text} must be a step or a range of steps, such as 3 or 3-5, that starts between 1 and "
            f"config.steps = {steps}"
        )
    return range(first, last + 1)


def run_main(main: Main) -> None:
    """Runs a script's `main()` after absl has parsed the flags; a `ConfigError` prints one line and exits with code 2.

    `shutdown.Stopped` also prints one line, with exit code 75, and so does an unhandled Ctrl-C, with exit code 130. A
    device that runs out of memory or is not found by JAX also prints one line, with exit code 2. The process
    does not wait for a hung thread, reports an `os._exit` in user code, and continues if its output is closed,
    such as after `| head`. Characters that a console cannot show are printed as escapes.

    A script with several `main` functions, by name, takes one of these names as its first argument.
    """
    shutdown.end_by_ctrl_c()
    shutdown.guard_exit()  # before a config imports a reward
    keep_writable()
    # It logs a line at the first start on a machine, which users cannot act on.
    logging.getLogger("matplotlib.font_manager").setLevel(logging.WARNING)
    with shutdown.ends_process():
        try:
            # In place, because config_flags searches this list for its overrides.
            sys.argv[:] = expand_args(sys.argv)
            app.run(
                lambda argv: chosen(main, argv[1:])(),
                flags_parser=lambda argv: parse_flags(argv, isinstance(main, Mapping)),
            )
        except (Exception, KeyboardInterrupt) as error:
            # Code that loses a KeyboardInterrupt may fail because of it.
            if isinstance(error, KeyboardInterrupt) or shutdown.interrupted():
                sys.exit(_end("stopped by Ctrl-C", 128 + signal.SIGINT))
            if isinstance(error, ConfigError):
                sys.exit(_end(error.shown(), 2))
            if isinstance(error, shutdown.Stopped):
                sys.exit(_end(str(error), shutdown.STOPPED))
            if message := shutdown.out_of_memory(error):
                sys.exit(_end(f"{message}: {_smaller()}", 2))
            if message := shutdown.no_devices(error):
                sys.exit(_end(f"{message}: {_OTHER_DEVICES}", 2))
            raise


def _end(why: str, code: int) -> int:
    return shutdown.log_fatal(f"{Path(sys.argv[0]).name}: {why}", code)


def _smaller() -> str:
    """Returns the change to suggest for a command whose programs need more memory than a device has."""
    given = flags.FLAGS
    config = given["config"].value if "config" in given else None
    if config is not None and "config.trainer.micro_batch" in flat(config):
        again = "; with the same --workdir a run continues from its last checkpoint"
        return (
            "make config.trainer.micro_batch or config.sampler.chunk smaller, divide the parameters among more "
            "devices (fsdp in config.placement), or set config.model.remat to 'blocks' in a new run"
        ) + again * ("workdir" in given)
    if "batch" in given:
        return "make --batch smaller, or the images"
    return "use devices with more memory, or devices that no other process uses"


def chosen(main: Main, arguments: Sequence[str]) -> Callable[[], Any]:
    """Returns the function selected by the positional arguments of a command line.

    Raises:
      ConfigError: The function is unknown, or there are too many arguments.
    """
    if isinstance(main, Mapping):
        if not arguments:
            raise ConfigError(f"choose what to run: {' or '.join(main)}")
        check_choice("the first argument", arguments[0], main)
        main, arguments = main[arguments[0]], arguments[1:]
    if arguments:
        raise ConfigError(
            f"{arguments[0]!r} does not belong to an option: write --option='its value'"
        )
    return main


def parse_flags(argv: Sequence[str], positional: bool) -> list[str]:
    """Lets absl parse a command line's flags; returns the script's name and the positional arguments.

    A file given by `--config` and its overrides `--config.some.field=value` are checked first,
    because config_flags reports a misspelt field with a traceback.

    Raises:
      ConfigError: A flag or override is unknown, or has an invalid value.
    """
    check_overrides(argv)
    # Otherwise absl stops parsing options at the first positional argument.
    flags.FLAGS.set_gnu_getopt(positional)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        name = getattr(error, "flagname", "")
        if name in MOVED_FLAGS:
            message = f"--{name} is not an option; it is --{MOVED_FLAGS[name]} now"
            raise ConfigError(message) from error
        raise ConfigError(f"{error}; --help lists all options") from error


def expand_args(argv: Sequence[str]) -> list[str]:
    """Replaces a word for a group of fields by the field that it sets, and expands paths.

    `~` in --config=~/x.py is the home folder; files of the package, such as configs/shapes_demo.py, are found from any
    folder.
    """

    def argument(text: str) -> str:
        name, _, value = text.partition("=")
        field = SHORT_FLAGS.get(name.lstrip("-"))
        if field and re.fullmatch(r"\w+", value):
            return f"--{field}={value}"
        option, path, rest = cast(re.Match, PATH.fullmatch(text)).groups()
        path = in_home(path) if name.lstrip("-") == "config" else path
        return f"{option}{shipped(path)}{rest}"

    return [argument(text) for text in argv]


def check_overrides(argv: Sequence[str]) -> None:
    """Checks that the file given by `--config`, if any, exists and has every overridden field.

    Raises:
      ConfigError: Names the missing file, or the unknown field and the closest known one.
    """
    path = _config_path(argv)
    if path is None:
        return
    name, *argument = path.split(":", 1)
    file = Path(name)
    if not file.is_file():
        raise ConfigError(f"there is no config file {file}: set --config to an existing file")
    read = runpy.run_path(str(file)).get("get_config")
    if read is None:
        raise ConfigError(f"{file} has no function get_config(): add it")
    try:
        inspect.signature(read).bind(*argument)
    except TypeError as error:
        given = f"takes no argument {argument[0]!r}" if argument else "needs an argument"
        right = f"{file}{'' if argument else ':ARGUMENT'}"
        raise ConfigError(f"get_config of {file} {given}: write --config={right}") from error
    fields = flat(read(*argument))
    overrides = [found for found in map(OVERRIDE.match, argv) if found]
    for override in overrides:
        check_known(override[1], fields)
        _check_group(override[1], override.string[override.end() :], fields)
    _check_rewards(overrides)


def _check_rewards(overrides: Sequence[re.Match[str]]) -> None:
    """Refuses a list of rewards in one option with section fields in another, and sections without a list."""
    given = {name[1]: name.string[name.end() :] for name in overrides}
    parts = [name for name in given if name.startswith("config.rewards[")]
    if "config.rewards" in given and (parts or given["config.rewards"].startswith("{")):
        what = f"replaces the list that --{parts[0]} is about" if parts else "must be a list"
        raise ConfigError(
            f"--config.rewards={given['config.rewards']} {what}: give the complete list in one option, such as "
            "--config.rewards=\"({'name': 'shapes_geneval', 'weight': 0.5}, 'my_rewards:redness')\""
        )


def _config_path(argv: Sequence[str]) -> str | None:
    """Returns the value of the last `--config=path` or `--config path`, as absl parses it."""
    given = None
    for argument, following in zip(argv, [*argv[1:], None], strict=True):
        if argument in ("-config", "--config"):
            given = following
        elif match := re.match(r"--?config=(.*)", argument):
            given = match[1]
    return given


def _check_group(name: str, given: str, fields: dict[str, Any]) -> None:
    """Refuses a single value for a group of fields; a dict of all of them in braces is accepted."""
    if isinstance(fields.get(name), ConfigDict) and given and not given.startswith("{"):
        some = next(iter(fields[name]), "field")
        each = f"set each by its name, such as --{name}.{some}=..."
        raise ConfigError(f"{name} is a group of fields, not {given}: {each}")
