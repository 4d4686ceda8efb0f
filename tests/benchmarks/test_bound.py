"""The scheduler's shares of the bound, at eight devices; the command measures them at more."""

import pytest

from benchmarks.bound import LIMIT, RATIOS, SCENARIOS, SIZES, simulated

POOLS = [one for one in SCENARIOS if one.layout != "colocated" and 8 in one.sizes]
(COLOCATED,) = (one for one in SCENARIOS if one.layout == "colocated")


@pytest.mark.parametrize("scenario", POOLS, ids=[one.name for one in POOLS])
@pytest.mark.parametrize("ratio", ["1:8", "8:1"])
def test_a_pool_reaches_the_share_that_is_required(scenario, ratio):
    share = simulated(scenario, SIZES[0], RATIOS[ratio], 0.2, seed=0)
    assert scenario.required <= share <= LIMIT


def test_colocated_devices_wait_for_the_slowest_one():
    # The largest of eight uniform factors from 0.8 to 1.2 is 1.156 in the mean.
    share = simulated(COLOCATED, SIZES[0], 1.0, 0.2, seed=0)
    assert share == pytest.approx(1 / 1.156, rel=0.02)
    assert simulated(COLOCATED, SIZES[0], 1.0, 0.0, seed=0) > 0.99
