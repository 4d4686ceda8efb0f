"""A whole training run in a workdir: claim it, continue where it was left, train, show the results."""

import contextlib
import functools
import pathlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from digen_jax import pictures, recipe, rewards
from digen_jax.assemble import build, make_driver
from digen_jax.checkpoint import SaveFailed
from digen_jax.environment import note_start
from digen_jax.evaluated import save_images, saved_images
from digen_jax.following import follow_run
from digen_jax.interrupt import Interrupt
from digen_jax.metrics import CLOCK, MetricsLog, read_metrics
from digen_jax.planning import placed
from digen_jax.positions import Position, Positions
from digen_jax.progress import Progress
from digen_jax.prompts.dataset import prompt_batches
from digen_jax.prompts.files import read_prompt_file
from digen_jax.prompts.notes import tell
from digen_jax.recipe import MAY_CHANGE, complete, drawn_groups, fixed_set_steps, is_automatic
from digen_jax.recipe_checks import check
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.pool import RewardPool
from digen_jax.rewards.trial import try_out
from digen_jax.room import FULL
from digen_jax.runtime.divergence import DivergedError, check_metrics
from digen_jax.runtime.evaluation import Evaluation, by_tag, evaluate
from digen_jax.runtime.executors.clock import paused
from digen_jax.runtime.executors.driver import Driver
from digen_jax.runtime.executors.log import CommandLog, read_log
from digen_jax.runtime.executors.orders import Orders, is_first, leading, several
from digen_jax.runtime.executors.watch import Watch, end_process
from digen_jax.runtime.scheduler.deadlines import Deadline
from digen_jax.runtime.timeline import Interval
from digen_jax.runtime.timeline_files import TraceFile, draw
from digen_jax.runtime.trainer import State
from digen_jax.settings import ConfigError
from digen_jax.workdir import changes, claim_workdir, finished_step, mark_finished

Metrics = dict[str, float]

SHOWN_STEPS = 3  # in a picture of the timeline


def train(config: ConfigDict, workdir: pathlib.Path) -> int | None:
    """Runs or continues the training that `config` describes, in `workdir`.

    Where there are several processes all call it, with a workdir that all see. The first one leads.

    Returns:
      None where the run is finished; the process's exit code where a signal stopped it before.

    Raises:
      ConfigError: a mistake in what was asked for, or in what the reward returns.
      Stopped: what the run cannot go on without hangs or dies, such as the reward.
    """
    if not is_first():
        return follow_run(config, workdir)
    with leading() as orders:
        code = lead(config, workdir, orders)
        orders.announce("end", (None, code))
    return code


def lead(config: ConfigDict, workdir: pathlib.Path, orders: Orders) -> int | None:
    """As `train`, in the process that decides."""
    config = complete(config)
    if is_automatic(config) and several():
        raise ConfigError(
            "config.placement = 'auto' plans for one process only: give config.placement a trainer that "
            "takes all devices of all processes, and rollout.data = 0"
        )
    config = placed(config, workdir)
    check(config, jax.device_count())
    # In a run's folder that another process has, or that cannot be used at all, the claim finds what is wrong.
    changed = changes(workdir, config.to_dict()) if workdir.is_dir() else {}
    with claim_workdir(workdir, config.to_dict(), MAY_CHANGE):
        finished = finished_step(workdir) or 0
        if finished < config.steps:
            for file, read in {"metrics.jsonl": read_metrics, "commands.jsonl": read_log}.items():
                if (workdir / file).exists():
                    read(workdir / file)  # so that garbage in it is found before anything slow
            run = Run(config, workdir, orders)
            with full_disk(workdir):
                return run.train([f"{name}: {change}" for name, change in changed.items()])
    print(f"This run is finished: {finished} steps are done. To go on, give a larger config.steps.")
    print(where(workdir))
    return None


