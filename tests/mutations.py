"""Mistakes of the kinds that families are prone to, each of which some test must catch.

python tests/mutations.py                the mutations of all families
python tests/mutations.py flux zimage    those of some
python tests/mutations.py --list         what they change, and the tests that must fail

Each is applied to a copy of the tree in a temporary folder, where its tests then run. The exit status is 1 if a
mutation is not caught, or if its text is not found exactly once. The rows of a family are in
tests/models/FAMILY/mutations.py; one with such a file is among them.
"""

import argparse
import contextlib
import importlib
import itertools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # as a script its own folder is the first place
# Of the tree: what tests change or import, and what they only read.
COPIED, LINKED = ("digen_jax", "tests", "pyproject.toml"), ("assets", "configs", "docs", "launch")


class Mutation(NamedTuple):
    """A mistake: `old` becomes `new` in a file, and one of the tests must fail."""

    family: str
    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def check(self) -> None:
        """Raises ValueError unless the text is found exactly once."""
        count = (ROOT / self.file).read_text().count(self.old)
        if count != 1:
            raise ValueError(
                f"{self.family}, {self.name}: {self.file} has {self.old!r} {count} times, not once"
            )


def read(family: str) -> tuple[Mutation, ...]:
    """The rows of tests/models/FAMILY/mutations.py."""
    rows = importlib.import_module(f"tests.models.{family}.mutations").MUTATIONS
    return tuple(Mutation(family, *row) for row in rows)


FAMILIES = tuple(path.parent.name for path in sorted(ROOT.glob("tests/models/*/mutations.py")))
MUTATIONS = tuple(itertools.chain.from_iterable(map(read, FAMILIES)))


def copy_tree(target: pathlib.Path) -> None:
    """The parts of the tree that the tests need."""
    ignore = shutil.ignore_patterns("__pycache__")
    for name in COPIED:
        copy = shutil.copy if (ROOT / name).is_file() else shutil.copytree
        copy(ROOT / name, target / name, **({} if copy is shutil.copy else {"ignore": ignore}))
    for name in LINKED:
        (target / name).symlink_to(ROOT / name)


def run_tests(tree: pathlib.Path, tests: Sequence[str], deadline: float) -> tuple[int | None, str]:
    """(pytest's exit status, or None after the deadline; what it printed) of some tests in a copy of the tree."""
    # A mutated file may have the size and the second of the one before it, so that old bytecode would be taken.
    own = {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    own["JAX_COMPILATION_CACHE_DIR"] = str(ROOT / ".cache" / "xla")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "--durations=0"]
    process = subprocess.Popen(
        [*command, "-m", "not slow and not tpu", *tests],
        cwd=tree,
        env=os.environ | own,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=deadline)
    except subprocess.TimeoutExpired:
        output, status = "", None
    else:
        status = process.returncode
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status, output


def verdict(status: int | None, deadline: float) -> str:
    """In words; pytest's exit status is 1 if tests ran and failed."""
    if status == 1:
        return "caught"
    return "NOT CAUGHT" + {
        None: f": no end after {deadline:g} s",
        0: "",
    }.get(status, f": pytest could not run the tests (exit status {status})")


def run(mutations: Sequence[Mutation], deadline: float) -> list[Mutation]:
    """Tries the mutations one after the other; returns those that were not caught."""
    missed = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = pathlib.Path(folder) / "tree"
        tree.mkdir()
        copy_tree(tree)
        tests = list(dict.fromkeys(test for mutation in mutations for test in mutation.tests))
        print(f"{len(tests)} tests without a mutation ...", end=" ", flush=True)
        # As many processes' time in one.
        status, output = run_tests(tree, tests, deadline * len(tests))
        if status != 0:
            sys.exit(f"they must pass first (exit status {status}):\n{output[-3000:]}")
        print("pass", flush=True)
        for place, mutation in enumerate(mutations, 1):
            label = f"[{place}/{len(mutations)}] {mutation.family}, {mutation.name}"
            print(label, end=" ... ", flush=True)
            began, path = time.monotonic(), tree / mutation.file
            text = path.read_text()
            path.write_text(text.replace(mutation.old, mutation.new))
            status, _ = run_tests(tree, mutation.tests, deadline)
            path.write_text(text)
            print(f"{verdict(status, deadline)} ({time.monotonic() - began:.0f} s)", flush=True)
            if status != 1:
                missed.append(mutation)
    return missed


def main() -> None:
    """Read the command line, try the mutations, and end with status 1 if one was not caught."""
    parser = argparse.ArgumentParser(description="Mistakes that tests must catch.")
    parser.add_argument("families", nargs="*", help=f"of {', '.join(FAMILIES)}; default: all")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for a mutation")
    given = parser.parse_args()
    if unknown := set(given.families) - set(FAMILIES):
        parser.error(f"no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    chosen = [m for m in MUTATIONS if m.family in (given.families or FAMILIES)]
    if given.list:
        for mutation in chosen:
            print(f"{mutation.family}, {mutation.name}: {mutation.file}")
            print(f"    {mutation.old}\n -> {mutation.new}\n    {' '.join(mutation.tests)}")
        return
    try:
        for mutation in chosen:
            mutation.check()
    except ValueError as error:
        sys.exit(str(error))
    missed = run(chosen, given.deadline)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations are caught")
    for mutation in missed:
        print(f"not caught: {mutation.family}, {mutation.name} ({mutation.file})")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
