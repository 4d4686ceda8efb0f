"""A sampling mesh's process in a run: it joins the trainer's process, builds its mesh and does what it is told."""

import itertools
import pathlib
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from digen_jax.assemble import drawn_prompts, recipe_model
from digen_jax.config.recipe import Recipe
from digen_jax.engine.encoding import Rows, Stored
from digen_jax.engine.system import Rollout
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.models.family import Family
from digen_jax.process.ending import STOPPED, Stopped, hangs, last_word, leave
from digen_jax.process.interrupt import Interrupt
from digen_jax.process.terminal import fitted
from digen_jax.prompt_store import encoder_shapes, is_ahead
from digen_jax.prompts.files import read_prompt_file
from digen_jax.remote.following import Following
from digen_jax.remote.leader import ENDED
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import join, open_pulls
from digen_jax.remote.relay import Relay
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.sharing import RolloutLink
from digen_jax.rewards.built_in import on_mesh, resolve
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.pool import RewardPool
from digen_jax.run.driving import scheduled
from digen_jax.run.joining import become_one, make_wire
from digen_jax.run.own_mesh import build_rollout, known_nodes
from digen_jax.run.roles import Apart, Role, own_devices
from digen_jax.run.scorers import try_files, try_scorers
from digen_jax.runtime.evaluation import HeldOut
from digen_jax.runtime.judging import Judge
from digen_jax.runtime.link import RowsOf
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import TRAINER
from digen_jax.scheduling.deadlines import Deadline

UNFINISHED = 2.0  # seconds for what a process does when it has lost its leader


def sample(recipe: Recipe, apart: Apart) -> None:
    """Samples for a run that another process leads, until that ends.

    Args:
      recipe: of the run, placed on all its devices.
      apart: which mesh this process has, and where the leader is.

    Raises:
      ConfigError: the leader refuses this process or does not come, or what the recipe asks for cannot work here.
      Stopped: the leader is lost.
    """
    role = apart.role
    wire = make_wire(recipe, apart)
    become_one(wire, apart)
    _, family = recipe_model(recipe)
    known, pulls = known_nodes(recipe, family), open_pulls(apart.link, apart.host)
    where = role.mesh, role.devices, apart.host
    within = dict(process=role.process, processes=role.processes)
    with (
        fitted(),
        join(wire, apart.place.address, *where, known, pulls, **within) as (following, link),
        Interrupt(lambda number: _asked(following, number)),
        _rewards(recipe, role) as pool,
        _ends_soon(),
    ):
        encoded = _encoded(recipe, family, link, role.mesh) if is_ahead(recipe, family) else None
        rollout = build_rollout(recipe, own_devices(role), encoded)
        try_scorers(recipe, rollout.scorers)
        _serve(recipe, role, rollout, following, link, pool)
    print(f"{role.mesh} ends: {following.reason}", flush=True)
    if apart.one_job and following.reason != ENDED:
        hangs("JAX's end of the job")  # it would wait for the leader


@contextmanager
def _ends_soon() -> Iterator[None]:
    """Where this block ends because the leader is lost, a reward in a thread is not waited for."""
    try:
        yield
    except Stopped as error:
        late = threading.Timer(UNFINISHED, _end, (str(error),))
        late.daemon = True
        late.start()
        raise


def _end(why: str) -> None:
    leave(last_word(f"{pathlib.Path(sys.argv[0]).name}: {why}", STOPPED))


def _asked(following: Following, number: int) -> None:
    print("\nleaving at the end of this step; once more ends at once", file=sys.stderr, flush=True)
    following.asked(number)


@contextmanager
def _rewards(recipe: Recipe, role: Role) -> Iterator[RewardPool | None]:
    """The rewards of this process, which were tried; None: the first process of its mesh scores for all."""
    if role.process:
        yield None
        return
    found, asked = resolve(recipe.rewards, meshes=True), recipe.reward_pool
    deadline = Deadline(recipe.runtime.deadline)
    pool = RewardPool(found, asked.processes, asked.retries, deadline.seconds)
    with closing(pool):
        check_canaries(found, pool.score)
        try_files(recipe, pool.score)
        yield pool


def _encoded(recipe: Recipe, family: Family, link: RemoteLink, mesh: str) -> Stored:
    """Prompts that the trainer's process has encoded, which are fetched from there."""

    def read(texts: Sequence[str]) -> list[Rows]:
        return list(link.fetch(RowsOf(TRAINER, tuple(texts)), mesh))

    return Stored(family, encoder_shapes(recipe, family), read)


def _serve(
    recipe: Recipe,
    role: Role,
    rollout: Rollout,
    following: Following,
    link: RemoteLink,
    pool: RewardPool | None,
) -> None:
    held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
    settings = scheduled(recipe, held_out)
    first = following.welcome.step
    # The data set of the prompts; this process needs no workdir.
    with tempfile.TemporaryDirectory(prefix="digen_jax_prompts_") as cache:
        steps = Steps(
            _batches(recipe, cache, first),
            settings.images,
            settings.fragment_images,
            recipe.draws,
            first,
            recipe.algorithm.set_steps,
        )
        scorers = named(on_mesh(recipe.rewards), rollout.scorers)
        of_evaluation = HeldOut(held_out, settings)
        several = role.processes > 1
        own = RolloutLink(link, not role.process) if several else link
        relay = Relay(own, link, following, gives=not several)
        executor = SamplingExecutor(role.mesh, rollout, steps, of_evaluation, relay, scorers)
        weights = recipe.advantages.reward_weights
        judge = pool and Judge(pool, weights, steps, of_evaluation, settings)
        words = f", process {role.process} of {role.processes}" if several else ""
        print(f"{role.mesh} is ready, on {role.devices} devices{words}", flush=True)
        serve(following, Sampling(executor, steps, link, judge, relay), in_order=several)


def _batches(recipe: Recipe, cache: str, first: int) -> Iterator[list[dict[str, Any]]]:
    """The prompt records of every step from `first` on."""
    batches = drawn_prompts(recipe, cache)
    return map(batches.at, itertools.count(first))
