"""Workdirs as runs leave them, written without a run."""

import json
import pathlib

import numpy as np

from digen_jax.logging.evaluation import save_images
from digen_jax.logging.images import image_grid
from digen_jax.logging.metrics import MetricsLog
from digen_jax.logging.timeline import TraceFile
from digen_jax.scheduling.commands import Chunk, Interval

REWARDS = [
    {"name": "shapes_geneval", "weight": 1.0},
    {"name": "module:both", "weight": {"good": 0.5, "none": 0.0}},
    {"name": "served", "label": "watched", "weight": 0.0},
]
HOSTILE = '</script><script>throw "hostile"</script><img src="http://127.0.0.1/x.png">'
START = {
    "done": 0,
    "changes": [],
    "time": "2026-01-01T00:00:00+00:00",
    "command": ["launch/train.py", "--config", "configs/a file.py", "--workdir", "runs/x"],
    "commit": "0123abc+",
    "python": "3.11.7",
    "packages": {"jax": "0.10.2"},
    "devices": {"kind": "cpu", "count": 8},
}


def config(seed: int, steps: int) -> dict:
    return {
        "seed": seed,
        "steps": steps,
        "model": {"folder": "assets/shapes-sd3"},
        "algorithm": {"name": "awm"},
        "rewards": REWARDS,
    }


def level(step: int, seed: int) -> float:
    """The reward of a step: rises, and higher for higher seeds."""
    return 0.2 + 0.05 * step + 0.1 * seed


def evaluation(step: int, seed: int) -> dict[str, float]:
    value = level(step, seed)
    return {
        "evaluation/reward": value,
        "evaluation/reward_of/shapes_geneval": value,
        "evaluation/reward_of/watched": 1 - value,
        "evaluation/images/sharpness": 300.0,
        "evaluation/colors": value,
        f"evaluation/{HOSTILE}": 0.5,
    }


def training(step: int, seed: int) -> dict[str, float]:
    value = level(step, seed)
    return {
        "reward": value,
        "reward_of/shapes_geneval": value,
        "reward_of/watched": 1 - value,
        "images/sharpness": 300.0 - step,
        "images/diversity": 0.2,
        "utilisation": 0.5,
        "images_per_second": 10.0,
        "seconds/train": 2.0 * step,
        "seconds/wait_faster_worker": 1.0,
        "gradient_norm": 1.0,
    }


def intervals(step: int) -> list[Interval]:
    """Work on one step, in seconds; of the next step's generation a part lies before this step's end."""
    at = 10.0 * step
    own = Chunk(step, 0)
    return [
        Interval("rollout 0", "generate", at, at + 4, own),
        Interval("trainer", "wait", at, at + 5, None, "reward"),
        Interval("reward", "score", at + 4, at + 5, own),
        Interval("trainer", "train", at + 5, at + 11, own),
    ]


def write_workdir(
    folder: pathlib.Path, seed: int = 0, done: int = 10, steps: int = 10
) -> pathlib.Path:
    """A run that is evaluated and shown every five steps; finished where all are done."""
    pictures = folder / "images"
    pictures.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(seed, steps)))
    (folder / "starts.jsonl").write_text(json.dumps(START) + "\n" + '{"done": 5, "chan')
    log = MetricsLog(folder)
    trace = TraceFile(folder / "timeline.json")
    for step in range(done + 1):
        if step:
            log.write(step, training(step, seed))
            trace.write(intervals(step - 1), clock=1e9)
        if step % 5 == 0:
            log.write(step, evaluation(step, seed))
            images = np.full((2, 16, 16, 3), 20 * step, np.uint8)
            name = pictures / ("after.npz" if step else "before.npz")
            scores = np.float32([0.25, 0.5 + step / 20])
            save_images(name, step=step, images=images, scores=scores, prompts=["a star", HOSTILE])
            image_grid(images, ["a", "b"], 2).save(pictures / f"step_{step:06d}.png")
    image_grid(images, ["a", "b"], 2).save(pictures / f"best_{done:06d}.png")
    (pictures / f"worst_{done:06d}.png").write_bytes(b"being written")
    if done == steps:
        (folder / "finished.json").write_text(json.dumps({"step": done}))
    return folder
