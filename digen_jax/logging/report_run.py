"""Reads the report data of one run from its workdir. The run may still be in progress."""

import base64
import dataclasses
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Num
from PIL import Image

from digen_jax.data.prompt_files import prompts_label
from digen_jax.errors import ConfigError
from digen_jax.files import leaves_of, parse_json, read_json, read_lines
from digen_jax.images import to_uint8
from digen_jax.logging.evaluation import saved_images
from digen_jax.logging.metrics import IMAGE_FILE, image_folder, read_metrics
from digen_jax.logging.timeline import COLORS, WAIT, order_rows, read_events

EVALUATION = "evaluation/"
# Prefixes after "evaluation/" that are not a task's reward.
NO_TASK = ("reward", "reward_of/", "images/")
# Fields of starts.jsonl that a report shows: see `workdir.record_start`.
START: dict = {"command": list, "time": str, "done": int, "devices": dict, "changes": list}
START |= {"python": str, "packages": dict, "commit": str | None}
MAX_INTERVALS = 5000  # of the timeline; older steps are dropped
MAX_STEPS = 40  # steps whose images are shown
GRIDS = ("step", "best", "worst")  # names in the folder of images
LARGEST = 768  # longer side in pixels of each image of a pair
LOSSLESS = 1 << 16  # maximum number of pixels of a losslessly encoded image
QUALITY = 82


@dataclasses.dataclass(frozen=True)
class Run:
    """A run, as read from its workdir."""

    workdir: pathlib.Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # one record per step
    starts: list[dict[str, Any]]  # one record per start
    finished: bool

    @property
    def step(self) -> int:
        """The last step with metrics. Evaluations of older steps may be recorded after it."""
        return max(line["step"] for line in self.metrics)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The records with an evaluation."""
        return [line for line in self.metrics if f"{EVALUATION}reward" in line]

    @property
    def tasks(self) -> list[str]:
        """The tasks of the evaluation prompts, in order."""
        names = [name for line in self.evaluations for name in line if name.startswith(EVALUATION)]
        tags = dict.fromkeys(name.removeprefix(EVALUATION) for name in names)
        return [tag for tag in tags if tag != NO_TASK[0] and not tag.startswith(NO_TASK[1:])]

    @property
    def weights(self) -> dict[str, float]:
        """The reward weights, by metric name; scores without a weight are omitted."""
        found: dict[str, float] = {}
        for reward in self.config.get("rewards", ()):
            # Runs of older versions have no labels.
            title, weight = reward.get("label") or reward["name"], reward["weight"]
            several = weight if isinstance(weight, dict) else {"": weight}
            found |= {f"{title}/{entry}".rstrip("/"): factor for entry, factor in several.items()}
        return found

    @property
    def trained(self) -> set[str]:
        """The names of the rewards with a nonzero weight."""
        return {name for name, weight in self.weights.items() if weight}

    def curve(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns (steps with the metric, its values)."""
        points = [(line["step"], line[metric]) for line in self.metrics if metric in line]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return np.asarray(steps, int), np.asarray(values, float)


def read_run(workdir: pathlib.Path) -> Run:
    """Reads a run from its workdir.

    Raises:
      ConfigError: There is no run, it has no metrics yet, or a file is invalid.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: set --workdir to the workdir of launch/train.py")
    try:
        config = read_json(path)
    except ValueError as error:
        raise ConfigError(f"{error}: restore the file") from error
    log = workdir / "metrics.jsonl"
    metrics = read_metrics(log) if log.is_file() else []
    if not metrics:
        raise ConfigError(
            f"the run in {workdir} has no metrics yet: wait until its first evaluation or step is done"
        )
    try:  # a finished run may have been extended
        finished_step = parse_json((workdir / "finished.json").read_bytes())["step"]
    except (OSError, ValueError, KeyError, TypeError):
        finished_step = None
    finished = finished_step == max(line["step"] for line in metrics)
    run = Run(workdir, config, metrics, _read_starts(workdir / "starts.jsonl"), finished)
    try:
        shown = config["model"]["folder"], config["algorithm"]["name"], config["steps"]
        if [type(one) for one in shown] != [str, str, int]:
            raise TypeError(shown)
        sum(run.weights.values())
        evaluated_prompts([run])
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the config of a run ({error!r}): restore the file"
        ) from error
    return run


def _read_starts(path: pathlib.Path) -> list[dict[str, Any]]:

    def check(start: Any) -> dict[str, Any]:
        for name, kind in START.items():
            if not isinstance(start.get(name), kind):
                raise ValueError(name)
        if not all(isinstance(one, str) for one in start["command"] + start["changes"]):
            raise ValueError("command or changes")
        return start

    problem = "is not the record of a start: restore or delete the file"
    return read_lines(path, check, problem) if path.exists() else []


def evaluated_prompts(runs: Sequence[Run]) -> str:
    """Returns the label of the evaluation prompts (see `prompts_label`), or a neutral one if runs differ."""

    def label(config: dict[str, Any]) -> str:
        prompts = config.get("prompts", {})
        training = prompts.get("files") or [prompts.get("file", "")]
        return prompts_label(training, config.get("evaluation", {}).get("prompts", ""))

    labels = {label(run.config) for run in runs}
    return labels.pop() if len(labels) == 1 else "evaluation prompts"


def differing(runs: Sequence[Run]) -> dict[str, list[str]]:
    """Returns the config fields that differ between runs, with each run's value."""
    each = [leaves_of(run.config) for run in runs]
    names = dict.fromkeys(name for leaves in each for name in leaves)
    shown = {name: [json.dumps(leaves.get(name)) for leaves in each] for name in names}
    return {name: values for name, values in shown.items() if len(set(values)) > 1}


