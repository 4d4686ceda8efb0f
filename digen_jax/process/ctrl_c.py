"""Exits on Ctrl-C without a traceback from a script's first line on. Scripts and commands import this module first.

Nothing needs cleanup until `shutdown.end_by_ctrl_c` takes over.
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
    """Entry point of installed commands: runs the launch script of the same name (digen-train: launch/train.py)."""
    import runpy

    name = os.path.splitext(os.path.basename(sys.argv[0]))[0].removeprefix("digen-")
    runpy.run_module(f"digen_jax.launch.{name.replace('-', '_')}", None, "__main__", True)
