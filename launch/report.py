"""Writes an HTML report of a run to a single file, without network access: curves, images, tables, timeline, config.

python launch/report.py --workdir runs/shapes

The run may be in progress. With several workdirs, for example of several seeds, curves are means with bands:

python launch/report.py --workdir runs/seed0 --workdir runs/seed1 --output runs/seeds.html
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import check_folder, check_output, prefix_errors

_WORKDIR = define_path(
    "workdir", None, "Workdir of a training run; repeat for several runs.", several=True
)
_OUTPUT = define_path("output", None, "Output file (default: report.html in the first workdir).")
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    """Reads the workdirs and writes the report."""
    workdirs = list(map(pathlib.Path, _WORKDIR.value))
    for workdir in workdirs:
        check_folder("--workdir", workdir)
    output = _OUTPUT.value
    if output is None:
        output = str(workdirs[0] / "report.html")
    check_output("--output", output)

    from digen_jax.logging.report import write_report

    with prefix_errors("--output: ", (OSError,)):
        images, rest = write_report(workdirs, pathlib.Path(output))
    print(f"{output}: {rest / 1e6:.2f} MB and {images / 1e6:.2f} MB of images")


if __name__ == "__main__":
    run_main(main)
