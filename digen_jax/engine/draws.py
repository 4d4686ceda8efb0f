"""Random draws of a step's images, which depend only on the step's number and the groups' serials.

So they are the same on any mesh, at any time, for any version, and in a resumed run.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Int, Key

from digen_jax.algorithms.subsets import random_timesteps
from digen_jax.flow.sampling import group_keys, image_keys
from digen_jax.flow.windows import Window


class Drawn(NamedTuple):
    """The keys and steps for sampling some images, besides their prompts: the last arguments of `Sampler.generate`.

    `start_keys` are the keys of shared start noise, None: the images' own. `start` is the window's first
    step, `trained` contains each image's own steps of the window, None: all of them.
    """

    keys: Key[Array, "n"]
    start_keys: Key[Array, "n"] | None
    start: int
    trained: Int[np.ndarray, "k n"] | None

    def cut(self, part: slice) -> "Drawn":
        """The draws of some of these images."""
        start_keys = None if self.start_keys is None else self.start_keys[part]
        trained = None if self.trained is None else self.trained[:, part]
        return Drawn(self.keys[part], start_keys, self.start, trained)


@dataclasses.dataclass(frozen=True)
class Draws:
    """The draws of a run's steps. An image trains a random share of the window's steps (`random_timesteps`).

    With `shared_noise` all images of a group start from one noise (`group_keys`).
    """

    seed: int
    window: Window | None  # None: no step is noisy
    shared_noise: bool = False

    def of(self, step: int, serials: Int[np.ndarray, "n"], images: Int[np.ndarray, "n"]) -> Drawn:
        """The draws of images in a step, from their groups' serials and their numbers in the group."""
        root, trained = jax.random.key(self.seed), None
        start_keys = group_keys(root, serials) if self.shared_noise else None
        window = self.window
        if window and window.fraction < 1:
            seeds = ((self.seed, int(s), int(i)) for s, i in zip(serials, images, strict=True))
            drawn = [random_timesteps(seed, window.length, window.fraction) for seed in seeds]
            trained = np.stack(drawn, axis=1).astype(np.int32)
        start = window.start(step, self.seed) if window else 0
        return Drawn(image_keys(root, serials, images), start_keys, start, trained)
