"""Prints the size of the code base, and fails beyond its limits.

python tools/size.py
python tools/size.py --run  # also trains one step of the demo, to count the modules that it imports

The limits fall with each step towards the targets: lower them when the code gets smaller, and never raise them.
"""

import argparse
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[1]
CODE = "digen_jax", "launch", "configs", "benchmarks", "examples", "tools"
# Current limit and target of each measure.
LIMITS = {
    "Python lines without tests": (54_576, 36_000),
    "package files": (170, 220),
    "test lines": (42_549, 28_000),
    "README lines": (120, 120),
    "imported modules": (87, 50),
}
# Counts imported modules of the package once a run has made its first update.
COUNT = """
import atexit, runpy, sys
sys.argv = ["launch/train.py", *{arguments!r}]
files = lambda: [m.__file__ for n, m in sys.modules.items() if n.split(".")[0] == "digen_jax" and m.__file__]
count = lambda: sum(len(open(file).readlines()) > 1 for file in files())
atexit.register(lambda: print("imported modules", count()))  # a run ends by os._exit
runpy.run_path("launch/train.py", run_name="__main__")
"""


def python_files(*folders: str) -> list[pathlib.Path]:
    """Returns the Python files of some folders of the repository."""
    return sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py"))


def lines(files: list[pathlib.Path]) -> list[int]:
    """Returns the number of lines of each file."""
    return [len(file.read_text().splitlines()) for file in files]


def measured() -> dict[str, int]:
    """Returns all measures that need no run."""
    tests = python_files("tests")
    code = [*python_files(*CODE), *ROOT.glob("*.py")]
    package = [count for count in lines(python_files("digen_jax")) if count > 1]
    print(f"median package file: {statistics.median(package):.0f} lines")
    return {
        "Python lines without tests": sum(lines(code)),
        "package files": len(package),
        "test lines": sum(lines(tests)),
        "README lines": lines([ROOT / "README.md"])[0],
    }


def imported_modules() -> int:
    """Returns the number of package modules that one step of the demo imports in one process."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "--config=configs/shapes_demo.py",
            f"--workdir={folder}/run",
            "--config.steps=1",
        ]
        command = [sys.executable, "-c", COUNT.format(arguments=arguments)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return int(re.findall(r"^imported modules (\d+)$", run.stdout, re.MULTILINE)[0])


def main() -> None:
    """Prints the table; exits with 1 if a measure is above its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", action="store_true", help="count the modules that a run imports")
    found = measured()
    if parser.parse_args().run:
        found["imported modules"] = imported_modules()
    for name, value in found.items():
        limit, target = LIMITS[name]
        state = "" if value <= limit else "  beyond the limit"
        print(f"{name:28} {value:7,}  limit {limit:7,}  target {target:7,}{state}")
    sys.exit(any(value > LIMITS[name][0] for name, value in found.items()))


if __name__ == "__main__":
    main()
