"""A sampling mesh's process in a run: it joins the trainer's process, builds its mesh and does what it is told."""

import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from digen_jax.assemble import recipe_model, scheduled
from digen_jax.config.recipe import Recipe
from digen_jax.engine.encoding import Rows, Stored
from digen_jax.engine.system import Rollout
from digen_jax.learned_rewards.on_mesh import named
from digen_jax.models.family import Family
from digen_jax.process.ending import Stopped
from digen_jax.process.interrupt import Interrupt
from digen_jax.process.terminal import fitted
from digen_jax.prompt_store import encoder_shapes, is_ahead
from digen_jax.prompts.dataset import prompt_batches
from digen_jax.prompts.files import read_prompt_file, read_prompt_files
from digen_jax.remote.following import Following
from digen_jax.remote.link import LinkError, RemoteLink
from digen_jax.remote.opening import join, open_pulls
from digen_jax.remote.serving import Sampling, serve
from digen_jax.remote.sharing import RolloutLink
from digen_jax.rewards.built_in import on_mesh, resolve
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.trial import try_out
from digen_jax.run.meshes import become_one, make_wire
from digen_jax.run.own_mesh import build_rollout, known_nodes
from digen_jax.run.roles import Apart, Role, own_devices
from digen_jax.run.scorers import try_scorers
from digen_jax.runtime.evaluation import HeldOut
from digen_jax.runtime.judging import Judge
from digen_jax.runtime.link import RowsOf
from digen_jax.runtime.sampling import SamplingExecutor
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import TRAINER
from digen_jax.scheduling.deadlines import Deadline


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
    ):
        encoded = _encoded(recipe, family, link, role.mesh) if is_ahead(recipe, family) else None
        rollout = build_rollout(recipe, own_devices(role), encoded)
        try_scorers(recipe, rollout.scorers)
        _serve(recipe, role, rollout, following, link, pool)
    print("the run has ended", flush=True)


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
    files = *read_prompt_files(recipe.prompts.paths), read_prompt_file(recipe.evaluation.prompts)
    with closing(pool):
        check_canaries(found, pool.score)
        try_out(pool.score, files, recipe.model.height, recipe.model.width)
        yield pool


def _encoded(recipe: Recipe, family: Family, link: RemoteLink, mesh: str) -> Stored:
    """Prompts that the trainer's process has encoded, which are fetched from there."""

    def read(texts: Sequence[str]) -> list[Rows]:
        try:
            rows = link.fetch(RowsOf(TRAINER, tuple(texts)), mesh)
        except LinkError as error:
            raise Stopped(str(error)) from error
        return list(rows)

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
        executor = SamplingExecutor(role.mesh, rollout, steps, of_evaluation, own, scorers)
        weights = recipe.advantages.reward_weights
        judge = pool and Judge(pool, weights, steps, of_evaluation, settings)
        words = f", process {role.process} of {role.processes}" if several else ""
        print(f"{role.mesh} is ready, on {role.devices} devices{words}", flush=True)
        serve(following, Sampling(executor, steps, link, judge), in_order=several)


def _batches(recipe: Recipe, cache: str, first: int) -> Iterator[list[dict[str, Any]]]:
    """The prompt records of every step from `first` on."""
    batches = prompt_batches(
        recipe.prompts.paths,
        recipe.drawn_groups,
        recipe.seed,
        cache,
        set_steps=recipe.algorithm.set_steps,
        weights=recipe.prompts.weights,
    )
    return map(batches.at, itertools.count(first))
