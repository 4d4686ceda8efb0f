"""A whole training run in a workdir: claim it, continue where it was left, train, show the results."""

import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
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


class Position(NamedTuple):
    """Where a run stands after `done` steps."""

    done: int
    state: State
    weights: Weights  # as published
    host: dict[str, Any]  # what else a checkpoint needs: places in the prompts and in the metrics


def train(config: ConfigDict, workdir: pathlib.Path) -> None:
    """Runs or continues the training that `config` describes, in `workdir`.

    Raises:
      ConfigError: a mistake in what was asked for, before anything slow starts.
    """
    config = complete(config)
    check(config)
    with claim_workdir(workdir, config.to_dict(), MAY_CHANGE):
        if (finished_step(workdir) or 0) >= config.steps:
            print(f"This run is finished: all {config.steps} steps are done.")
            print(where(workdir))
            return
        Run(config, workdir).train()


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
        (workdir / "pictures").mkdir(exist_ok=True)

    def train(self) -> None:
        """From the last checkpoint to the last step, then the results."""
        print(self.system.placement.describe())
        position = self.resume()
        progress = Progress(self.config.steps, position.done)
        with Interrupt() as interrupt:
            try:
                while position.done < self.config.steps and not interrupt.asked:
                    position = self.step(position)
                    line = self.latest
                    progress.update(position.done, line["reward"], line["images_per_second"])
            finally:
                # Where a step failed, too: what came before it is whole, and kept.
                if not any(leaf.is_deleted() for leaf in jax.tree.leaves(position.state)):
                    self.save(position)
                self.checkpoints.close()
                progress.close()
        if position.done < self.config.steps:
            print(f"Stopped and saved after step {position.done}; the same command continues.")
        else:
            self.finish()

    def resume(self) -> Position:
        """The newest checkpoint's position, or the beginning's once the start has been evaluated."""
        state = self.system.trainer.init(self.system.start)
        found = self.checkpoints.restore_latest(template_of(self.saved(state)))
        if found is None:
            self.log.cut_back(0)
            weights = self.system.publish(state.tuned)
            self.latest = self.look(0, state, file="before.npz")
            self.log.write(0, self.latest)
            host = {"prompts": self.prompts.get_state(), "metrics": self.log.position()}
            return Position(0, state, weights, host)
        state = State(**{name: found.arrays.get(name) for name in State._fields})
        self.prompts.set_state(found.host["prompts"])
        self.log.cut_back(found.host["metrics"])
        print(f"Continuing after step {found.step}.")
        return Position(found.step, state, self.system.publish(state.tuned), found.host)

    def step(self, position: Position) -> Position:
        """One step with all that is due after it: evaluation, pictures, metrics, checkpoint."""
        _, state, weights, _ = position
        state, weights, metrics = run_step(
            self.system, self.config, state, weights, next(self.prompts), self.reward
        )
        done = position.done + 1
        self.latest = metrics | self.look(done, state)
        self.log.write(done, self.latest)
        host = {"prompts": self.prompts.get_state(), "metrics": self.log.position()}
        position = Position(done, state, weights, host)
        if self.checkpoints.due(done):
            self.save(position)
        return position

    def look(self, done: int, state: State, file: str = "after.npz") -> dict[str, float]:
        """Evaluation and pictures, where they are due after `done` steps; their metrics."""
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
            grid = pictures.image_grid(images, captions, 6, scores[:count], f"after step {done}")
            grid.save(self.workdir / "pictures" / f"step_{done:06d}.png")
        if not evaluated:
            return {}
        np.savez(self.workdir / "pictures" / file, images=images, scores=scores)
        return found.metrics()

    def saved(self, state: State) -> dict[str, Any]:
        """The arrays of a checkpoint."""
        arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
        return arrays | {"root_key": jax.random.key(self.config.seed)}

    def save(self, position: Position) -> None:
        """A checkpoint of a position, unless there is one."""
        self.checkpoints.save(position.done, self.saved(position.state), position.host)

    def finish(self) -> None:
        """The results, on the console and as pictures."""
        folder = self.workdir / "pictures"
        before, after = (np.load(folder / f"{name}.npz") for name in ("before", "after"))
        count = len(before["images"])
        records = self.held_out
        pictures.before_after(
            before["images"],
            after["images"],
            [record["prompt"] for record in records[:count]],
            before["scores"][:count],
            after["scores"][:count],
            title="held-out prompts, the same noise before and after tuning",
        ).save(folder / "before_after.png")
        pictures.plot_curves(
            read_metrics(self.workdir / "metrics.jsonl"),
            {"training": "reward", "held-out prompts": "evaluation/reward"},
            folder / "curve.png",
        )
        print(table(records, before["scores"], after["scores"]))
        print(where(self.workdir))
        mark_finished(self.workdir, self.config.steps)


def table(records: list[dict], before: np.ndarray, after: np.ndarray) -> str:
    """Mean reward before and after, for each task and over all."""
    rows = {"all": (before.mean(), after.mean())}
    tasks = zip(by_tag(records, before).items(), by_tag(records, after).items(), strict=True)
    rows |= {tag: (first, last) for (tag, first), (_, last) in tasks}
    lines = [f"reward on {len(records)} held-out prompts   before   after   gain"]
    for tag, (first, last) in rows.items():
        lines.append(f"  {tag:<30}{first:9.3f}{last:8.3f}{last - first:+7.3f}")
    return "\n".join(lines)


def where(workdir: pathlib.Path) -> str:
    """What lies where in a workdir."""
    files = {
        "pictures/before_after.png": "the same prompts before and after",
        "pictures/curve.png": "reward over the steps",
        "pictures/step_*.png": "pictures on the way",
        "metrics.jsonl": "every number; tensorboard/ has the same",
        "checkpoints/": "to continue, evaluate or export",
    }
    return "\n".join(f"  {workdir / name!s:<44} {what}" for name, what in files.items())
