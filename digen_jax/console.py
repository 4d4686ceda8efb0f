"""The commands of an installed package: digen-train is launch/train.py, and so on."""

import pathlib
import runpy
import sys


def run() -> None:
    """Runs the launch script that this command is named after, as `python launch/NAME.py` does."""
    name = pathlib.Path(sys.argv[0]).stem.removeprefix("digen-").replace("-", "_")
    runpy.run_module(f"digen_jax.launch.{name}", run_name="__main__", alter_sys=True)
