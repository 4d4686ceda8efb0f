"""launch/train.py on a disk that is slow: `python -m tests.run.slow_disk` takes that script's options."""

import functools
import os
import runpy
import sys
import time

from tests.pipelines import ROOT

SECONDS = 0.5


def slow(call):
    """The same, after a while."""

    @functools.wraps(call)
    def later(*arguments, **options):
        time.sleep(SECONDS)
        return call(*arguments, **options)

    return later


if __name__ == "__main__":
    for name in ("fsync", "rename", "replace"):
        setattr(os, name, slow(getattr(os, name)))
    sys.argv[0] = str(ROOT / "launch" / "train.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
