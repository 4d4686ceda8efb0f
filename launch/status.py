"""Shows the state of a training run: its progress and the current work or wait of each worker.

python launch/status.py --workdir runs/shapes
python launch/status.py --workdir runs/shapes --follow

The run writes its state to status.json in its workdir every 2 seconds.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib
import shutil
import signal
import sys
import time

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import ConfigError, check_folder
from digen_jax.process.terminal import has_reader

CLEAR = "\x1b[H\x1b[J"  # clears the terminal

_WORKDIR = define_path("workdir", None, "Workdir of a training run.")
_FOLLOW = flags.DEFINE_bool("follow", False, "Refresh every 2 seconds until Ctrl-C.")
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    """Reads status.json and prints it as a table."""
    workdir = pathlib.Path(_WORKDIR.value)
    check_folder("--workdir", workdir)

    from digen_jax.logging.status import EVERY

    if not _FOLLOW.value:
        print(_shown(workdir))
        return
    while True:
        try:
            text = _shown(workdir)
        except ConfigError as error:  # the run may still be starting
            text = str(error)
        print(CLEAR + text if sys.stdout.isatty() else f"{text}\n", flush=True)
        if not has_reader():
            sys.exit(128 + signal.SIGPIPE)
        time.sleep(EVERY)


def _shown(workdir: pathlib.Path) -> str:
    from digen_jax.logging.status import describe, read_status
    from digen_jax.logging.workdir import holder

    state, owner = read_status(workdir), holder(workdir)
    if state is not None:
        columns = shutil.get_terminal_size().columns
        return describe(workdir, state, owner, time.time(), columns)
    if owner is not None:
        return f"{workdir}: process {owner} is starting the run"
    raise ConfigError(
        f"--workdir = {str(workdir)!r} has no status.json: use the workdir of a run that has started its steps"
    )


if __name__ == "__main__":
    run_main(main)
