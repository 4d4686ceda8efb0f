"""A whole training run in a workdir: claim it, continue where it was left, train, show the results."""

import pathlib
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float
from ml_collections import ConfigDict

from digen_jax import pictures, rewards
from digen_jax.assemble import build
from digen_jax.checkpoint import (
    Checkpointer,
    claim_workdir,
    finished_step,
    mark_finished,
    template_of,
)
from digen_jax.metrics import MetricsLog, Progress, read_metrics
from digen_jax.prompts.dataset import prompt_batches
from digen_jax.prompts.files import read_prompt_file
from digen_jax.recipe import MAY_CHANGE, check, complete
from digen_jax.runtime.evaluation import by_tag, evaluate
from digen_jax.runtime.loop import Interrupt, run_step
from digen_jax.runtime.sampler import Weights
from digen_jax.runtime.trainer import State
from digen_jax.settings import ConfigError

Metrics = dict[str, float]


class Position(NamedTuple):
    """Where a run stands after `done` steps."""

    done: int
    state: State
    weights: Weights  # as published
    host: dict[str, Any]  # what else a checkpoint needs: places in the prompts and in the metrics


def train(config: ConfigDict, workdir: pathlib.Path) -> int | None:
    """Runs or continues the training that `config` describes, in `workdir`.

    Returns:
      None where the run is finished; the process's exit code where a signal stopped it before.

    Raises:
      ConfigError: a mistake in what was asked for, or in what the reward returns.
    """
    config = complete(config)
    check(config)
    with claim_workdir(workdir, config.to_dict(), MAY_CHANGE):
        finished = finished_step(workdir) or 0
        if finished < config.steps:
            return Run(config, workdir).train()
    print(f"This run is finished: {finished} steps are done. To go on, give a larger config.steps.")
    print(where(workdir))
    return None


