"""A learned reward as a function of numpy arrays, on the device that JAX has in this process."""

import jax
import numpy as np
from jaxtyping import Float32, Num

from digen_jax.images import to_uint8
from digen_jax.learned_rewards.scorer import Params, Scorer


class HostReward:
    """Scores pictures with their prompts.

    Args:
      scorer: the network.
      params: its parameters.
      batch: pictures that are scored at once, at most. Programs are compiled for each size of pictures, and for
        batches of 1, 2, 4 and so on up to this number.
    """

    def __init__(self, scorer: Scorer, params: Params, batch: int = 16):
        if not isinstance(batch, int) or batch < 1:
            raise ValueError(f"batch must be a whole number from 1, not {batch!r}")
        self._scorer, self._params, self._batch = scorer, params, batch
        self._score = jax.jit(scorer.score)

    def __call__(
        self, images: Num[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """One score for each picture, of bytes or of numbers in [0, 1]; `metadata` is not used."""
        ids = self._scorer.tokenize(prompts)
        starts = range(0, len(images), self._batch)
        parts = [slice(start, start + self._batch) for start in starts]
        scores = [self._scored(to_uint8(images[part]), ids[part]) for part in parts]
        return np.concatenate([np.zeros(0, np.float32), *scores])

    def _scored(self, images: np.ndarray, ids: np.ndarray) -> Float32[np.ndarray, "b"]:
        count = len(images)
        rows = min(self._batch, 1 << (count - 1).bit_length())
        # Surplus rows repeat the first.
        chosen = np.where(np.arange(rows) < count, np.arange(rows), 0)
        return np.asarray(self._score(self._params, images[chosen], ids[chosen]))[:count]
