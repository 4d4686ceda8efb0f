"""Files that a run writes into its workdir besides checkpoints: metrics, timeline, commands, pictures, results."""

import contextlib
import functools
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError
from digen_jax.images import stills
from digen_jax.process.ending import Stopped
from digen_jax.records import pictures
from digen_jax.records.checkpoint import SaveFailed
from digen_jax.records.evaluated import save_images, saved_images
from digen_jax.records.metrics import CLOCK, MetricsLog, read_metrics
from digen_jax.records.room import FULL
from digen_jax.records.timeline_files import TraceFile, draw
from digen_jax.runtime.evaluation import Evaluation, by_tag
from digen_jax.runtime.log import CommandLog
from digen_jax.runtime.scores import Extremes
from digen_jax.scheduling.timeline import Interval

NO_SPACE = re.compile("|".join(map(os.strerror, FULL)))
SHOWN_STEPS = 3  # in a picture of the timeline


class Records:
    """A run's metrics, timeline, commands and pictures, and the results of its evaluations.

    Args:
      workdir: the run's folder, which this process has claimed.
      recipe: the run's.
      release_room: frees the disk space that is reserved for a checkpoint.

    Raises:
      ConfigError: metrics.jsonl holds garbage.
    """

    def __init__(self, workdir: pathlib.Path, recipe: Recipe, release_room: Callable[[], None]):
        self._workdir, self._release_room = workdir, release_room
        self._full: OSError | None = None  # the disk is, as a file of the workdir has shown
        self._timeline = TraceFile(workdir / "timeline.json")
        self._shown: list[list[Interval]] = []  # of the last steps
        self._metrics = MetricsLog(workdir, recipe.trackers, recipe.as_json())
        self._commands: CommandLog | None = None
        self._folder = workdir / "pictures"
        self._folder.mkdir(exist_ok=True)
        self._count = recipe.pictures.images
        self._prompts = recipe.evaluated_prompts

    def close(self) -> None:
        """Ends the trackers' runs; the files are whole after every write."""
        self._metrics.close()

    def _kept(self, write: Callable[[], Any]) -> None:
        """Writes a file of the workdir; on a full disk into the reserved space, and then the run must stop."""
        try:
            write()
        except OSError as error:
            if error.errno not in FULL:
                raise
            self._full = error
            self._release_room()
            write()

    def check_disk(self) -> None:
        """Checks that everything could be written so far.

        Raises:
          SaveFailed: the disk is full.
        """
        if self._full:
            raise SaveFailed(f"the disk of {self._workdir} is full")

    def forget(self, done: int) -> None:
        """Cuts the workers' timeline and commands back to the step that was `done`."""
        self._kept(lambda: self._forget(done))

    def _forget(self, done: int) -> None:
        lines = read_metrics(self._workdir / "metrics.jsonl")
        ended = next(line[CLOCK] for line in lines if line["step"] == done)
        self._timeline.cut_back(done, ended)
        self._commands.cut_back(done)

    def begin_commands(self, done: int) -> CommandLog:
        """The command log of this process, which begins after `done` steps."""
        self._commands = CommandLog(self._workdir / "commands.jsonl", done)
        return self._commands

    def place(self) -> int:
        """The position in the metrics, for `cut_back`; they are flushed to the disk."""
        return self._metrics.position()

    def cut_back(self, place: int) -> None:
        """Removes the metrics after a position.

        Raises:
          ConfigError: the file has fewer lines.
        """
        self._metrics.cut_back(place)

    def write(self, done: int, line: dict[str, float]) -> None:
        """Writes metrics of the step that is `done`, or of an evaluation after it."""
        self._kept(lambda: self._metrics.write(done, line))

    def step(self, done: int, line: dict[str, float]) -> None:
        """Writes the metrics and commands of the step that is `done`."""
        self.write(done, line)
        self._kept(self._commands.flush)

    def evaluated(self, done: int, found: Evaluation) -> None:
        """Writes the evaluation after `done` steps: its metrics, the curve, and the images for the results."""
        self.write(done, found.metrics())
        self._keep(done, found)
        if done:
            self._kept(self._draw_curve)

    def timeline(self, intervals: Sequence[Interval], clock: float) -> None:
        """Writes what the workers did; `clock` is the time, in seconds, of the intervals' 0."""
        self._kept(lambda: self._timeline.write(intervals, clock))

    def step_timeline(
        self, done: int, intervals: list[Interval], clock: float, picture: bool
    ) -> None:
        """Writes what the workers did in the step that is `done`; where asked for, a picture of the last steps."""
        self.timeline(intervals, clock)
        self._shown = [*self._shown[1 - SHOWN_STEPS :], intervals]
        if picture:
            first = done - len(self._shown) + 1
            steps = f"steps {first} to {done}" if first < done else f"step {done}"
            path = self._folder / f"timeline_{done:06d}.png"
            shown = [interval for step in self._shown for interval in step]
            self._kept(lambda: draw(shown, path, steps))
            self._kept(lambda: self._metrics.picture(path))

    def show(self, done: int, found: Evaluation) -> None:
        """Writes a picture of the model's images after `done` steps, with their rewards; for clips an animation too."""
        count = self._count
        captions = [record["prompt"] for record in found.records[:count]]
        title = f"after step {done}" if done else "before tuning"
        grids = [
            pictures.image_grid(images, captions, 6, found.scores[:count], title)
            for images in found.clips[:count].swapaxes(0, 1)
        ]
        path = self._folder / f"step_{done:06d}.png"
        self._kept(lambda: pictures.save_frames(path, grids))
        self._kept(lambda: self._metrics.picture(path))

    def extremes(self, done: int, found: Extremes) -> None:
        """Writes pictures of the best and the worst images of the step that is `done`, with prompts and scores."""
        for name, sample in found._asdict().items():
            captions = [record["prompt"] for record in sample.records]
            title = f"the {name} images of step {done}"
            sheet = pictures.image_grid(sample.images, captions, 6, sample.values, title)
            path = self._folder / f"{name}_{done:06d}.png"
            self._kept(functools.partial(sheet.save, path))
            self._kept(functools.partial(self._metrics.picture, path))

    def _keep(self, done: int, found: Evaluation) -> None:
        """Keeps the first images and all scores of an evaluation, for the results."""
        images, scores = stills(found.clips[: self._count]), found.scores
        file = self._folder / ("after.npz" if done else "before.npz")
        prompts = np.asarray([record["prompt"] for record in found.records[: len(images)]])
        self._kept(
            lambda: save_images(file, step=done, images=images, scores=scores, prompts=prompts)
        )

    def _draw_curve(self) -> None:
        """Writes the reward so far as a picture."""
        pictures.plot_curves(
            read_metrics(self._workdir / "metrics.jsonl"),
            {"training": "reward", self._prompts: "evaluation/reward"},
            self._folder / "curve.png",
        )

    def conclude(self, done: int, held_out: list[dict]) -> None:
        """Writes a sheet of the same prompts before and after all `done` steps, of the evaluated records."""
        if (found := self._compared(held_out)) is None:
            return
        first, last = found
        count = min(len(first["images"]), len(last["images"]))
        sheet = pictures.before_after(
            first["images"][:count],
            last["images"][:count],
            [record["prompt"] for record in held_out[:count]],
            first["scores"][:count],
            last["scores"][:count],
            title=f"{self._prompts}, the same noise before and after tuning",
        )
        path = self._folder / "before_after.png"
        self._kept(lambda: sheet.save(path))
        self._kept(lambda: self._metrics.picture(path, done))

    def results(self, held_out: list[dict]) -> None:
        """Prints the results and draws the curve; `held_out` are the evaluated records."""
        if (found := self._compared(held_out)) is None:
            print(
                f"{self._folder / 'before.npz'} is missing or damaged: nothing is compared with it"
            )
        else:
            print(table(self._prompts, held_out, *(one["scores"] for one in found)))
        self._draw_curve()
        print(where(self._workdir))

    def _compared(
        self, held_out: list[dict]
    ) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]] | None:
        """What was kept of the first and of the last evaluation; None where one is missing or damaged."""
        first, last = (saved_images(self._folder / f"{when}.npz") for when in ("before", "after"))
        if first is None or last is None or len(first["scores"]) != len(held_out):
            return None
        return first, last


