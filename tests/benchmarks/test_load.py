"""What others take of the cores, from the kernel's counters."""

import os
import time

import pytest

from benchmarks.load import Load, between, parse, read, used

BEFORE = """cpu  999 999 999 999 999 0 0 999 0 0
cpu0 100 20 30 5000 10 5 5 40 7 0
cpu1 200 0 100 4000 0 0 0 0 0 0
cpu2 900 0 900 4000 0 0 0 900 0 0
intr 1 2 3
"""
AFTER = """cpu  999 999 999 999 999 0 0 999 0 0
cpu0 300 30 40 5100 10 10 10 90 7 0
cpu1 500 0 200 4100 0 0 0 0 0 0
cpu2 1900 0 900 4000 0 0 0 900 0 0
intr 1 2 3
"""


def test_only_the_counters_of_these_cores_count():
    before, after = (parse(t, {0, 1}, c, 100) for t, c in ((BEFORE, 10.0), (AFTER, 15.0)))
    # cpu0: 160 and 390 ticks, cpu1: 300 and 700; 40 and 90 stolen
    assert (before.busy, before.stolen) == (4.6, 0.4)
    assert (after.busy, after.stolen) == (10.9, 0.9)
    load = between(before, after, 5.8, 2)
    assert load.others == pytest.approx((6.3 - 5.8) / 10)
    assert load.stolen == pytest.approx(0.5 / 10)


@pytest.mark.parametrize(("others", "stolen", "quiet"), [(0.02, 0.01, 1), (0.02, 0.02, 0)])
def test_both_together_must_be_small(others, stolen, quiet):
    assert Load(others, stolen).quiet == bool(quiet)


def test_ones_own_work_is_not_that_of_others():
    assert between(parse(BEFORE, {0}, 0, 100), parse(AFTER, {0}, 5, 100), 9, 1).others == 0


def test_the_kernels_counters_rise_by_what_is_used():
    cores = os.sched_getaffinity(0)
    before, used = read(cores), time.process_time()
    while time.process_time() - used < 0.3:
        pass
    after = read(cores)
    assert after.busy - before.busy >= 0.25  # ticks of 10 ms
    assert after.clock > before.clock


def test_the_time_of_a_process_is_that_which_it_counts_itself():
    before, own = used(os.getpid()), time.process_time()
    while time.process_time() - own < 0.2:
        pass
    assert used(os.getpid()) - before == pytest.approx(time.process_time() - own, abs=0.05)
    assert used(2**30) == 0.0
