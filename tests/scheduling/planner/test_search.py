"""The search against all proposals, tried one by one, and against closed forms."""

import functools
import itertools
import math
import random

import pytest

from digen_jax.scheduling.planner.problem import Problem, Scaling
from digen_jax.scheduling.planner.search import Simulations, budget, search
from digen_jax.scheduling.planner.simulate import Disturbance, Layout, Mesh, simulate
from digen_jax.scheduling.planner.space import proposals
from digen_jax.scheduling.settings import Costs, Settings
from tests.cases import quick

FRAGMENTS, DEVICES = 8, 8


def random_problem(seed):
    """Eight devices, generation and training from 1:8 to 8:1, and losses of every kind."""
    draw = random.Random(seed)
    images = draw.choice([1, 2])
    settings = Settings(
        1,
        groups=FRAGMENTS // draw.choice([1, images]),
        images=images,
        fragment_images=1,
        updates=draw.choice([1, 1, 2]),
        stale_share=draw.choice([0.25, 0.5]),
        tag_fragments=draw.choice([2, 16]),
    )
    costs = Costs(
        generate=2 ** draw.uniform(-3, 3),
        train=1.0,
        encode=draw.choice([0.0, 0.1]),
        score=draw.choice([0.01, 0.1]),
        score_latency=draw.choice([0.0, 0.3]),
        update=draw.choice([0.02, 0.2]),
        publish=draw.choice([0.02, 0.4]),
        switch=draw.choice([0.02, 0.3]),
    )
    worker, trainer = Scaling(draw.choice([0.0, 0.03])), Scaling(draw.choice([0.02, 0.1]))
    return Problem(DEVICES, settings, costs, worker, trainer, 4, scorers=draw.choice([0, 2]))


def exhaustive(problem):
    """(the shortest step of all, how many proposals there are), by nested loops over whole numbers."""
    settings, costs, count = problem.settings, problem.costs, 0

    @functools.cache
    def seconds(workers, size, trainer, longest, readiness, tags, staleness):
        def amdahl(serial, n):
            return serial + (1 - serial) / n

        # `longest` of four steps are a device's, and its share of the images.
        linear = trainer[0] * 4 / longest
        train = costs.train * amdahl(problem.trainer.serial, linear)
        own = Costs(**vars(costs) | {"train": train, "publish": costs.publish if size else 0.0})
        fields = {"readiness": readiness, "tag_fragments": tags, "staleness": staleness}
        mesh = Mesh(size, 1 / amdahl(problem.worker.serial, size)) if size else None
        n = trainer[0] * trainer[1]
        layout = Layout(Mesh(n, 1 / amdahl(problem.worker.serial, n)), (mesh,) * workers)
        return simulate(
            layout,
            own,
            Settings(**{**vars(settings), **fields}),
            8,
            Disturbance(scorers=problem.scorers),
        ).step_seconds

    best = math.inf
    for data, time in itertools.product(range(1, DEVICES + 1), range(1, 5)):
        rest = DEVICES - data * time
        if rest < 0:
            continue
        longest = math.ceil(4 / time)
        # Axes of equal use give equal steps: one simulation for all of them.
        mesh = (data, time) if 4 % time else (data * time, 1)
        longest = longest if 4 % time else 4
        if rest == 0:
            count += 1
            # All generated, it trains each group as it is scored, with the weights it has.
            best = min(best, seconds(0, 0, mesh, longest, settings.readiness, 0, 0))
        for size in range(1, rest + 1):
            if rest % size == 0:
                for readiness, tags, staleness in itertools.product(
                    ("step", settings.readiness), (0, settings.tag_fragments), (0, 1)
                ):
                    count += 1
                    arguments = (rest // size, size, mesh, longest, readiness, tags, staleness)
                    best = min(best, seconds(*arguments))
    return best, count


@pytest.mark.parametrize("seed", quick([(0,), (1,)], 0))
def test_the_choice_is_within_1_percent_of_the_best_after_5_percent_of_the_simulations(seed):
    problem = random_problem(seed)
    simulations, found = Simulations(problem), proposals(problem)
    chosen = search(simulations, found, budget(found))
    best, count = exhaustive(problem)
    assert len(found) == count
    assert simulations.count <= 0.05 * count
    assert best * (1 - 1e-9) <= chosen.step_seconds <= 1.01 * best


def frictionless(ratio):
    """64 fragments on 32 devices; costs in device-seconds a fragment."""
    settings = Settings(1, 64, 1, 1, tag_fragments=64)
    return Problem(32, settings, Costs(generate=ratio, train=1.0))


@functools.cache
def chosen_split(ratio):
    problem = frictionless(ratio)
    found = [c for c in proposals(problem) if c.worker_devices == 1]
    simulations = Simulations(problem)
    chosen = search(simulations, found, budget(found))
    assert simulations.count <= 0.05 * len(found)
    return chosen


RATIOS = [1 / 4, 8]


@pytest.mark.parametrize("ratio", quick([(ratio,) for ratio in RATIOS], 0))
def test_without_friction_the_chosen_split_reaches_98_percent_of_the_bound(ratio):
    chosen = chosen_split(ratio)
    bound = 64 * (ratio + 1) / 32
    assert 0.98 <= bound / chosen.step_seconds <= 1 + 1e-9
    assert chosen.utilisation == pytest.approx(bound / chosen.step_seconds)
    assert chosen.images_per_device_second == pytest.approx(64 / 32 / chosen.step_seconds)
    assert chosen.proposal.workers and chosen.staleness <= 0.5
    if ratio == 1 / 4:
        assert chosen.proposal.tag


@pytest.mark.parametrize("ratio", quick([(ratio,) for ratio in RATIOS], 0))
def test_it_is_faster_than_plain_disaggregation_by_the_formula(ratio):
    # Generate all, then train, at its best split: in whole devices and fragments, and as a formula.
    whole = min(math.ceil(64 / n) * ratio + 64 / (32 - n) for n in range(1, 32))
    formula = 64 * (1 + math.sqrt(ratio)) ** 2 / 32
    assert whole >= formula * (1 - 1e-9)
    factor = 0.97 * (1 + 2 * math.sqrt(ratio) / (1 + ratio))
    assert formula / chosen_split(ratio).step_seconds >= factor


def test_tactics_that_gain_nothing_are_left_out():
    # Four workers keep the trainer of four busy in rounds, but the last round costs a hundredth.
    settings = Settings(1, 32, 1, 1, tag_fragments=32)
    problem = Problem(8, settings, Costs(generate=1e-4, train=1.0))
    found = [c for c in proposals(problem) if c.workers]
    chosen = search(Simulations(problem), found, budget(found))
    assert chosen.proposal.tactics == ()
    assert chosen.proposal.trainer == 7
