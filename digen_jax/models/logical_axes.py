"""Names of the dimensions of parameters: sharding rules map these names to a mesh's axes.

Names that t5x, MaxText and MaxDiffusion also have are the same.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flax.traverse_util import flatten_dict, unflatten_dict

from digen_jax.checkpoints.lora import RANK
from digen_jax.checkpoints.names import LAYERS, is_scanned

NAMES = {
    LAYERS: "layers of a scan",
    "embed": "width of a network",
    "heads": "all heads of an attention, times their width",
    "head_dim": "width of one head",
    "mlp": "hidden width of a feed-forward layer",
    "modulation": "shifts, scales and gates side by side",
    "vocab": "tokens of a vocabulary",
    "positions": "positions of tokens",
    "text": "text embeddings, from or to other components",
    "channels": "channels of latents",
    "conv_in": "channels that a convolution reads",
    "conv_out": "channels that a convolution writes",
    RANK: "rank of a LoRA",
}

# (regex over a module's path, axes of its kernel); the first match decides.
Table = Sequence[tuple[str, tuple[str | None, ...]]]


def logical_axes(shapes: Mapping[str, Any], table: Table, lists: tuple[str, ...]) -> dict[str, Any]:
    """A component's tree with the axes of each leaf, a name or None for every dimension.

    A leaf with fewer dimensions than the table gives has the last of them, as biases and scales have. A leaf
    with more has None in front, for the window of a convolution, after the layers of a scan.

    Raises:
      ValueError: names a parameter that is not in the table.
    """

    def names(path: tuple[str, ...], dimensions: int) -> tuple[str | None, ...]:
        module = "/".join(path[:-1])
        found = next((axes for pattern, axes in table if re.search(pattern, module)), None)
        if found is None:
            raise ValueError(f"{'/'.join(path)} is not in the table of logical axes")
        stack = (LAYERS,) if is_scanned(path, lists) else ()
        own = dimensions - len(stack)
        return (*stack, *(None,) * (own - len(found)), *found[max(0, len(found) - own) :])

    flat = flatten_dict(shapes)
    return unflatten_dict({path: names(path, len(leaf.shape)) for path, leaf in flat.items()})
