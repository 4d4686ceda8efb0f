"""All output of a run except checkpoints: workdir files, progress and results."""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from matplotlib.ticker import EngFormatter

from digen_jax.checkpoints.checkpointer import FULL, SaveFailed
from digen_jax.config.train_config import TrainConfig
from digen_jax.errors import ConfigError
from digen_jax.images import middle_frames
from digen_jax.logging.command_log import CommandLog
from digen_jax.logging.evaluation import Evaluation, Extremes, by_tag, save_images, saved_images
from digen_jax.logging.images import before_after, image_grid, plot_curves, save_frames
from digen_jax.logging.metrics import CLOCK, MetricsLog, image_folder, read_metrics
from digen_jax.logging.timeline import TraceFile, draw_timeline
from digen_jax.logging.workdir import record_start
from digen_jax.parallel.system import System
from digen_jax.policies import describe_computation
from digen_jax.process.job import describe_cache
from digen_jax.process.shutdown import Stopped
from digen_jax.process.terminal import Progress
from digen_jax.scheduling.commands import Interval

NO_SPACE = re.compile("|".join(map(os.strerror, FULL)))
TIMELINE_STEPS = 3  # per timeline image
GRID_FRAMES = 32  # maximum of an animated grid
ADVICE_STEP = 5  # first step of a process with typical waits
ADVICE_SHARE = 0.15  # fraction of device time
# Advice by wait cause: see `scheduling.commands.CAUSES`.
ADVICE = {
    "sampling": "give config.placement.rollout more devices, or set config.placement.trainer.samples=True",
    "training": "give config.placement.trainer more devices or workers, or set config.runtime.max_policy_lag=1",
    "reward": "set config.reward_pool.processes or config.runtime.max_policy_lag higher",
    "update": "set config.runtime.max_policy_lag=1",
    "weights": "set config.runtime.max_policy_lag=1, or train a LoRA, which is smaller",
    "evaluation": "set config.evaluation.every higher, or config.evaluation.images lower",
}
FILES = {
    "images/before_after.png": "the same prompts before and after",
    "images/curve.png": "reward over the steps",
    "images/step_*.png": "images during the run",
    "images/best_*.png, worst_*.png": "the best and the worst images of a step",
    "images/timeline_*.png": "what every worker did in the last steps",
    "timeline.json": "the same since the oldest checkpoint, for ui.perfetto.dev",
    "commands.jsonl": "the scheduler's commands since then, in order",
    "metrics.jsonl": "all metrics, one line per step",
    "starts.jsonl": "versions, commit, devices and command of each start",
    "tensorboard/": "the same metrics for TensorBoard",
    "checkpoints/": "to continue, evaluate or export",
}


