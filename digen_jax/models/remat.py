"""What a network keeps for its backward pass, and what it recomputes there."""

import functools
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from digen_jax.attention.queries_keys import RESIDUALS

# From the most memory to the least. "none": everything is kept. "keep_products": blocks' inputs, the results of linear
# layers, and what attention's backward pass needs of its forward one; only norms, activation functions and the like
# are recomputed. "keep_attention": linear layers are, too. "blocks": everything but the blocks' inputs is.
Remat = Literal["none", "keep_products", "keep_attention", "blocks"]
PRODUCTS = "product"

_KEPT = {"blocks": (), "keep_attention": (RESIDUALS,), "keep_products": (RESIDUALS, PRODUCTS)}


def rematerialised(block: type[nn.Module], remat: Remat, scanned: bool) -> type[nn.Module]:
    """A block of which the backward pass recomputes what `remat` does not keep.

    Args:
      block: its products are marked by `product`.
      remat: see `Remat`.
      scanned: whether the block is the body of a scan, which is compiled separately, so that nothing undoes it.
    """
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    return nn.remat(block, prevent_cse=not scanned, policy=policy)


def block_run(
    block: type[nn.Module], name: str, first: int, last: int, remat: Remat
) -> Callable[..., nn.Module]:
    """The constructor of equal blocks first..last of the torch list `name` as one module, scanned if there are several.

    The blocks get (carry, *others) and return (carry, None); of the others each gets the same.
    """
    scanned = last > first
    block = rematerialised(block, remat, scanned)
    name = f"{name}_{first}"
    if scanned:
        name += f"to{last}"
        block = nn.scan(
            block,
            variable_axes={"params": 0, "lora": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=last - first + 1,
        )
    return functools.partial(block, name=name)


def product(y: Array) -> Array:
    """The result of a linear layer, so marked."""
    return checkpoint_name(y, PRODUCTS)
