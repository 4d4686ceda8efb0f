"""Settings of the scheduler, and expected and measured seconds of commands."""

import dataclasses
import functools
import math
from typing import Literal

from digen_jax.scheduling.commands import CLASSES, Command, Train


@dataclasses.dataclass(frozen=True)
class Settings:
    """The shape of a step and the bounds of the policy.

    `readiness` is the unit that must be completely scored before its chunks can be trained. With
    `max_incomplete_groups` above 0, chunks of at most that number of groups at a time are trained earlier.
    With `readiness` "group", a group that was complete before its first training does not count; with
    "step", every group counts.

    With `ordered`, the chunks of a step are trained in the order of their index (groups that fill up the
    step come last) and not of their arrival, so that the sums of a step are bitwise independent of timing.

    A step may start up to `max_policy_lag` versions early. At most `max_off_policy_fraction` of its groups start early.

    `max_candidates` above 0 enables dynamic sampling: the next candidates replace groups whose values are
    all equal, up to `max_candidates` groups in total. `oversampled_groups` more than needed are generated at
    any time, so that a replacement is available without delay. If the candidates run out, groups without
    variance fill up the step: the first by index, ranked after all others.
    """

    steps: int
    groups: int  # per step
    images: int  # per group
    chunk_images: int
    updates: int = 1
    readiness: Literal["group", "step"] = "group"
    max_incomplete_groups: int = 0  # 0 means no early training
    ordered: bool = False
    max_policy_lag: int = 1  # maximum age of a trajectory in versions; 0 means strictly on-policy
    max_off_policy_fraction: float = 0.5
    passes: int = 1  # per chunk in training
    max_candidates: int = 0
    oversampled_groups: int = 0
    retries: int = 2  # per piece of work; the next failure ends the run
    score_retries: int = 2  # the same for scores
    evaluate_every: int = 0  # versions; the last version is evaluated, too; 0 means never
    evaluation_images: int = 1
    show_every: int = 0  # the same for evaluations that only show images; 0 means never
    shown_images: int = 1  # the first images of an evaluation
    evaluation_batch: int = 1  # images per evaluation chunk
    # evaluated weights differ from those that sample training images
    separate_eval_weights: bool = False

    @functools.cached_property
    def early(self) -> bool:
        """Whether chunks are trained before their group or step is complete."""
        return self.max_incomplete_groups > 0

    @functools.cached_property
    def step_first(self) -> bool:
        """Whether the full step is scored before training starts."""
        return self.readiness == "step" and not self.early

    @functools.cached_property
    def unit_images(self) -> int:
        """Images of the smallest number of complete groups and chunks.

        Usually one group or, if a chunk holds several groups, one chunk. Its groups start, are
        scored and are trained together, so the scheduler handles them as one group.
        """
        return math.lcm(self.images, self.chunk_images)

    @functools.cached_property
    def units(self) -> int:
        """Units per step; the scheduler's code calls them groups."""
        return self.groups * self.images // self.unit_images

    @functools.cached_property
    def unit_chunks(self) -> int:
        """Chunks per unit."""
        return self.unit_images // self.chunk_images

    @functools.cached_property
    def chunks(self) -> int:
        """Trained chunks per step."""
        return self.units * self.unit_chunks

    @functools.cached_property
    def set_units(self) -> int:
        """Units per update set."""
        return self.units // self.updates

    @functools.cached_property
    def set_passes(self) -> int:
        """Training passes per update set."""
        return self.set_units * self.unit_chunks * self.passes

    @functools.cached_property
    def off_policy_units(self) -> int:
        """Units of a step that may start before the previous step ends."""
        if not self.max_policy_lag:
            return 0
        # Rounding must not remove a group from a fraction such as 0.3 of 10 groups.
        return math.floor(self.max_off_policy_fraction * self.units + 1e-9)

    def is_evaluated(self, version: int) -> bool:
        """Returns whether the full evaluation of a version is due."""
        return self._due(version, self.evaluate_every)

    def is_shown(self, version: int) -> bool:
        """Returns whether the first images of a version are due to be shown."""
        return self._due(version, self.show_every)

    def _due(self, version: int, every: int) -> bool:
        return every > 0 and (version % every == 0 or version == self.steps)

    def evaluated_images(self, version: int) -> int:
        """Returns the number of images in a version's evaluation, 0 without one."""
        if self.is_evaluated(version):
            return self.evaluation_images
        return min(self.shown_images, self.evaluation_images) if self.is_shown(version) else 0

    def evaluated_chunks(self, version: int) -> int:
        """Returns the number of chunks in a version's evaluation, 0 without one."""
        return math.ceil(self.evaluated_images(version) / self.evaluation_batch)


@dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds of commands; generation, decoding and evaluation on a worker of speed 1."""

    generate: float  # per image, on a worker of speed 1
    train: float  # per image, on the trainer
    decode: float = 0.0  # per image, on a worker of speed 1
    encode: float = 0.0  # per step's prompts, on any worker
    score: float = 0.0  # per image, by one scorer
    score_latency: float = 0.0  # per chunk, in addition to the scorer's work
    update: float = 0.0
    sync: float = 0.0  # per version, to one worker
    deliver: float = 0.0  # per image's samples, to the trainer
    evaluate: float = 0.0  # per evaluation chunk, on a worker of speed 1
    switch: float = 0.0  # between sampling and training, in each direction

    def seconds(self, kind: str, images: int, share: float = 1.0) -> float:
        """Returns the seconds of one command of a kind, for a chunk of `images` images or a share of its passes."""
        match kind:
            case "generate" | "decode" | "deliver":
                return getattr(self, kind) * images
            case "train":
                return self.train * images * share
            case "score":
                return self.score_latency + self.score * images
            case "decode evaluation" | "score evaluation":
                return 0.0  # included in "evaluate" until they are measured
        return getattr(self, kind)


WEIGHT = 1 / 16  # of the newest measurement, after the first 1 / WEIGHT ones
HUNG = 10  # multiple of the expected duration after which work counts as hung
# Evaluation chunks have another size, schedule and guidance.
OF_EVALUATION = {
    "generate": "evaluate",
    "decode": "decode evaluation",
    "score": "score evaluation",
}

# Before any measurement: training an image takes as long as generating it.
GUESSED = Costs(generate=1.0, train=1.0)


def cost_of(command: Command) -> str:
    """Returns the kind of a command's cost."""
    chunk = getattr(command, "chunk", None)
    if chunk is not None and chunk.evaluation:
        return OF_EVALUATION[command.kind]
    return command.kind


@dataclasses.dataclass
class CostModel:
    """Measured seconds, and expected seconds of kinds without measurements; "train" is per pass.

    `averages` are by kind and worker; worker "" is the average over all workers. The first measurements have equal
    weights: otherwise one long or short first measurement would dominate.
    """

    expected: Costs
    images: int  # per chunk
    passes: int  # per chunk
    averages: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)

    def observe(self, command: Command, seconds: float) -> None:
        """Adds a measurement to the averages of its worker and of its kind."""
        kind, worker = cost_of(command), getattr(command, "worker", "")
        if isinstance(command, Train):
            seconds /= command.count
        known, counts = self.averages.setdefault(kind, {}), self.counts.setdefault(kind, {})
        # Kinds without a worker, such as scores, only have the entry "".
        for name in {worker, ""}:
            counts[name] = counts.get(name, 0) + 1
            average = known.get(name, seconds)
            known[name] = average + max(WEIGHT, 1 / counts[name]) * (seconds - average)

    def predict(self, kind: str, worker: str = "") -> float:
        """Returns the seconds of the next command: the worker's average, all workers' average, or the expected cost."""
        known = self.averages.get(kind)
        if not known:
            return self.expected.seconds(kind, self.images, 1 / self.passes)
        return known.get(worker, known[""])

    def sampling(self, worker: str = "") -> float:
        """Returns the expected seconds to generate and decode a chunk on a worker; "" means the mean of all workers."""
        return self.predict("generate", worker) + self.predict("decode", worker)

    def handover(self) -> float:
        """Returns the expected seconds until a decoded chunk is scored and delivered."""
        return max(self.predict("score"), self.predict("deliver"))

    def measured(self, command: Command) -> float | None:
        """Returns the measured seconds of a command, or None before the first measurement of its kind.

        Expected costs are not used: they only compare commands, and may be in another unit.
        """
        kind = cost_of(command)
        if not self.averages.get(kind):
            return None
        seconds = self.predict(kind, getattr(command, "worker", ""))
        return seconds * command.count if isinstance(command, Train) else seconds


CLASSES |= {one.__name__: one for one in (Settings, Costs, CostModel)}


def time_limit(least: float, expected: float | None = None) -> float:
    """Returns the seconds after which a worker or a transfer counts as hung.

    Args:
      least: Minimum. 0 means no limit.
      expected: Usual duration. None means unknown.
    """
    return max(least, HUNG * (expected or 0.0)) if least else math.inf