class Run:
    """The parts of a run and the files that it has open in its workdir."""

    def __init__(self, config: ConfigDict, workdir: pathlib.Path, orders: Orders):
        self.config, self.workdir, self.orders = config, workdir, orders
        self.positions = Positions(workdir, config)
        self.full: OSError | None = None  # the disk is, as a file of the workdir has shown
        orders.announce("begin", config.to_json(sort_keys=True))
        reward = config.reward
        deadline = Deadline(config.runtime.deadline)
        self.rewards = RewardPool(
            rewards.resolve(reward.name),
            reward.name,
            reward.processes,
            reward.retries,
            deadline.seconds,
        )
        held_out = read_prompt_file(config.evaluation.prompts)
        files = read_prompt_file(config.prompts.file), held_out
        try:
            try_out(self.rewards.score, files, config.model.height, config.model.width)
            self.system = build(config, jax.devices())
        except Exception:
            self.rewards.close()
            raise
        # Of several processes one may wait long for what another one compiles.
        self.watch = Watch(Deadline(0) if several() else deadline)
        orders.announce("built")
        self.driver: Driver | None = None
        self.saved: int | None = None  # the steps of the newest checkpoint
        self.held_out = held_out[: config.evaluation.images or None]
        self.prompts = prompt_batches(
            config.prompts.file,
            drawn_groups(config),
            config.seed,
            workdir / "prompts",
            set_steps=fixed_set_steps(config),
        )
        self.drawn: dict[int, Any] = {}  # places in the prompts, by steps drawn
        self.timeline = TraceFile(workdir / "timeline.json")
        self.shown: list[list[Interval]] = []  # of the last steps
        self.log = MetricsLog(workdir, recipe.wandb_options(config), config.to_dict())
        self.folder = workdir / "pictures"
        self.folder.mkdir(exist_ok=True)

    def train(self, changed: list[str]) -> int | None:
        """From the last checkpoint to the last step, then the results; returns as `train` does.

        `changed` says what the config has otherwise than at the last start.
        """
        for file in dict.fromkeys((self.config.prompts.file, self.config.evaluation.prompts)):
            tell(file, self.system.policy.family.cut)
        print(self.system.placement.describe(), flush=True)
        with closing(self.watch), closing(self.rewards):
            with Interrupt() as interrupt, closing(self.log), closing(self.positions):
                position = self.resume()
                for change in changed:
                    print(f"changed from step {position.done + 1} on: {change}", flush=True)
                note_start(self.workdir, position.done, changed)
                position = self.advance(position, interrupt)
            if position.done < self.config.steps:
                print(f"Stopped and saved after step {position.done}; the same command continues.")
                return 128 + interrupt.asked
            self.finish(position)
        return None

    def resume(self) -> Position:
        """The newest checkpoint's position, or the beginning's once the start has been evaluated."""
        state = self.system.trainer.init(self.system.start)
        found = self.positions.newest(state)
        self.positions.hold_room(state)
        if found is None:
            return self.begin(state)
        if found.done > self.config.steps:
            raise ConfigError(
                f"config.steps = {self.config.steps}, but the run in {self.workdir} has done "
                f"{found.done} steps already: give {found.done} or more"
            )
        self.saved = found.done
        print(f"continuing after step {found.done}", flush=True)
        self.prompts.set_state(found.host["prompts"])
        self.log.cut_back(found.host["metrics"])
        return found

    def begin(self, state: State) -> Position:
        """The position before the first step; the first line of metrics is the model's before tuning."""
        count = len(self.held_out)
        print(
            f"compiling, and evaluating the model before tuning on {count} held-out prompts",
            flush=True,
        )
        self.log.cut_back(0)
        line = self.look(0, state)
        self.kept(lambda: self.log.write(0, line))
        return Position(0, state, None, self.places(0))

    def advance(self, position: Position, interrupt: Interrupt) -> Position:
        """Step after step, to the last or until a signal asks to stop; where it ends is saved.

        Raises:
          SaveFailed: something could not be written; what the disk has room for is saved.
        """
        if position.done == self.config.steps:
            return position
        try:
            position = self.go_on(position, interrupt)
            self.positions.wait()
            return position
        except SaveFailed as error:
            goes_on = f"make room, and the same command goes on {self.newest()}"
            raise SaveFailed(f"{error}: {goes_on}") from error
        except RewardMistake as error:
            goes_on = f"mend the reward, and the same command goes on {self.newest()}"
            raise type(error)(f"{error}\n  {goes_on}") from error

    def newest(self) -> str:
        """From where a run goes on that is started again."""
        with contextlib.suppress(SaveFailed):
            self.positions.wait()
        saved = self.positions.steps()
        return f"after step {saved[-1]}, which is saved" if saved else "from the beginning"

    def go_on(self, position: Position, interrupt: Interrupt) -> Position:
        """As `advance`, but for what follows where something could not be written."""
        prompts = self.draw_prompts(position.done)
        self.commands = CommandLog(self.workdir / "commands.jsonl", position.done)
        self.driver = make_driver(
            self.system,
            self.config,
            position.state,
            prompts,
            self.rewards,
            position.done,
            position.begun,
            self.commands,
            self.orders,
            self.watch,
        )
        with closing(Progress(self.config.steps, position.done)) as progress, closing(self.driver):
            try:
                self.check_disk()
                while position.done < self.config.steps and not interrupt.asked:
                    position, line = self.step(position)
                    progress.update(
                        position.done,
                        line["reward"],
                        line["images_per_second"],
                        line["utilisation"],
                    )
                    if "evaluation/reward" in line:
                        reward = f"{line['evaluation/reward']:.3f}"
                        progress.note(f"step {position.done}: {reward} on the held-out prompts")
                    self.check_disk()
                    interrupt.asked = interrupt.asked or self.orders.asked_to_stop()
            finally:
                # After a failure, too, what came before it is kept. An update consumes its state:
                # a step that fails behind its first update leaves the last checkpoint as it is.
                if whole(position) and not self.orders.torn:
                    self.save(position)
                rest, clock = self.driver.rest(), time.time() - self.driver.now()
                self.kept(lambda: self.timeline.write(rest, clock))
        self.driver = None
        return position

    def step(self, position: Position) -> tuple[Position, Metrics]:
        """One step with all that is due after it: evaluation, pictures, metrics, checkpoint."""
        try:
            line = self.driver.step()
            check_metrics(line)
        except DivergedError as error:
            raise ConfigError(self.diverged(str(error), position)) from error
        done, state, begun = position.done + 1, self.driver.state, self.driver.begun
        self.show_timeline(done)
        line |= self.look(done, state)
        self.kept(lambda: self.log.write(done, line))
        self.kept(self.commands.flush)
        if "evaluation/reward" in line:
            self.kept(self.draw_curve)
        position = Position(done, state, begun, self.places(done))
        if self.positions.due(done):
            self.save(position)
        return position, line

    def diverged(self, what: str, position: Position) -> str:
        """The sentence that ends a run in which something stopped to be finite in the step behind a position."""
        done = position.done
        if whole(position):  # then `advance` saves it
            self.saved = done
        trainer, saved = (
            self.config.trainer,
            "nothing is saved"
            if self.saved is None
            else (f"the newest checkpoint is of step {self.saved}"),
        )
        return (
            f"{what} in step {done + 1}: training has diverged; the last good step is {done}, and {saved}. Lower "
            f"config.trainer.learning_rate = {trainer.learning_rate} or config.trainer.clip_norm = "
            f"{trainer.clip_norm}, and begin in another workdir"
        )

    def kept(self, write: Callable[[], Any]) -> None:
        """Writes a file of the workdir; on a full disk in the room that is held, and the run is to stop."""
        try:
            write()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.full = error
            self.positions.release_room()
            write()

    def check_disk(self) -> None:
        """Between two steps: whether all could be written, and the next checkpoint can be.

        Raises:
          SaveFailed: it could not.
        """
        if self.full:
            raise SaveFailed(f"the disk of {self.workdir} is full")
        self.positions.check()

    def look(self, done: int, state: State) -> Metrics:
        """Evaluation and pictures, where they are due after `done` steps; the evaluation's metrics."""
        last = done == self.config.steps
        evaluated = done % self.config.evaluation.every == 0 or last
        shown = done % self.config.pictures.every == 0 or last
        if not (evaluated or shown):
            return {}
        count = self.config.pictures.images
        found = self.evaluate(
            state.evaluated, self.held_out if evaluated else self.held_out[:count]
        )
        captions = [record["prompt"] for record in found.records[:count]]
        images, scores = found.images[:count], found.scores
        if shown:
            title = f"after step {done}" if done else "before tuning"
            grid = pictures.image_grid(images, captions, 6, scores[:count], title)
            path = self.folder / f"step_{done:06d}.png"
            self.kept(lambda: grid.save(path))
            self.kept(lambda: self.log.picture(path))
        if not evaluated:
            return {}
        file = self.folder / ("after.npz" if done else "before.npz")
        self.kept(lambda: save_images(file, step=done, images=images, scores=scores))
        return found.metrics()

    def evaluate(self, tuned: Any, records: list[dict]) -> Evaluation:
        """Scores the first held-out prompts, `records`; between steps the driver has it done."""
        with self.orders.together("evaluate", len(records)):
            if self.driver is not None:
                return self.driver.evaluate(tuned, records)
            name, batch = self.config.reward.name, self.config.evaluation.batch
            weights = self.system.publish(tuned)
            late = functools.partial(end_process, "this process")
            with self.watch.over_batches(late) as progress:
                return evaluate(
                    self.system.evaluator,
                    weights,
                    records,
                    paused()(self.rewards.score),
                    name,
                    batch,
                    progress=progress,
                    reward_weights=self.system.advantages.reward_weights,
                )

    def draw_curve(self) -> None:
        """The reward so far, as a picture."""
        pictures.plot_curves(
            read_metrics(self.workdir / "metrics.jsonl"),
            {"training": "reward", "held-out prompts": "evaluation/reward"},
            self.folder / "curve.png",
        )

    def draw_prompts(self, done: int) -> Iterator[list[dict]]:
        """The prompts of the steps after `done`; notes down where each step's end."""
        for number, records in enumerate(self.prompts, done + 1):
            self.drawn[number] = self.prompts.get_state()
            yield records

    def show_timeline(self, done: int) -> None:
        """Writes down what the workers did in a step; a picture of the last ones where one is due."""
        intervals = self.driver.intervals
        clock = time.time() - self.driver.now()
        self.kept(lambda: self.timeline.write(intervals, clock))
        self.shown = [*self.shown[1 - SHOWN_STEPS :], intervals]
        if done % self.config.pictures.every == 0 or done == self.config.steps:
            first = done - len(self.shown) + 1
            steps = f"steps {first} to {done}" if first < done else f"step {done}"
            path = self.folder / f"timeline_{done:06d}.png"
            shown = [interval for step in self.shown for interval in step]
            self.kept(lambda: draw(shown, path, steps))
            self.kept(lambda: self.log.picture(path))

    def places(self, done: int) -> dict[str, Any]:
        """How far the prompts and the metrics are after `done` steps."""
        place = self.drawn.pop(done) if done else self.prompts.get_state()
        return {"prompts": place, "metrics": self.log.position()}

    def save(self, position: Position) -> None:
        """A checkpoint of a position, unless there is one."""
        self.saved = position.done
        self.positions.wait()
        oldest = self.positions.oldest()
        if oldest is not None:
            self.kept(lambda: self.forget(oldest))
        kept = position.begun.kept if position.begun else {}
        with self.orders.together("save", (position.done, tuple(kept))):
            self.positions.save(position)

    def forget(self, done: int) -> None:
        """Cuts the records of what the workers did back to the step that was `done`."""
        lines = read_metrics(self.workdir / "metrics.jsonl")
        ended = next(line[CLOCK] for line in lines if line["step"] == done)
        self.timeline.cut_back(done, ended)
        self.commands.cut_back(done)

    def finish(self, position: Position) -> None:
        """The results, on the console and as pictures."""
        last = saved_images(self.folder / "after.npz")
        if last is None or last["step"] != position.done:
            # The run had stopped here, and only now is this to be its last step.
            self.look(position.done, position.state)
            last = saved_images(self.folder / "after.npz")
        first = saved_images(self.folder / "before.npz")
        if first is None or len(first["scores"]) != len(self.held_out):
            print(
                f"{self.folder / 'before.npz'} is missing or damaged: nothing is compared with it"
            )
        else:
            self.compare(first, last)
        self.draw_curve()
        print(where(self.workdir))
        mark_finished(self.workdir, position.done)

    def compare(self, first: dict[str, np.ndarray], last: dict[str, np.ndarray]) -> None:
        """A sheet of the same prompts before and after, and the table of their rewards."""
        count = min(len(first["images"]), len(last["images"]))
        pictures.before_after(
            first["images"][:count],
            last["images"][:count],
            [record["prompt"] for record in self.held_out[:count]],
            first["scores"][:count],
            last["scores"][:count],
            title="held-out prompts, the same noise before and after tuning",
        ).save(self.folder / "before_after.png")
        print(table(self.held_out, first["scores"], last["scores"]))


