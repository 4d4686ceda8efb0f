"""The verifiable reward of the shapes world: read the picture, then apply GenEval's rules."""

import numpy as np
from jaxtyping import Float

from digen_jax.errors import ConfigError
from digen_jax.rewards.geneval import satisfies
from digen_jax.shapes.read import find_objects


def shapes_geneval(
    images: Float[np.ndarray, "b h w 3"], prompts: list[str], metadata: list[dict]
) -> Float[np.ndarray, "b"]:
    """1 where a picture shows what its record includes and nothing that it excludes, else 0.

    A picture with an object that resembles no shape gets 0, too: otherwise tuning would learn to add such objects.

    Raises:
      ConfigError: a record has no `include`, such as a line of plain text.
    """
    for prompt, record in zip(prompts, metadata, strict=True):
        if "include" not in record:
            raise ConfigError(
                f"shapes_geneval cannot score {prompt!r}: its record has no `include`; use a JSONL "
                "prompt file in GenEval's format"
            )
    scores = []
    for image, record in zip(images, metadata, strict=True):
        found = find_objects(image)
        named = all(thing.label is not None for thing in found)
        scores.append(named and satisfies(found, record))
    return np.asarray(scores, np.float32)
