"""The other processes that train: they execute the announcements of the first one, and keep no records."""

import functools
import json
import pathlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import jax

from digen_jax.assemble import build, drawn_prompts, read_scorers
from digen_jax.config.recipe import Recipe
from digen_jax.encoding.ahead import Encoding, prepare
from digen_jax.encoding.reached import reached
from digen_jax.engine.scoring import Scoring
from digen_jax.engine.system import System
from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED, Stopped
from digen_jax.process.interrupt import Interrupt
from digen_jax.prompts.files import read_prompt_file
from digen_jax.run.driving import duties, scheduled
from digen_jax.run.opening import place_here
from digen_jax.run.own_mesh import build_trainer
from digen_jax.run.positions import Position, Positions
from digen_jax.run.scorers import try_scorers
from digen_jax.run.workdir import check_shared
from digen_jax.runtime.driver import Begun
from digen_jax.runtime.executors import Executors, follow
from digen_jax.runtime.judging import Judged
from digen_jax.runtime.link import Link
from digen_jax.runtime.orders import answer, leave, orders
from digen_jax.runtime.scores import received
from digen_jax.scheduling.commands import Publication


class TrainerMesh(NamedTuple):
    """The trainer's devices, and its link to rollout workers in other processes."""

    devices: Sequence[jax.Device]
    link: Link


def follow_run(
    recipe: Recipe, workdir: pathlib.Path, mesh: TrainerMesh | None = None
) -> int | None:
    """Takes part in a run that the first process leads, and ends as `train.train` does there.

    `mesh` is that of the trainer if other workers sample; None: all devices sample and train.

    Raises:
      ConfigError: the mistake that the first process found.
      Stopped: why it cannot continue.
    """
    jax.devices()  # in the other processes this call waits for this process
    with Interrupt() as interrupt:
        try:
            error, code = _follow(recipe, workdir, orders(interrupt), mesh)
        except BaseException as failure:
            leave(failure)
    if error is not None:
        raise Stopped(error) if code == STOPPED else ConfigError(error)
    return code


def _follow(
    recipe: Recipe,
    workdir: pathlib.Path,
    told: Iterator[tuple[str, Any]],
    mesh: TrainerMesh | None,
) -> tuple[str | None, int | None]:
    """Follows until the announced end: (the mistake, the exit code)."""
    kind, value = next(told)
    if kind == "end":
        return value
    recipe, mistake = _tried(lambda: recipe if mesh else place_here(recipe))
    if mistake is None:
        _, mistake = _tried(lambda: _check(recipe, workdir, *json.loads(value)))
    answer(str(mistake or ""))
    if mistake is not None:  # which the first process tells all
        _, ended = next(told)
        return ended
    prepared, mistake = _tried(lambda: _prepared(recipe, workdir, mesh))
    # Most mistakes occur in all processes: then the first one reports them.
    kind, value = next(told)
    if kind == "end":
        return value
    if mistake is not None:
        raise mistake
    positions, encoding, scorers = prepared
    _, mistake = _tried(lambda: scorers and try_scorers(recipe, scorers))
    kind, value = next(told)
    if kind == "end":
        return value
    if mistake is not None:
        raise mistake
    if encoding is not None:
        encoding.run()
    system, mistake = _tried(lambda: _built(recipe, scorers, mesh))
    kind, value = next(told)
    if kind == "end":
        return value
    if mistake is not None:
        raise mistake
    link = mesh and mesh.link
    with closing(Follower(recipe, workdir, system, positions, link)) as follower:
        for kind, value in told:
            if kind == "end":
                return value
            follower.do(kind, value)


def _tried(call: Callable[[], Any]) -> tuple[Any, ConfigError | None]:
    """(the result of a call, the mistake that it found)."""
    try:
        return call(), None
    except ConfigError as error:
        return None, error


def _built(recipe: Recipe, scorers: tuple[Scoring, ...], mesh: TrainerMesh | None) -> System:
    if mesh is not None:
        return build_trainer(recipe, mesh.devices)
    return build(recipe, jax.devices()).with_scorers(scorers)


def _check(recipe: Recipe, workdir: pathlib.Path, first: dict[str, Any], claim: str) -> None:
    """Checks that this process takes part in the same run as the leader.

    Args:
      recipe: as this process has it, on its devices.
      workdir: as this process sees it.
      first: the leader's config.
      claim: what the leader has written into the workdir.

    Raises:
      ConfigError: this process has another config, or does not see the leader's workdir.
    """
    check_shared(workdir, claim)
    if recipe.as_json() != first:
        raise ConfigError(
            "this process got another config than the first one: start all processes with the same command"
        )


def _prepared(
    recipe: Recipe, workdir: pathlib.Path, mesh: TrainerMesh | None
) -> tuple[Positions, Encoding | None, tuple[Scoring, ...]]:
    """(the run's positions, the prompts to encode, the rewards on the mesh), before the model."""
    positions = Positions(workdir, recipe)
    drawn = functools.partial(reached, recipe, workdir / "prompts", positions.oldest() or 0)
    if mesh is not None:
        return positions, prepare(recipe, mesh.devices, drawn, "trainer"), ()
    encoding = prepare(recipe, jax.devices(), drawn)
    return positions, encoding, read_scorers(recipe, jax.devices())


class Follower:
    """A process's part in a run: the parts of the first process without rewards, scheduler and records.

    `link` reaches rollout workers in other processes; None: there are none.
    """

    def __init__(
        self,
        recipe: Recipe,
        workdir: pathlib.Path,
        system: System,
        positions: Positions,
        link: Link | None = None,
    ):
        held_out = read_prompt_file(recipe.evaluation.prompts)[: recipe.evaluation.images or None]
        self._positions = positions
        prompts = drawn_prompts(recipe, workdir / "prompts")
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
            link,
        )

    def do(self, kind: str, value: Any) -> None:
        """Executes one entry of the log."""
        match kind:
            case "do":
                follow(self._executors, value)
            case "delivered":
                self._executors.steps.draw(value.chunk.step)
                self._executors.do(value)
            case "scored":
                command, columns = value
                if not command.chunk.evaluation:
                    self._executors.steps.draw(command.chunk.step)
                self._executors.scored(command, Judged(received(columns)))
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
