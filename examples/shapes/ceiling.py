"""Ceiling of the shapes reward: scores of rendered images before and after the autoencoder.

python -m examples.shapes.ceiling assets/shapes-sd3

No transformer can recover information that the autoencoder loses.
"""

import pathlib
import sys
from typing import Any, cast

import jax
import numpy as np
from jaxtyping import Float

from digen_jax.images import to_uint8
from digen_jax.logging.evaluation import Evaluation, score_table
from digen_jax.models.sd3.family import StableDiffusion3
from examples.shapes.captions import heldout_records
from examples.shapes.render import render_batch
from examples.shapes.reward import shapes_geneval
from examples.shapes.scene import sample_scene

BATCH = 180


def round_trip(
    family: StableDiffusion3, vae: Any, images: Float[np.ndarray, "n h w 3"]
) -> Float[np.ndarray, "n h w 3"]:
    """Returns images (RGB in [0, 1]) after the encoder's mean and the decoder."""

    @jax.jit
    def pass_through(images):
        variables = {"params": vae}
        mean, _ = family.vae.apply(variables, 2 * images - 1, method="encode")
        return cast(Any, family.vae).apply(variables, mean, method="decode") / 2 + 0.5

    parts = [pass_through(images[i : i + BATCH]) for i in range(0, len(images), BATCH)]
    return np.clip(np.concatenate(parts), 0, 1)


def ceiling(
    family: StableDiffusion3, vae: Any, size: int, seed: int = 0
) -> tuple[Evaluation, Evaluation]:
    """Returns (rendered, after the round trip): images of `size` pixels a side, one for each held-out prompt."""
    rng = np.random.default_rng(seed)
    records = heldout_records()
    rendered = render_batch([sample_scene(record, rng) for record in records], size)
    decoded = round_trip(family, vae, rendered)
    return _scored(records, rendered), _scored(records, decoded)


def _scored(records: list[dict], images: Float[np.ndarray, "n h w 3"]) -> Evaluation:
    shown = to_uint8(images)
    scores = shapes_geneval(shown, [record["prompt"] for record in records], records)
    return Evaluation(records, shown[:, None], scores)


def main(folder: pathlib.Path) -> None:
    """Prints the table."""
    family = StableDiffusion3.from_folder(folder)
    found = ceiling(family, family.read(folder, "vae"), family.default_size()[0])
    columns = zip(("rendered", "after autoencoder"), found, strict=True)
    print(score_table({head: evaluation.by_task() for head, evaluation in columns}))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m examples.shapes.ceiling PIPELINE_FOLDER")
    main(pathlib.Path(sys.argv[1]))