@contextlib.contextmanager
def full_disk(workdir: pathlib.Path) -> Iterator[None]:
    """Says in a sentence that the disk is full, wherever that shows first."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise SaveFailed(
            f"the disk of {workdir} is full: make room, and the same command goes on from the last checkpoint"
        ) from error


def whole(position: Position) -> bool:
    """Whether a position's arrays are still there: an update consumes them."""
    return not any(leaf.is_deleted() for leaf in jax.tree.leaves(position.state))


def table(
    records: list[dict], before: Float[np.ndarray, "n"], after: Float[np.ndarray, "n"]
) -> str:
    """Mean reward before and after, over all and for each task."""
    rows = {"all": (before.mean(), after.mean())}
    tasks = zip(by_tag(records, before).items(), by_tag(records, after).items(), strict=True)
    rows |= {tag: (first, last) for (tag, first), (_, last) in tasks}
    title = f"reward on {len(records)} held-out prompts"
    lines = [f"{title:<32}{'before':>8}{'after':>8}{'gain':>8}"]
    for tag, (first, last) in rows.items():
        lines.append(f"  {tag:<30}{first:8.3f}{last:8.3f}{last - first:+8.3f}")
    return "\n".join(lines)


def where(workdir: pathlib.Path) -> str:
    """What lies where in a workdir."""
    files = {
        "pictures/before_after.png": "the same prompts before and after",
        "pictures/curve.png": "reward over the steps",
        "pictures/step_*.png": "pictures on the way",
        "pictures/timeline_*.png": "what every worker did in the last steps",
        "timeline.json": "the same since the oldest checkpoint, for ui.perfetto.dev",
        "commands.jsonl": "what the scheduler told them to do since then, in order",
        "metrics.jsonl": "every number, a line a step",
        "starts.jsonl": "versions, commit, devices and command of each start",
        "tensorboard/": "the same for TensorBoard",
        "checkpoints/": "to continue, evaluate or export",
    }
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {what}" for name, what in files.items()]
    return "\n".join([f"In {workdir}:", *lines])