class RunLog:
    """Metrics, timeline, commands, images, progress and results of a run.

    Args:
      workdir: Folder of the run, locked by this process.
      config: Config of the run.
      held_out: Evaluation prompts.
      release_space: Frees the disk space reserved for a checkpoint.

    Attributes:
      metrics: Log of all metrics.

    Raises:
      ConfigError: The file metrics.jsonl is damaged.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        config: TrainConfig,
        held_out: list[dict],
        release_space: Callable[[], None],
    ):
        self._workdir, self._config, self._held_out = workdir, config, held_out
        self._settings = config.scheduled(len(held_out))
        self._release_space = release_space
        self._disk_is_full = False
        self._trace = TraceFile(workdir / "timeline.json")
        self._last_steps: list[list[Interval]] = []
        self.metrics = MetricsLog(workdir, config.trackers, config.as_json())
        self._folder = image_folder(workdir)
        self._folder.mkdir(exist_ok=True)
        self._prompts, self._count = config.evaluated_prompts, config.images.count
        self._open = contextlib.ExitStack()
        self._open.callback(self.metrics.close)
        self._on_cpu = False
        self._steps = 0  # of this process

    def describe(self, system: System) -> None:
        """Prints notes on meshes, LoRA layers and the compile cache, before compilation."""
        print(system.placement.describe(), flush=True)
        # Virtual devices share cores, so their utilization is not meaningful.
        self._on_cpu = system.placement.rollout.mesh.devices.flat[0].platform == "cpu"
        line = describe_computation(self._config, system.policy.family, system.placement)
        print(line, flush=True)
        if lora := system.policy.lora:
            default = "" if self._config.lora.targets else ", the model's default"
            print(f"LoRA of rank {lora.rank} on the layers {lora.targets}{default}", flush=True)
        print(describe_cache(), flush=True)

    def start(self, done: int, changed: list[str]) -> None:
        """Reports a start after `done` steps; `changed` lists config changes since the last start."""
        if done:
            print(f"continuing after step {done}", flush=True)
        else:
            prompts = f"{len(self._held_out)} {self._prompts}"
            evaluating = f", and evaluating the model before training on {prompts}"
            print(f"compiling{evaluating * bool(self._held_out)}", flush=True)
        for change in changed:
            print(f"changed from step {done + 1} on: {change}", flush=True)
        record_start(self._workdir, done, changed)
        self._progress = Progress(self._config.steps, done)
        self._open.callback(self._progress.close)

    def close(self) -> None:
        """Closes the progress bar and the trackers. The files are complete after every write."""
        self._open.close()

    def check_disk(self) -> None:
        """Raises SaveFailed if an earlier write found the disk full."""
        if self._disk_is_full:
            raise SaveFailed(f"the disk of {self._workdir} is full")

    def forget(self, done: int) -> None:
        """Removes the timeline and the commands of the first `done` steps."""
        lines = read_metrics(self._workdir / "metrics.jsonl")
        ended = next(line[CLOCK] for line in lines if line["step"] == done)
        self._write(self._trace.truncate, done, ended)
        self._write(self._commands.truncate, done)

    def open_command_log(self, done: int) -> CommandLog:
        """Opens the command log of this process, starting after `done` steps."""
        self._commands = CommandLog(self._workdir / "commands.jsonl", done)
        return self._commands

    def step(
        self,
        done: int,
        line: dict[str, float],
        intervals: list[Interval],
        clock: float,
        extremes: Extremes | None,
    ) -> None:
        """Logs a completed step.

        Args:
          done: Number of completed steps.
          line: Metrics of the step.
          intervals: Work and waits of all workers.
          clock: System time of the intervals' 0, in seconds.
          extremes: Best and worst images. None means that none are due.
        """
        self.timeline(intervals, clock)
        self._last_steps = [*self._last_steps[1 - TIMELINE_STEPS :], intervals]
        if self._settings.is_shown(done):
            first = done - len(self._last_steps) + 1
            steps = f"steps {first} to {done}" if first < done else f"step {done}"
            path = self._folder / f"timeline_{done:06d}.png"
            shown = [interval for step in self._last_steps for interval in step]
            self._write(draw_timeline, shown, path, steps)
            self._write(self.metrics.image, path)
        if extremes is not None:
            self.extremes(done, extremes)
        self._write(self.metrics.write, done, line)
        self._write(self._commands.flush)
        self._steps += 1
        if self._steps == ADVICE_STEP and not self._on_cpu and (advice := advice_on_waits(line)):
            self._progress.note(advice)
        unit = "clips" if self._config.model.frames > 1 else "images"
        metric = "reward" if "reward" in line else "loss"  # of images from files
        self._progress.update(done, line[metric], speed(line, unit, self._on_cpu), metric)

    def timeline(self, intervals: Sequence[Interval], clock: float) -> None:
        """Appends work and waits of the workers to the timeline; see `step` for `clock`."""
        self._write(self._trace.write, intervals, clock)

    def extremes(self, done: int, found: Extremes) -> None:
        """Writes grids of the best and worst images of a step, with prompts and scores."""
        for name, sample in found._asdict().items():
            captions = [record["prompt"] for record in sample.records]
            title = f"the {name} images of step {done}"
            grid = image_grid(sample.images, captions, 6, sample.values, title)
            self._save_image(grid, f"{name}_{done:06d}")

    def evaluated(self, version: int, found: Evaluation) -> None:
        """Logs an evaluation of a weights version: a grid if due, metrics, curve, and images for the results."""
        if self._settings.is_shown(version):
            self.show(version, found)
        if not self._settings.is_evaluated(version):
            return
        self._write(self.metrics.write, version, found.metrics())
        images = middle_frames(found.clips[: self._count])
        prompts = np.asarray([record["prompt"] for record in found.records[: len(images)]])
        content = dict(step=version, images=images, scores=found.scores, prompts=prompts)
        file = self._folder / ("after.npz" if version else "before.npz")
        self._write(functools.partial(save_images, file, **content))
        if version:
            self._write(self._plot_curve)
        when = f"step {version}" if version else "before training"
        self._progress.note(f"{when}: {found.scores.mean():.3f} on the {self._prompts}")

    def show(self, done: int, found: Evaluation) -> None:
        """Writes a grid of the model's images and rewards after `done` steps; for clips also an animation."""
        count = self._count
        captions = [record["prompt"] for record in found.records[:count]]
        title = f"after step {done}" if done else "before training"
        clips = found.clips[:count]
        every = -(-clips.shape[1] // GRID_FRAMES)
        frames = [
            image_grid(images, captions, 6, found.scores[:count], title)
            for images in clips[:, ::every].swapaxes(0, 1)
        ]
        path = self._folder / f"step_{done:06d}.png"
        self._write(save_frames, path, frames, self._config.images.fps / every)
        self._write(self.metrics.image, path)

    def conclude(self, done: int) -> None:
        """Writes a sheet of the same prompts before training and after all `done` steps."""
        if (found := self._first_and_last()) is None:
            return
        first, last = found
        count = min(len(first["images"]), len(last["images"]))
        sheet = before_after(
            first["images"][:count],
            last["images"][:count],
            [record["prompt"] for record in self._held_out[:count]],
            first["scores"][:count],
            last["scores"][:count],
            title=f"{self._prompts}, the same noise before and after training",
        )
        self._save_image(sheet, "before_after", done)

    def results(self) -> None:
        """Prints the results and plots the curve."""
        if not self._held_out:
            print(files_table(self._workdir))
            return
        if (found := self._first_and_last()) is None:
            print(f"{self._folder / 'before.npz'} is missing or damaged: there is no comparison")
        else:
            print(results_table(self._prompts, self._held_out, *(one["scores"] for one in found)))
        self._plot_curve()
        print(files_table(self._workdir))

    def _first_and_last(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
        """Returns saved images of the first and last evaluation, or None if one is missing or damaged."""
        first, last = (saved_images(self._folder / f"{when}.npz") for when in ("before", "after"))
        if first is None or last is None or len(first["scores"]) != len(self._held_out):
            return None
        return first, last

    def _plot_curve(self) -> None:
        metrics = read_metrics(self._workdir / "metrics.jsonl")
        curves = {"training": "reward", self._prompts: "evaluation/reward"}
        if self._config.algorithm.given_images:
            del curves["training"]
        plot_curves(metrics, curves, self._folder / "curve.png")

    def _save_image(self, image: Any, name: str, step: int | None = None) -> None:
        path = self._folder / f"{name}.png"
        self._write(image.save, path)
        self._write(self.metrics.image, path, step)

    def _write(self, write: Callable[..., Any], *arguments: Any) -> None:
        """Writes a file. On a full disk, uses the reserved space, and the run must then stop."""
        try:
            write(*arguments)
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._disk_is_full = True
            self._release_space()
            write(*arguments)


def speed(line: dict[str, float], unit: str, on_cpu: bool) -> list[str]:
    """Returns the speed of a step as texts: images per second, share of busy devices, and MFU or else FLOP/s.

    `unit` is "images" or "clips". Virtual CPU devices share cores, so they have no numbers of one device but FLOP/s.
    """
    total, each = line["images_per_second"], line["images_per_second_per_device"]
    found = [f"{total:.1f} {unit}/s"]
    if not on_cpu:
        found[0] += f" ({each:.3g} per device)" * (each < total)
        found.append(f"devices {line['utilisation']:.0%} busy")
    if "mfu" in line:
        found.append(f"MFU {line['mfu']:.0%}")
    elif flops := line.get("flops_per_second_per_device"):
        found.append(EngFormatter("FLOP/s per device", places=1)(flops))
    return found


def advice_on_waits(line: dict[str, float]) -> str:
    """Returns the main wait cause of a step and advice; empty if devices wait little."""
    waits = {cause: line.get(f"seconds/wait_{cause}", 0.0) for cause in ADVICE}
    cause = max(waits, key=lambda cause: waits[cause])
    share = (1 - line["utilisation"]) * waits[cause] / (sum(waits.values()) or 1.0)
    if share < ADVICE_SHARE:
        return ""
    return f"devices wait {share:.0%} of the time for {cause}: {ADVICE[cause]}"


@contextlib.contextmanager
def full_disk(workdir: pathlib.Path) -> Iterator[None]:
    """Converts errors of a full disk to `SaveFailed`.

    Raises:
      SaveFailed: The disk is full.
    """
    try:
        yield
    except (ConfigError, Stopped):
        raise
    except Exception as error:
        # Some libraries raise other types with the system's message.
        if getattr(error, "errno", None) not in FULL and not NO_SPACE.search(str(error)):
            raise
        raise SaveFailed(
            f"the disk of {workdir} is full: free space; then the same command continues from the last "
            "checkpoint"
        ) from error


def results_table(
    prompts: str, records: list[dict], before: Float[np.ndarray, "n"], after: Float[np.ndarray, "n"]
) -> str:
    """Formats mean rewards before and after, of all prompts and per task; `prompts` labels the prompts."""
    first, last = ({"all": x.mean()} | by_tag(records, x) for x in (before, after))
    title = f"reward on {len(records)} {prompts}"
    lines = [f"{title:<32}{'before':>8}{'after':>8}{'gain':>8}"]
    for tag, old in first.items():
        lines.append(f"  {tag:<30}{old:8.3f}{last[tag]:8.3f}{last[tag] - old:+8.3f}")
    return "\n".join(lines)


def files_table(workdir: pathlib.Path) -> str:
    """Formats a list of the files in a workdir and their contents."""
    width = max(map(len, FILES))
    return f"In {workdir}:" + "".join(f"\n  {n:<{width}}  {what}" for n, what in FILES.items())
