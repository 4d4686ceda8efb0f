"""Write one HTML file about a run, which opens without a network: curves, pictures, tables, timeline, configuration.

python launch/report.py --workdir runs/shapes

The run may still go on. With several workdirs, such as of several seeds, curves are means with bands:

python launch/report.py --workdir runs/seed0 --workdir runs/seed1 --output runs/seeds.html
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import pathlib

from absl import flags

from digen_jax.config.command_line import define_path, run_main
from digen_jax.errors import blame, check_folder, check_output

_WORKDIR = define_path(
    "workdir", None, "The workdir of a training run; again for each further one.", several=True
)
_OUTPUT = define_path(
    "output", None, "The HTML file to write; by default report.html in the first workdir."
)
flags.mark_flags_as_required(["workdir"])


def main() -> None:
    """Read the workdirs and write the page."""
    workdirs = list(map(pathlib.Path, _WORKDIR.value))
    for workdir in workdirs:
        check_folder("--workdir", workdir)
    given = _OUTPUT.value
    output = str(workdirs[0] / "report.html") if given is None else given
    check_output("--output", output)

    from digen_jax.logging.report_page import write_report

    with blame("--output: ", (OSError,)):
        size = write_report(workdirs, pathlib.Path(output))
    pictures = (size.whole - size.without_pictures) / 1e6
    print(f"{output}: {size.without_pictures / 1e6:.2f} MB and {pictures:.2f} MB of pictures")


if __name__ == "__main__":
    run_main(main)
