"""The other processes of a run: they execute the announcements of the first one, and keep no records."""

import json
import pathlib
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np

from digen_jax.assemble import build, duties, scheduled
from digen_jax.config.recipe import Recipe
from digen_jax.engine.system import System
from digen_jax.errors import ConfigError
from digen_jax.process.interrupt import Interrupt
from digen_jax.prompts.dataset import prompt_batches
from digen_jax.prompts.files import read_prompt_file
from digen_jax.run.opening import place_here
from digen_jax.run.positions import Position, Positions
from digen_jax.runtime.driver import Begun
from digen_jax.runtime.executors import Executors, follow
from digen_jax.runtime.orders import leave, orders
from digen_jax.scheduling.commands import Publication


def follow_run(recipe: Recipe, workdir: pathlib.Path) -> int | None:
    """Takes part in a run that the first process leads, and ends as `run.train` does there.

    Raises:
      ConfigError: the mistake that the first process found.
    """
    jax.devices()  # in the other processes this call waits for this process
    with Interrupt() as interrupt:
        try:
            error, code = _follow(recipe, workdir, orders(interrupt))
        except BaseException as failure:
            leave(failure)
    if error is not None:
        raise ConfigError(error)
    return code


def _follow(
    recipe: Recipe, workdir: pathlib.Path, told: Iterator[tuple[str, Any]]
) -> tuple[str | None, int | None]:
    """Follows until the announced end: (the mistake, the exit code)."""
    kind, value = next(told)
    if kind == "end":
        return value
    system = mistake = None
    try:
        recipe = place_here(recipe)
    except ConfigError as error:
        mistake = error
    else:
        if recipe.as_json() != json.loads(value):
            raise ConfigError(
                "this process got another config than the first one: start all processes with the same command"
            )
        try:
            system = build(recipe, jax.devices())
        except ConfigError as error:
            mistake = error
    # Most mistakes occur in all processes: then the first one reports them.
    kind, value = next(told)
    if kind == "end":
        return value
    if mistake is not None:
        raise mistake
    with closing(Follower(recipe, workdir, system)) as follower:
        for kind, value in told:
            if kind == "end":
                return value
            follower.do(kind, value)


class Follower:
    """A process's part in a run: the parts of the first process without rewards, scheduler and records."""

    def __init__(self, recipe: Recipe, workdir: pathlib.Path, system: System):
        held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
        self._positions = Positions(workdir, recipe)
        prompts = prompt_batches(
            recipe.prompts.file,
            recipe.drawn_groups,
            recipe.seed,
            workdir / "prompts",
            set_steps=recipe.algorithm.set_steps,
        )
        state = system.trainer.init(system.start)
        found = self._positions.newest(state) or Position(0, state, None, {})
        if found.host:
            prompts.set_state(found.host["prompts"])
        kept = found.begun.kept if found.begun else None
        self._executors = Executors(
            system,
            scheduled(recipe, held_out),
            duties(recipe, held_out),
            found.state,
            prompts,
            found.done,
            kept,
        )

    def do(self, kind: str, value: Any) -> None:
        """Executes one entry of the log."""
        match kind:
            case "do":
                follow(self._executors, value)
            case "scored":
                command, scores = value
                self._executors.scored(command, np.asarray(scores, np.float32))
            case "save":
                self._save(*value)
            case _:
                raise ValueError(f"the first process announces {kind!r}: it runs another version")

    def close(self) -> None:
        """Waits until the last checkpoint is whole."""
        self._positions.close()

    def _save(self, done: int, versions: tuple[int, ...]) -> None:
        kept = {v: self._executors.published(Publication(v)) for v in versions}
        state = self._executors.state
        self._positions.save(Position(done, state, Begun({}, kept), {}))
