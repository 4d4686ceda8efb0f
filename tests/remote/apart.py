"""A run of a system whose rollout meshes are apart: a leader, and a thread for each of them, in one process.

Between them are gRPC streams and links by bytes, as between processes.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from ml_collections import ConfigDict

from digen_jax.config.recipe import Recipe
from digen_jax.engine.placement import Placement
from digen_jax.engine.sampler import EncodedPrompts
from digen_jax.engine.system import Rollout, System
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import join, lead
from digen_jax.remote.outline import nodes
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.wire import Wire
from digen_jax.rewards import alone
from digen_jax.rewards.pool import RewardPool
from digen_jax.run.driving import scheduled
from digen_jax.run.meshes import Meshes
from digen_jax.run.roles import Trains
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.evaluation import HeldOut
from digen_jax.runtime.judging import Judge
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from tests.engine import toy
from tests.remote.mesh_process import IDENTITY

KNOWN = nodes(EncodedPrompts(toy.Conditioning(0, 0), toy.Conditioning(0, 0)))
SECONDS = 60.0  # for a mesh to join


def leading(system: System) -> System:
    """The system as the trainer's process has it: its rollout meshes are elsewhere."""
    first, trainer = system.rollouts[0], system.placement.trainer
    return system._replace(
        rollouts=(),
        placement=Placement((), trainer, len(system.rollouts)),
        sampling_on=lambda group: first.moved(group, system.policy.sampler_base(system.base)),
    )


class Mesh:
    """A rollout mesh's part of a run, as its process does it, with steps and rewards of its own."""

    def __init__(self, rollout: Rollout, name: str, recipe: Recipe, reward: Any, held_out: Any):
        self._rollout, self._name, self._recipe = rollout, name, recipe
        self._reward, self._held_out = reward, held_out

    def sample(self, leader: str) -> None:
        """Samples for the leader at an address until it ends the run."""
        size = self._rollout.group.mesh.size
        joining = join(Wire(IDENTITY), leader, self._name, size, "127.0.0.1", KNOWN, None, SECONDS)
        opened = contextlib.closing(RewardPool(alone("mine", self._reward), 0))
        with opened as pool, joining as (following, link):
            serve(following, self._sampling(link, following.welcome.step, pool))

    def _sampling(self, link: RemoteLink, first: int, pool: RewardPool) -> Sampling:
        recipe = self._recipe
        settings = scheduled(recipe, self._held_out)
        batches = itertools.islice(toy.batches(recipe.drawn_groups), first, None)
        shape = settings.images, settings.fragment_images
        steps = Steps(batches, *shape, recipe.draws, first, recipe.algorithm.set_steps)
        held_out = HeldOut(self._held_out, settings)
        executor = SamplingExecutor(self._name, self._rollout, steps, held_out, link)
        weights = recipe.advantages.reward_weights
        return Sampling(executor, steps, link, Judge(pool, weights, steps, held_out, settings))


@contextlib.contextmanager
def driver(
    system: System, config: ConfigDict, reward=toy.brightness, held_out=(), **options
) -> Iterator[Driver]:
    """As `toy.driver`, whose `options` these are, with every rollout mesh apart from the beginning."""
    names = [f"rollout {number}" for number in range(len(system.rollouts))]
    of_all = toy.opened(config), reward, held_out
    meshes = [Mesh(*one, *of_all) for one in zip(system.rollouts, names, strict=True)]
    make = functools.partial(
        toy.driver, leading(system), config, reward, held_out=held_out, **options
    )
    joined = Meshes(names)
    raised: list[BaseException] = []
    with (
        contextlib.ExitStack() as threads,
        lead(Wire(IDENTITY), "127.0.0.1:0", KNOWN, joined=joined.joined, lost=joined.lost) as (
            _,
            link,
            address,
        ),
        contextlib.ExitStack() as stack,
    ):
        joined.open(Trains((), link))
        for mesh in meshes:
            threads.enter_context(_thread(mesh.sample, address, raised))
        joined.wait(SECONDS, stops=lambda: raised)
        assert not raised, raised
        stack.enter_context(contextlib.closing(joined))
        yield joined.begin(lambda samplers: stack.enter_context(make(link=link, samplers=samplers)))
    assert not raised, raised


@contextlib.contextmanager
def _thread(call: Callable[[str], None], address: str, raised: list) -> Iterator[None]:
    """Calls in a thread of its own, which has ended after this block."""

    def work() -> None:
        try:
            call(address)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    thread.join(SECONDS)
    assert not thread.is_alive()


def drive(system: System, config: ConfigDict, steps: int, reward=toy.brightness, **options):
    """As `toy.drive`; all meshes stay to the end."""
    log = []
    with driver(system, config, reward, log=log, **options) as found:
        history = [found.step() for _ in range(steps)]
        assert set(found.executor.rollouts) == {f"rollout {i}" for i in range(len(system.rollouts))}
    return found.executor.state, history, log