class Pair(NamedTuple):
    """Images of a prompt before training and at the latest evaluation, from the same noise, as data URLs."""

    prompt: str
    before: str
    after: str
    scores: tuple[float, float]


class Shown(NamedTuple):
    """Image grids of a step as data URLs, named as in GRIDS; "" if missing."""

    step: int
    grids: dict[str, str]


def image_pairs(run: Run) -> tuple[int, list[Pair]] | None:
    """Returns (step of the newer images, pairs of images), or None if there are fewer than two evaluations."""
    files = (image_folder(run.workdir) / f"{name}.npz" for name in ("before", "after"))
    before, after = map(saved_images, files)
    if before is None or after is None:
        return None
    count = min(len(before["images"]), len(after["images"]))
    # Runs of older versions did not save the prompts.
    prompts = before.get("prompts", [f"prompt {number}" for number in range(1, count + 1)])

    def pair(i: int) -> Pair:
        old, new = (_array_url(one["images"][i]) for one in (before, after))
        scores = float(before["scores"][i]), float(after["scores"][i])
        return Pair(str(prompts[i]), old, new, scores)

    return int(after["step"]), list(map(pair, range(count)))


def image_grids(run: Run) -> list[Shown]:
    """Returns the image grids of at most MAX_STEPS evenly spaced steps."""
    files: dict[int, dict[str, pathlib.Path]] = {}
    for path in image_folder(run.workdir).glob("*.png"):
        if (match := IMAGE_FILE.fullmatch(path.name)) and match[1] in GRIDS:
            files.setdefault(int(match[2]), {})[match[1]] = path
    steps = [step for step in sorted(files) if step <= run.step]
    if len(steps) > MAX_STEPS:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, MAX_STEPS).round().astype(int)]
    found = [Shown(step, {n: _file_url(files[step].get(n)) for n in GRIDS}) for step in steps]
    return [one for one in found if any(one.grids.values())]


def _file_url(path: pathlib.Path | None) -> str:
    """Encodes an image file, or the animation next to it, as a data URL; "" if it is missing or incomplete."""
    if path is None:
        return ""
    try:
        animation = path.with_suffix(".webp")
        return _data_url(animation.read_bytes()) if animation.exists() else _url(Image.open(path))
    except (OSError, SyntaxError):  # Pillow raises SyntaxError for a broken PNG
        return ""


def _array_url(array: Num[np.ndarray, "h w 3"]) -> str:
    image = Image.fromarray(to_uint8(array))
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return _url(image)


def _url(image: Image.Image) -> str:
    file = io.BytesIO()
    options = {"quality": QUALITY}
    if image.width * image.height <= LOSSLESS:
        options = {"lossless": True}
    image.convert("RGB").save(file, "webp", method=4, **options)
    return _data_url(file.getvalue())


def _data_url(webp: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(webp).decode()


def timeline(run: Run, most: int = MAX_INTERVALS) -> dict[str, Any] | None:
    """Returns the timeline of a run's latest steps for the page's script, or None if nothing is recorded.

    Args:
      run: The run.
      most: Maximum number of intervals; older ones are dropped.

    Returns:
      "rows": worker names; "kinds": [name, color]; "spans": [row, kind, start, length, chunk or -1]; "steps":
      [number, start, end] of each completed step, which may overlap with other work. Times are in ms.
    """
    events = read_events(run.workdir / "timeline.json")
    names = {event["tid"]: event["args"].get("name", "") for event in events if event["ph"] == "M"}
    spans = sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"] + e["dur"])
    windows: dict[int, list[float]] = {}
    kept = spans[-most:]
    for event in kept:
        step = event["args"].get("step")
        if step is not None and event["name"] != "evaluate":
            start, end = event["ts"], event["ts"] + event["dur"]
            window = windows.setdefault(step + 1, [start, end])
            window[:] = min(window[0], start), max(window[1], end)
    if len(spans) > most and len(windows) > 1:
        del windows[min(windows)]  # its first intervals were dropped
    windows = {step: window for step, window in windows.items() if step <= run.step}
    if not windows:
        return None
    first = min(start for start, _ in windows.values())
    rows = order_rows((names.get(event["tid"], ""), event["name"]) for event in kept)
    kinds = list(dict.fromkeys(event["name"] for event in kept))

    def milliseconds(microseconds: float) -> float:
        return round(microseconds / 1000, 1)

    def span(event: dict[str, Any]) -> list[float]:
        row, kind = rows.index(names.get(event["tid"], "")), kinds.index(event["name"])
        start, length = milliseconds(event["ts"] - first), milliseconds(event["dur"])
        return [row, kind, start, length, event["args"].get("chunk", -1)]

    return {
        "rows": rows,
        "kinds": [[name, COLORS.get(name, WAIT)[1]] for name in kinds],
        "spans": [span(event) for event in kept if event["ts"] + event["dur"] > first],
        "steps": [
            [step, *(milliseconds(time - first) for time in window)]
            for step, window in sorted(windows.items())
        ],
    }
