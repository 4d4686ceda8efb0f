import collections
import itertools

import numpy as np
import pytest

from digen_jax.diffusion.schedule import SchedulerConfig, Window, make_sigmas, random_timesteps
from digen_jax.diffusion.steps import Cps, Dpm2, FlowSde, Ode

SIGMAS = make_sigmas(SchedulerConfig(shift=3.0), 6)
TIMESTEPS = [0, 1, 4, 5, 6, 7, 9, 10, 12]
PINNED = [670, 132, 792, 971, 714, 521]


def small_windows(mode):
    """Every setting for few steps, most of them useless."""
    strides = (1, 2, 3) if mode == "progressive" else (1,)
    limits = range(5), range(-1, 5), range(-1, 8)
    for length, first, end, stride in itertools.product(*limits, strides):
        for roll_back in (True, False) if mode == "progressive" else (True,):
            yield Window(mode, length, first, end, stride=stride, roll_back=roll_back)


def accepted(window, steps):
    try:
        window.check(steps)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("mode", ["fixed", "random", "progressive"])
@pytest.mark.parametrize("steps", [1, 4, 6])
def test_what_is_accepted_stays_inside(mode, steps):
    """And reaches all its places, which are all that fit where it moves by single steps."""
    found = 0
    for window in filter(lambda w: accepted(w, steps), small_windows(mode)):
        found += 1
        starts = {window.start(k) for k in range(100)}
        assert starts == set(window.places)
        end = window.first + window.length if mode == "fixed" else window.end
        fitting = {s for s in range(steps) if window.first <= s and s + window.length <= end}
        assert starts <= fitting and all(s + window.length <= steps for s in starts)
        if window.stride == 1:
            assert starts == fitting
        if window.stride <= window.length:
            trained = {s + j for s in starts for j in range(window.length)}
            assert trained == set(range(window.first, end))
    sizes = {"fixed": 1, "random": 1, "progressive": 2 * 3}
    fixed = sum(1 for s in range(min(5, steps)) for n in range(1, 5) if s + n <= steps)
    moving = sum(
        1
        for first, end in itertools.product(range(5), range(8))
        for n in range(1, 5)
        if first + n <= end <= steps
    )
    assert found == (fixed if mode == "fixed" else moving) * sizes[mode]


@pytest.mark.parametrize("roll_back", [True, False])
def test_progressive_follows_the_papers_loop(roll_back):
    """MixGRPO's algorithm 1 with its counters, for every small setting."""
    for length, room, stride, interval in itertools.product((1, 2, 4), range(6), (1, 2, 3), (1, 3)):
        first, end = 2, 2 + length + room
        settings = dict(interval=interval, stride=stride, roll_back=roll_back)
        window = Window("progressive", length, first, end, **settings)
        place = first
        for k in range(40):
            assert window.start(k) == place
            if (k + 1) % interval == 0:
                over = place == end - length and roll_back
                place = first if over else min(place + stride, end - length)


def test_random_is_uniform_over_the_documented_range():
    """As random.randint(low, high - size): 0, 1 and 2 for Flow-GRPO-Fast's 3 steps within (0, 5)."""
    window = Window("random", length=3, end=5)
    counts = collections.Counter(window.start(k, 7) for k in range(3000))
    assert set(counts) == {0, 1, 2}
    assert all(abs(count - 1000) < 5 * np.sqrt(1000 * 2 / 3) for count in counts.values())
    pairs = collections.Counter((window.start(k, 7), window.start(k + 1, 7)) for k in range(2999))
    assert len(pairs) == 9 and max(pairs.values()) < 1.3 * min(pairs.values())


def test_random_draws_do_not_change_with_versions():
    """A run that is resumed with other package versions must continue with the same windows."""
    drawn = [Window("random", 1, 0, 1000).start(k, 5) for k in range(6)]
    assert drawn == PINNED


def test_an_interval_holds_the_place():
    for mode in ("random", "progressive"):
        slow, fast = (Window(mode, 2, 1, 9, interval=n) for n in (3, 1))
        assert [slow.start(k, 1) for k in range(30)] == [fast.start(k // 3, 1) for k in range(30)]


def test_steps_without_noise_are_refused_wherever_the_window_may_come():
    """The last step of cps has no noise; a progressive window reaches it from time to time."""
    for mode in ("random", "progressive"):
        Window(mode, 2, end=5).check_noise(Cps(0.8), SIGMAS)
        Window(mode, 2, end=6).check_noise(FlowSde(0.7), SIGMAS)
        with pytest.raises(ValueError, match="step 5 of the window"):
            Window(mode, 2, end=6, stride=3).check_noise(Cps(0.8), SIGMAS)
    for solver in (Ode(), Dpm2()):
        with pytest.raises(ValueError, match="ode steps"):
            Window("fixed", 2).check_noise(solver, SIGMAS)


def test_a_share_of_the_timesteps_is_a_uniformly_drawn_subset():
    drawn = [tuple(random_timesteps((5, step), 5, 0.4).tolist()) for step in range(2000)]
    counts = collections.Counter(drawn)
    assert set(counts) == set(itertools.combinations(range(5), 2))  # ascending, all different
    # 2000 draws of 10 subsets: 200 each, with a standard deviation of 13.4
    assert max(abs(count - 200) for count in counts.values()) < 4 * 13.4


def test_the_draw_is_that_of_the_bit_generator_of_the_seed():
    """Fixed values: another version of numpy must not train other steps."""
    assert random_timesteps(3, 15, 0.6).tolist() == TIMESTEPS
    raw = np.random.PCG64(3).random_raw(15).tolist()
    assert sorted(sorted(range(15), key=raw.__getitem__)[:9]) == TIMESTEPS
    np.testing.assert_array_equal(
        random_timesteps([3, 1], 15, 0.6), random_timesteps((3, 1), 15, 0.6)
    )


@pytest.mark.parametrize(
    ("steps", "fraction", "count"),
    [(15, 0.6, 9), (10, 0.55, 5), (100, 0.29, 29), (10, 0.3, 3), (7, 1.0, 7), (3, 0.34, 1)],
)
def test_the_share_is_rounded_down(steps, fraction, count):
    drawn = random_timesteps(0, steps, fraction)
    assert len(set(drawn.tolist())) == len(drawn) == count
    assert drawn.min() >= 0 and drawn.max() < steps


def test_a_share_of_less_than_one_step_is_refused():
    with pytest.raises(ValueError, match=r"^timestep_fraction is 0\.09"):
        random_timesteps(0, 10, 0.09)
