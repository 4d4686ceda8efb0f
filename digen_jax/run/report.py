"""The output of a run: metrics, pictures, progress, results."""

import contextlib
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

from digen_jax.config.recipe import Recipe
from digen_jax.engine.divergence import DivergedError
from digen_jax.engine.system import System
from digen_jax.errors import ConfigError
from digen_jax.models.family import Family
from digen_jax.models.text.tokenizer_files import known_words
from digen_jax.policies import describe_computation, start_warnings
from digen_jax.process.launching import describe_cache
from digen_jax.process.progress import Progress
from digen_jax.prompts.notes import tell
from digen_jax.records.environment import note_start
from digen_jax.records.records import Records
from digen_jax.run.positions import Position
from digen_jax.runtime.driver import Driver
from digen_jax.runtime.evaluation import Evaluation
from digen_jax.scheduling.settings import Settings

Metrics = dict[str, float]

STEADY = 5  # steps of a process until their waits are those of all
MUCH = 0.15  # of the devices' time
# What to change, by what devices wait for: see `timeline.CAUSES`.
ADVICE = {
    "sampling": "give config.placement.rollout more devices, or set config.placement.trainer.samples=True",
    "training": "give config.placement.trainer more devices or workers, or set config.runtime.max_policy_lag=1",
    "reward": "set config.reward_pool.processes or config.runtime.max_policy_lag higher",
    "update": "set config.runtime.max_policy_lag=1",
    "weights": "set config.runtime.max_policy_lag=1, or tune a LoRA, which is smaller",
    "evaluation": "set config.evaluation.every higher, or config.evaluation.images lower",
}


def print_warnings(recipe: Recipe, family: Family) -> None:
    """Prints warnings about the config and about the prompt files, such as prompts that are cut off."""
    for warning in start_warnings(recipe, family):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    paths = (*recipe.prompts.paths, recipe.evaluation.prompts)
    tell(paths, family.cut, known_words(family))


class Reporter:
    """The reporting of a run.

    Args:
      workdir: the run's folder, which this process has claimed.
      recipe: the run's.
      settings: the scheduler's, which say when a version is evaluated and shown.
      held_out: the prompts of evaluations.
      release_room: frees the disk space that is reserved for a checkpoint.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        recipe: Recipe,
        settings: Settings,
        held_out: list[dict],
        release_room: Callable[[], None],
    ):
        self.records = Records(workdir, recipe, release_room)
        self._workdir, self._recipe, self._settings = workdir, recipe, settings
        self._held_out = held_out
        self._progress: Progress | None = None
        self._on_cpu = False
        self._steps = 0  # of this process

    def begin(self, system: System) -> None:
        """Prints notes on meshes, a LoRA's layers and the compile cache, before anything compiles."""
        print(system.placement.describe(), flush=True)
        # Virtual devices that share a machine's cores: idle ones leave their cores to others.
        self._on_cpu = system.placement.rollout.mesh.devices.flat[0].platform == "cpu"
        line = describe_computation(self._recipe, system.policy.family, system.placement)
        print(line, flush=True)
        if lora := system.policy.lora:
            whose = "" if self._recipe.lora.targets else ", the model's own"
            print(f"LoRA of rank {lora.rank} on the layers {lora.targets}{whose}", flush=True)
        print(describe_cache(), flush=True)

    def start(self, done: int, changed: list[str]) -> None:
        """Reports a start after `done` steps; `changed` lists changes of the config since the last start."""
        if done:
            print(f"continuing after step {done}", flush=True)
        else:
            prompts = f"{len(self._held_out)} {self._recipe.evaluated_prompts}"
            print(f"compiling, and evaluating the model before tuning on {prompts}", flush=True)
        for change in changed:
            print(f"changed from step {done + 1} on: {change}", flush=True)
        note_start(self._workdir, done, changed)
        self._progress = Progress(self._recipe.steps, done)

    def step(self, done: int, line: Metrics, driver: Driver) -> None:
        """Records a completed step with its metrics."""
        clock = time.time() - driver.now()
        shown = self._settings.is_shown(done)
        self.records.step_timeline(done, driver.intervals, clock, picture=shown)
        if driver.executor.extremes is not None:
            self.records.extremes(done, driver.executor.extremes)
        self.records.step(done, line)
        self._steps += 1
        if self._steps == STEADY and not self._on_cpu and (found := waiting(line)):
            self._progress.note(found)
        utilisation = None if self._on_cpu else line["utilisation"]
        self._progress.update(done, line["reward"], line["images_per_second"], utilisation)

    def evaluated(self, version: int, found: Evaluation) -> None:
        """Records a version's evaluation, or pictures that it has drawn for inspection."""
        if self._settings.is_shown(version):
            self.records.show(version, found)
        if not self._settings.is_evaluated(version):
            return
        self.records.evaluated(version, found)
        when = f"step {version}" if version else "before tuning"
        prompts = self._recipe.evaluated_prompts
        self._progress.note(f"{when}: {found.scores.mean():.3f} on the {prompts}")

    def rest(self, driver: Driver) -> None:
        """Records the intervals after the last step's end."""
        self.records.timeline(driver.rest(), time.time() - driver.now())

    def conclude(self, done: int) -> None:
        """Records the results after all `done` steps."""
        self.records.conclude(done, self._held_out)

    def results(self) -> None:
        """Shows the results on the console."""
        self.records.results(self._held_out)

    def close(self) -> None:
        """Closes the progress bar and the records."""
        if self._progress is not None:
            self._progress.close()
        self.records.close()


def waiting(line: Metrics) -> str:
    """What the devices waited for most in a step, and what to change; empty if that was little."""
    waits = {cause: line.get(f"seconds/wait_{cause}", 0.0) for cause in ADVICE}
    cause = max(waits, key=waits.get)
    share = (1 - line["utilisation"]) * waits[cause] / (sum(waits.values()) or 1.0)
    if share < MUCH:
        return ""
    return f"devices wait {share:.0%} of the time for {cause}: {ADVICE[cause]}"


@contextlib.contextmanager
def divergence_reported(position: Position, saved: int | None, recipe: Recipe) -> Iterator[None]:
    """Raises ConfigError with advice if a value in the step after a position became infinite or NaN.

    Args:
      position: The last good one. It is saved at the end of the run if it is whole.
      saved: Steps of the newest checkpoint. None means that there is none.
      recipe: The run's.
    """
    try:
        yield
    except DivergedError as error:
        done, trainer = position.done, recipe.trainer
        saved = done if position.is_whole() else saved
        newest = (
            "nothing is saved" if saved is None else f"the newest checkpoint is of step {saved}"
        )
        raise ConfigError(
            f"{error} in step {done + 1}: training has diverged; the last good step is {done}, and {newest}. Lower "
            f"config.trainer.learning_rate = {trainer.learning_rate} or config.trainer.clip_norm = "
            f"{trainer.clip_norm}, and begin in another workdir"
        ) from error
