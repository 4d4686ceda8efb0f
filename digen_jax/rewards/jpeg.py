"""JPEG size rewards: the standard sanity check that training optimizes a reward.

Black et al. 2023 (DDPO, arXiv 2305.13301). The size in units of 1000 bytes at quality 95 and the signs match both
kvablack/ddpo-pytorch (ddpo_pytorch/rewards.py, commit 1958463) and yifan123/flow_grpo (flow_grpo/rewards.py, commit
ac4c86e). They differ in the scale of compressibility: flow_grpo and this module divide it by 500.
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
    """JPEG size of each image; for a clip, the mean over its frames.

    The sources only score images; the mean over frames is specific to this project.
    """

    unit: int  # bytes per score of 1; negative values mean that small files score high

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns the scores. Prompts and metadata are ignored."""
        del prompts, metadata
        clips = images.reshape(len(images), -1, *images.shape[-3:])
        sizes = [[_size(frame) for frame in clip] for clip in clips]
        return (np.mean(sizes, axis=1) / self.unit).astype(np.float32)


def jpeg_incompressibility() -> JpegSize:
    """Returns a reward for large JPEG files: the size in units of 1000 bytes."""
    return JpegSize(UNIT)


def jpeg_compressibility() -> JpegSize:
    """Returns a reward for small JPEG files: minus the size in units of 500,000 bytes."""
    return JpegSize(-COMPRESSIBILITY_UNIT)


def known_incompressibility() -> SanityCheck:
    """Returns a flat image, a gradient and noise, with their sizes in libjpeg-turbo 3.

    Other versions may differ by a few bytes. The tolerance is 1/20 of the smallest size, which is less than 1/10 of the
    differences between sizes.
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
    sizes, scale = known_incompressibility(), np.float32(UNIT / COMPRESSIBILITY_UNIT)
    scores = -scale * np.asarray(sizes.expected)
    return dataclasses.replace(sizes, expected=scores, tolerance=float(scale) * sizes.tolerance)


def _size(image: UInt8[np.ndarray, "h w 3"]) -> int:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=QUALITY)
    return file.tell()
