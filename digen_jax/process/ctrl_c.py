"""Ends the process at Ctrl-C from a script's first line on: scripts and commands import this module first.

Until `interrupt.end_by_ctrl_c` takes over nothing has to be cleaned up.
"""

import os
import signal
import sys
from os import _exit  # unguarded: see `shutdown.guard_exit`


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, f"{os.path.basename(sys.argv[0])}: stopped by Ctrl-C\n".encode())
    finally:
        _exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)


def run_installed() -> None:
    """Runs the launch script that a command of the installed package is named after, as digen-train launch/train.py."""
    import runpy

    name = os.path.splitext(os.path.basename(sys.argv[0]))[0].removeprefix("digen-")
    runpy.run_module(f"digen_jax.launch.{name.replace('-', '_')}", None, "__main__", True)