@contextlib.contextmanager
def full_disk(workdir: pathlib.Path) -> Iterator[None]:
    """Turns the first error of a full disk into one sentence.

    Raises:
      SaveFailed: the disk is full.
    """
    try:
        yield
    except (ConfigError, Stopped):
        raise
    except Exception as error:
        # Libraries that write data sets raise errors of their own, with the system's words.
        if getattr(error, "errno", None) not in FULL and not NO_SPACE.search(str(error)):
            raise
        raise SaveFailed(
            f"the disk of {workdir} is full: make room, and the same command continues from the last checkpoint"
        ) from error


def table(
    prompts: str, records: list[dict], before: Float[np.ndarray, "n"], after: Float[np.ndarray, "n"]
) -> str:
    """Mean reward before and after, over all and for each task; `prompts` is the label of the prompts."""
    rows = {"all": (before.mean(), after.mean())}
    tasks = zip(by_tag(records, before).items(), by_tag(records, after).items(), strict=True)
    rows |= {tag: (first, last) for (tag, first), (_, last) in tasks}
    title = f"reward on {len(records)} {prompts}"
    lines = [f"{title:<32}{'before':>8}{'after':>8}{'gain':>8}"]
    for tag, (first, last) in rows.items():
        lines.append(f"  {tag:<30}{first:8.3f}{last:8.3f}{last - first:+8.3f}")
    return "\n".join(lines)


def where(workdir: pathlib.Path) -> str:
    """The files of a workdir and what they hold."""
    files = {
        "pictures/before_after.png": "the same prompts before and after",
        "pictures/curve.png": "reward over the steps",
        "pictures/step_*.png": "pictures on the way",
        "pictures/best_*.png, worst_*.png": "the best and the worst images of a step",
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
