"""The loop of a training run in the process that leads it: resume, step, save, show the results."""

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import jax

from digen_jax.assemble import build, drawn_prompts, read_scorers
from digen_jax.config.recipe import Recipe
from digen_jax.distributed.workers import RolloutWorkers
from digen_jax.encoding.ahead import prepare
from digen_jax.encoding.reached import reached
from digen_jax.engine.divergence import DivergedError, check_metrics
from digen_jax.errors import ConfigError
from digen_jax.process.interrupt import Interrupt
from digen_jax.process.launching import MEETING
from digen_jax.prompts.files import read_prompt_file
from digen_jax.records.checkpoint import SaveFailed
from digen_jax.records.status import Status
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.canary import check_canaries
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.pool import RewardPool
from digen_jax.run.driving import make_driver, scheduled
from digen_jax.run.own_mesh import build_trainer
from digen_jax.run.positions import Position, Positions
from digen_jax.run.report import Metrics, Reporter, diverged, print_warnings
from digen_jax.run.scorers import try_files, try_scorers
from digen_jax.run.stopping import reason_to_stop
from digen_jax.run.workdir import check_there, mark_finished, own_claim
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.executors import Samples
from digen_jax.runtime.orders import Orders, several
from digen_jax.runtime.watch import Watch
from digen_jax.scheduling.deadlines import Deadline


