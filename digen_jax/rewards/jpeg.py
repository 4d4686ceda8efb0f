"""Rewards by the size of an image's JPEG file: the usual test of whether a reward changes the model at all.

Black et al. 2023 (DDPO, arXiv 2305.13301). The size in units of 1000 bytes at quality 95, and the signs, are those of
both kvablack/ddpo-pytorch (ddpo_pytorch/rewards.py, commit 1958463) and yifan123/flow_grpo (flow_grpo/rewards.py,
commit ac4c86e). They differ in the scale of compressibility: flow_grpo divides it by 500, and so does this module.
"""

import dataclasses
import io

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from digen_jax.rewards.sanity_check import SanityCheck

QUALITY = 95
UNIT = 1_000  # bytes
COMPRESSIBILITY_UNIT = 500_000  # bytes


@dataclasses.dataclass(frozen=True)
class JpegSize:
    """The size of each image's JPEG file; for a clip, the mean over its frames.

    The sources score only images, so the mean is this project's choice.

    Attributes:
      unit: bytes per score of 1. Negative: small files score high.
    """

    unit: int

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns the scores; prompts and metadata are not used."""
        del prompts, metadata
        clips = images.reshape(len(images), -1, *images.shape[-3:])
        sizes = [[_size(frame) for frame in clip] for clip in clips]
        return (np.mean(sizes, axis=1) / self.unit).astype(np.float32)


def jpeg_incompressibility() -> JpegSize:
    """Returns a reward that is high for large JPEG files: the size in units of 1000 bytes."""
    return JpegSize(UNIT)


def jpeg_compressibility() -> JpegSize:
    """Returns a reward that is high for small JPEG files: minus the size in units of 500,000 bytes."""
    return JpegSize(-COMPRESSIBILITY_UNIT)


def known_incompressibility() -> SanityCheck:
    """Returns a flat image, a gradient and noise, with the sizes by libjpeg-turbo 3.

    Other versions may differ by some bytes. The tolerance is a twentieth of the smallest size, which is less than a
    tenth of the differences of the sizes.
    """
    down, across = np.mgrid[:64, :64].astype(np.uint8)
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    gradient = np.stack([4 * down, 4 * across, 2 * (down + across)], axis=-1)
    images = np.stack([np.full_like(noise, 128), gradient, noise])
    prompts = ["a grey square", "a gradient", "noise"]
    expected = np.array([0.689, 1.258, 5.446], np.float32)
    return SanityCheck(images, prompts, [{"prompt": prompt} for prompt in prompts], expected, 0.035)


def known_compressibility() -> SanityCheck:
    """Returns the same images with their compressibility."""
    sizes = known_incompressibility()
    scale = np.float32(UNIT / COMPRESSIBILITY_UNIT)
    return dataclasses.replace(
        sizes, expected=-scale * sizes.expected, tolerance=float(scale) * sizes.tolerance
    )


def _size(image: UInt8[np.ndarray, "h w 3"]) -> int:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
    return file.tell()
