"""What a network keeps for its backward pass, and what it recomputes there."""

from typing import Literal

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from digen_jax.attention.key_weights import RESIDUALS

# "none": everything is kept. "blocks": only the blocks' inputs are. "keep_attention": these and what attention's
# backward pass needs of its forward one, so that attention is not computed again. "keep_products": the results of
# linear layers, too, so that only norms, activation functions and the like are recomputed.
Remat = Literal["none", "blocks", "keep_attention", "keep_products"]
PRODUCTS = "product"

_KEPT = {"blocks": (), "keep_attention": (RESIDUALS,), "keep_products": (RESIDUALS, PRODUCTS)}


def rematerialised(block: type[nn.Module], remat: Remat, scanned: bool) -> type[nn.Module]:
    """A block of which the backward pass recomputes what `remat` does not keep.

    Args:
      block: its products are marked by `product`.
      remat: see `Remat`.
      scanned: whether the block is the body of a scan, which is compiled apart, so that nothing undoes it.
    """
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    return nn.remat(block, prevent_cse=not scanned, policy=policy)


def product(y: Array) -> Array:
    """The result of a linear layer, so marked."""
    return checkpoint_name(y, PRODUCTS)
