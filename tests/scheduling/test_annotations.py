"""A few runs with every annotation checked; the other tests of the scheduler do not check them."""

import random

from digen_jax.scheduling.scheduler import Scheduler
from digen_jax.scheduling.settings import Costs, Settings
from tests.scheduling.world import Referee, World


def test_annotations_hold():
    costs = Costs(generate=1.0, train=0.3, decode=0.1, score=0.1)
    common = dict(steps=2, groups=4, images=2, passes=3, evaluate_every=1)
    for plan in (
        Settings(chunk_images=4, updates=2, **common),
        Settings(chunk_images=1, max_incomplete_groups=2, **common),
        Settings(chunk_images=1, max_candidates=7, oversampled_groups=1, **common),
    ):
        scheduler = Scheduler(plan, costs)
        world = World(scheduler, Referee(plan, 1, 0.4), random.Random(1), 0.05, 2)
        world.run()
        world.referee.finish()
        assert Scheduler.resume(scheduler.save()).state.step == plan.steps
