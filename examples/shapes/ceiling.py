"""Ceiling of the shapes rewards: scores of rendered images or clips before and after the autoencoder.

python -m examples.shapes.ceiling assets/shapes-sd3
python -m examples.shapes.ceiling assets/moving-shapes

No transformer can recover information that the autoencoder loses.
"""

import pathlib
import sys
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from digen_jax.checkpoints.folder import read_sampling
from digen_jax.families import load_family
from digen_jax.images import to_uint8
from digen_jax.logging.evaluation import Evaluation, score_table
from digen_jax.models.family import Size
from examples.shapes.captions import heldout_records
from examples.shapes.networks import PIPELINES, Family
from examples.shapes.render import render_batch
from examples.shapes.reward import shapes_geneval, shapes_motion
from examples.shapes.scene import sample_scene
from examples.shapes.vocabulary import MOTION_TASKS, TASKS

BATCH = 180


def round_trip(
    family: Family, vae: Any, images: Float[np.ndarray, "n *t h w 3"]
) -> Float[np.ndarray, "n *t h w 3"]:
    """Returns images or clips (RGB in [0, 1]) after the encoder's mean and the decoder."""
    options = PIPELINES[family.pipeline].at_once

    @jax.jit
    def pass_through(vae, images):
        variables = {"params": vae}
        mean, _ = family.vae.apply(variables, 2 * images - 1, method="encode", **options)
        return family.vae.apply(variables, mean, method="decode", **options) / 2 + 0.5

    parts = [pass_through(vae, images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
    return np.clip(np.concatenate(parts), 0, 1)


def ceiling(family: Family, vae: Any, size: Size, seed: int = 0) -> tuple[Evaluation, Evaluation]:
    """Returns (rendered, after the round trip): square images or clips, one for each held-out prompt."""
    rng, frames = np.random.default_rng(seed), size.frames
    records = heldout_records(TASKS if frames == 1 else MOTION_TASKS)
    scenes = [sample_scene(record, rng, frames) for record in records]
    rendered = np.stack([render_batch(scene.clip(frames), size.height) for scene in scenes])
    decoded = round_trip(family, vae, rendered[:, 0] if frames == 1 else rendered)
    return _scored(records, rendered), _scored(records, decoded.reshape(rendered.shape))


def _scored(records: list[dict], clips: Float[np.ndarray, "n t h w 3"]) -> Evaluation:
    shown, prompts = to_uint8(clips), [record["prompt"] for record in records]
    if shown.shape[1] == 1:
        return Evaluation(records, shown, shapes_geneval(shown[:, 0], prompts, records))
    return Evaluation(records, shown, shapes_motion(shown, prompts, records))


def main(folder: pathlib.Path) -> None:
    """Prints the table."""
    family, own = load_family(folder), read_sampling(folder)
    default = family.default_size()
    size = default._replace(**{name: own[name] for name in default._fields if name in own})
    found = ceiling(family, family.read(folder, "vae"), size)
    columns = zip(("rendered", "after autoencoder"), found, strict=True)
    print(score_table({head: evaluation.by_task() for head, evaluation in columns}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m examples.shapes.ceiling PIPELINE_FOLDER")
    main(pathlib.Path(sys.argv[1]))