class Run:
    """The parts of a run and the files that it has open in its workdir."""

    def __init__(self, config: ConfigDict, workdir: pathlib.Path):
        self.config, self.workdir = config, workdir
        self.system = build(config, jax.devices())
        self.reward = rewards.resolve(config.reward.name)
        held_out = read_prompt_file(config.evaluation.prompts)
        self.held_out = held_out[: config.evaluation.images or None]
        self.prompts = prompt_batches(
            config.prompts.file, config.batch.groups, config.seed, workdir / "prompts"
        )
        self.log = MetricsLog(workdir, config.wandb.to_dict() or None)
        self.checkpoints = Checkpointer(
            workdir / "checkpoints", config.checkpoint.every, config.checkpoint.keep
        )
        self.folder = workdir / "pictures"
        self.folder.mkdir(exist_ok=True)

    def train(self) -> int | None:
        """From the last checkpoint to the last step, then the results; returns as `train` does."""
        print(self.system.placement.describe(), flush=True)
        with Interrupt() as interrupt, closing(self.log), closing(self.checkpoints):
            position = self.advance(self.resume(), interrupt)
        if position.done < self.config.steps:
            print(f"Stopped and saved after step {position.done}; the same command continues.")
            return 128 + interrupt.asked
        self.finish(position)
        return None

    def resume(self) -> Position:
        """The newest checkpoint's position, or the beginning's once the start has been evaluated."""
        state = self.system.trainer.init(self.system.start)
        found = self.checkpoints.restore_latest(template_of(self.saved(state)))
        if found is None:
            return self.begin(state)
        if found.step > self.config.steps:
            raise ConfigError(
                f"config.steps = {self.config.steps}, but the run in {self.workdir} has done "
                f"{found.step} steps already: give {found.step} or more"
            )
        print(f"continuing after step {found.step}", flush=True)
        state = State(**{name: found.arrays.get(name) for name in State._fields})
        self.prompts.set_state(found.host["prompts"])
        self.log.cut_back(found.host["metrics"])
        return Position(found.step, state, self.system.publish(state.tuned), found.host)

    def begin(self, state: State) -> Position:
        """The position before the first step; the first line of metrics is the base model's."""
        count = len(self.held_out)
        print(f"compiling, and evaluating the base model on {count} held-out prompts", flush=True)
        self.log.cut_back(0)
        self.log.write(0, self.look(0, state))
        return Position(0, state, self.system.publish(state.tuned), self.places())

    def advance(self, position: Position, interrupt: Interrupt) -> Position:
        """Step after step, to the last or until a signal asks to stop; where it ends is saved."""
        with closing(Progress(self.config.steps, position.done)) as progress:
            try:
                while position.done < self.config.steps and not interrupt.asked:
                    position, line = self.step(position)
                    progress.update(position.done, line["reward"], line["images_per_second"])
                    if "evaluation/reward" in line:
                        reward = f"{line['evaluation/reward']:.3f}"
                        progress.note(f"step {position.done}: {reward} on the held-out prompts")
            finally:
                # After a failure, too, what came before it is kept. An update consumes its state:
                # a step that fails behind its first update leaves the last checkpoint as it is.
                if not any(leaf.is_deleted() for leaf in jax.tree.leaves(position.state)):
                    self.save(position)
        return position

    def step(self, position: Position) -> tuple[Position, Metrics]:
        """One step with all that is due after it: evaluation, pictures, metrics, checkpoint."""
        state, weights, line = run_step(
            self.system,
            self.config,
            position.state,
            position.weights,
            next(self.prompts),
            self.reward,
        )
        done = position.done + 1
        line |= self.look(done, state)
        self.log.write(done, line)
        position = Position(done, state, weights, self.places())
        if self.checkpoints.due(done):
            self.save(position)
        return position, line

    def look(self, done: int, state: State) -> Metrics:
        """Evaluation and pictures, where they are due after `done` steps; the evaluation's metrics."""
        last = done == self.config.steps
        evaluated = done % self.config.evaluation.every == 0 or last
        shown = done % self.config.pictures.every == 0 or last
        if not (evaluated or shown):
            return {}
        count = self.config.pictures.images
        found = evaluate(
            self.system.evaluator,
            self.system.publish(state.tuned if state.ema is None else state.ema),
            self.held_out if evaluated else self.held_out[:count],
            self.reward,
            self.config.reward.name,
            self.config.evaluation.batch,
        )
        captions = [record["prompt"] for record in found.records[:count]]
        images, scores = found.images[:count], found.scores
        if shown:
            title = f"after step {done}" if done else "before tuning"
            grid = pictures.image_grid(images, captions, 6, scores[:count], title)
            grid.save(self.folder / f"step_{done:06d}.png")
        if not evaluated:
            return {}
        file = self.folder / ("after.npz" if done else "before.npz")
        np.savez(file, step=done, images=images, scores=scores)
        return found.metrics()

    def places(self) -> dict[str, Any]:
        """How far the prompts and the metrics are."""
        return {"prompts": self.prompts.get_state(), "metrics": self.log.position()}

    def saved(self, state: State) -> dict[str, Any]:
        """The arrays of a checkpoint."""
        arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
        return arrays | {"root_key": jax.random.key(self.config.seed)}

    def save(self, position: Position) -> None:
        """A checkpoint of a position, unless there is one."""
        self.checkpoints.save(position.done, self.saved(position.state), position.host)

    def finish(self, position: Position) -> None:
        """The results, on the console and as pictures."""
        after = self.folder / "after.npz"
        if not after.exists() or np.load(after)["step"] != position.done:
            # The run had stopped here, and only now is this to be its last step.
            self.look(position.done, position.state)
        first, last = np.load(self.folder / "before.npz"), np.load(after)
        count = min(len(first["images"]), len(last["images"]))
        pictures.before_after(
            first["images"][:count],
            last["images"][:count],
            [record["prompt"] for record in self.held_out[:count]],
            first["scores"][:count],
            last["scores"][:count],
            title="held-out prompts, the same noise before and after tuning",
        ).save(self.folder / "before_after.png")
        pictures.plot_curves(
            read_metrics(self.workdir / "metrics.jsonl"),
            {"training": "reward", "held-out prompts": "evaluation/reward"},
            self.folder / "curve.png",
        )
        print(table(self.held_out, first["scores"], last["scores"]))
        print(where(self.workdir))
        mark_finished(self.workdir, position.done)


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
        "metrics.jsonl": "every number, a line a step",
        "tensorboard/": "the same for TensorBoard",
        "checkpoints/": "to continue, evaluate or export",
    }
    width = max(map(len, files))
    lines = [f"  {name:<{width}}  {what}" for name, what in files.items()]
    return "\n".join([f"In {workdir}:", *lines])