@contextlib.contextmanager
def whole(positions: Positions) -> Iterator[None]:
    """After this block the last checkpoint is whole. An error of the block says more than that its save failed, too."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(SaveFailed):
            positions.close()
        raise
    positions.close()


class Run:
    """The loop of a run, from its beginning or its last checkpoint to its results.

    `workers` are the rollout workers in other processes, None: all meshes are in this one.
    """

    def __init__(
        self,
        recipe: Recipe,
        workdir: pathlib.Path,
        orders: Orders,
        workers: RolloutWorkers | None = None,
    ):
        self.recipe, self.workdir, self.orders, self.workers = recipe, workdir, orders, workers
        self.positions = Positions(workdir, recipe)
        devices = jax.devices() if workers is None else workers.devices
        orders.announce("begin", json.dumps([recipe.as_json(), own_claim()]))
        orders.hear(MEETING)
        oldest = self.positions.oldest() or 0
        if workers is not None:
            # A worker may be ready before the model is read here: it need not draw the steps before the checkpoint.
            workers.step = oldest
        drawn = functools.partial(reached, recipe, workdir / "prompts", oldest)
        encoding = prepare(recipe, devices, drawn, "trainer" if workers else None)
        found, pool = resolve(recipe.rewards, meshes=True), recipe.reward_pool
        deadline = Deadline(recipe.runtime.deadline)
        self.rewards = RewardPool(found, pool.processes, pool.retries, deadline.seconds)
        held_out = read_prompt_file(recipe.evaluation.prompts)
        try:
            scorers = () if workers else read_scorers(recipe, devices)
            check_canaries(found, self.rewards.score)
            try_files(recipe, self.rewards.score)
            orders.announce("try")
            if scorers:
                try_scorers(recipe, scorers)
            if encoding is not None:
                print_warnings(recipe, encoding.family)
            with orders.together("encode"):
                if encoding is not None:
                    encoding.run()
            self.system = (
                build_trainer(recipe, devices)
                if workers
                else build(recipe, devices).with_scorers(scorers)
            )
            if encoding is None:
                print_warnings(recipe, self.system.policy.family)
        except BaseException:  # Ctrl-C, too: otherwise the reward's processes would continue
            self.rewards.close()
            raise
        # Where all processes sample and train, one may wait long for another one's compilation.
        self.watch = Watch(Deadline(0) if several() and workers is None else deadline)
        orders.announce("built")
        self.saved: int | None = None  # the steps of the newest checkpoint
        self.stopped: str | None = None  # why the run ends early
        self.held_out = held_out[: recipe.evaluation.images or None]
        self.prompts = drawn_prompts(recipe, workdir / "prompts")
        self.drawn: dict[int, Any] = {}  # positions in the prompts, by number of steps
        settings = scheduled(recipe, self.held_out)
        release = self.positions.release_room
        self.report = Reporter(workdir, recipe, settings, self.held_out, release)
        self.records = self.report.records

    def train(self, changed: list[str]) -> int | None:
        """Runs from the last checkpoint to the last step, then shows the results; returns as `train` does.

        `changed` lists changes of the config since the last start.
        """
        self.report.begin(self.system)
        with closing(self.watch), closing(self.rewards):
            with Interrupt() as interrupt, closing(self.report), whole(self.positions):
                position = self.resume()
                self.report.start(position.done, changed)
                position = self.advance(position, interrupt)
                if not interrupt.asked:
                    self.report.conclude(position.done)
            if interrupt.asked:
                print(f"Stopped and saved after step {position.done}; the same command continues.")
                return 128 + interrupt.asked
            if self.stopped:
                print(f"The run has {self.stopped}.")
            self.report.results()
            mark_finished(self.workdir, position.done)
        return None

    def resume(self) -> Position:
        """The newest checkpoint's position, or the initial one."""
        state = self.system.trainer.init(self.system.start)
        found = self.positions.newest(state)
        self.positions.hold_room(state)
        if found is None:
            self.records.cut_back(0)
            return Position(0, state, None, self.places(0))
        self.saved = found.done
        self.prompts.set_state(found.host["prompts"])
        self.records.cut_back(found.host["metrics"])
        return found

    def advance(self, position: Position, interrupt: Interrupt) -> Position:
        """Runs steps to the last one or until a signal asks to stop; saves the final position.

        Raises:
          SaveFailed: a write failed; everything that the disk has room for is saved.
        """
        try:
            position = self.go_on(position, interrupt)
            self.positions.wait()
            return position
        except SaveFailed as error:
            goes_on = f"make room, and the same command continues {self.newest()}"
            raise SaveFailed(f"{error}: {goes_on}") from error
        except RewardMistake as error:
            goes_on = f"fix the reward, and the same command continues {self.newest()}"
            raise type(error)(f"{error}\n  {goes_on}") from error

    def newest(self) -> str:
        """The point from which a restarted run continues, in words."""
        with contextlib.suppress(SaveFailed):
            self.positions.wait()
        saved = self.positions.steps()
        return f"after step {saved[-1]}, which is saved" if saved else "from the beginning"

    def go_on(self, position: Position, interrupt: Interrupt) -> Position:
        """As `advance`, without saving and messages after a failed write."""
        with self.driving(position, interrupt) as driver, self.status(driver):
            try:
                self.check_disk()
                while position.done < self.recipe.steps and not (interrupt.asked or self.stopped):
                    with self.told_of_divergence(position):
                        line = driver.step()
                        check_metrics(line)
                    position = self.stepped(position.done + 1, line, driver)
                    self.check_disk()
                    interrupt.asked = interrupt.asked or self.orders.asked_to_stop()
                    if position.done < self.recipe.steps:
                        self.stopped = reason_to_stop(self.recipe.stopping, self.workdir)
                if not (interrupt.asked or self.stopped):
                    with self.told_of_divergence(position):
                        driver.finish()  # the last version's evaluation
            finally:
                # Also saves the steps before a failure. An update consumes its state: a step that
                # fails after its first update leaves the last checkpoint as it is.
                if position.is_whole() and not self.orders.torn:
                    self.save(position)
                self.report.rest(driver)
        return position

    @contextlib.contextmanager
    def driving(self, position: Position, interrupt: Interrupt) -> Iterator[Driver]:
        """A driver for the steps after a position, in this block."""
        if self.workers is None:
            with closing(self.drive(position)) as driver:
                yield driver
            return
        self.workers.step = position.done
        self.workers.wait(stops=lambda: interrupt.asked)
        with closing(self.workers):
            driver = self.workers.begin(functools.partial(self.drive, position))
            try:
                yield driver
            finally:
                with self.workers.let_go():
                    driver.close()

    def status(self, driver: Driver) -> Status:
        """Writes what all workers do, in a block."""
        places = dict if self.workers is None else self.workers.places
        return Status(self.workdir, driver.snapshot, places)

    def drive(self, position: Position, samplers: Sequence[Samples] = ()) -> Driver:
        """A driver for the steps after a position; `samplers` are workers in other processes."""
        done = position.done
        return make_driver(
            self.system,
            self.recipe,
            position.state,
            self.draw_prompts(done),
            self.rewards,
            done,
            position.begun,
            self.records.begin_commands(done),
            self.orders,
            self.watch,
            self.held_out,
            self.report.evaluated,
            self.workers and self.workers.link,
            samplers,
        )

    def stepped(self, done: int, line: Metrics, driver: Driver) -> Position:
        """Ends a step: records its metrics, returns its position, and saves a checkpoint if one is due."""
        state, begun = driver.executor.state, driver.begun
        if self.workers is not None:
            self.workers.step = done
        self.report.step(done, line, driver)
        position = Position(done, state, begun, self.places(done))
        if self.positions.due(done):
            self.save(position)
        return position

    @contextlib.contextmanager
    def told_of_divergence(self, position: Position) -> Iterator[None]:
        """In this block, the step after a position, a value that is not finite ends the run with a sentence."""
        try:
            yield
        except DivergedError as error:
            if position.is_whole():  # then `go_on` saves it
                self.saved = position.done
            raise ConfigError(
                diverged(str(error), position.done, self.saved, self.recipe)
            ) from error

    def check_disk(self) -> None:
        """Checks between two steps that all was written, and that there is space for the next checkpoint.

        Raises:
          SaveFailed: a write failed, or there is no space.
          Stopped: the workdir is gone.
        """
        check_there(self.workdir)
        self.records.check_disk()
        self.positions.check()

    def draw_prompts(self, done: int) -> Iterator[list[dict]]:
        """The prompts of the steps after `done`; records the position after each step's."""
        for number, records in enumerate(self.prompts, done + 1):
            self.drawn[number] = self.prompts.get_state()
            yield records

    def places(self, done: int) -> dict[str, Any]:
        """The positions in the prompts and the metrics after `done` steps."""
        place = self.drawn.pop(done) if done else self.prompts.get_state()
        return {"prompts": place, "metrics": self.records.place()}

    def save(self, position: Position) -> None:
        """Saves a checkpoint of a position, unless it exists; raises `Stopped` if the workdir is gone."""
        check_there(self.workdir)
        self.saved = position.done
        self.positions.wait()
        oldest = self.positions.oldest()
        if oldest is not None:
            self.records.forget(oldest)
        kept = position.begun.kept if position.begun else {}
        with self.orders.together("save", (position.done, tuple(kept))):
            self.positions.save(position)
