"""Rematerialization: the activations that a network saves for its backward pass."""

import functools
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from digen_jax.attention.queries_keys import RESIDUALS

# From most to least memory. "none": saves everything. "keep_products": saves block inputs, results of linear layers,
# and the residuals of attention; recomputes only norms, activation functions and similar. "keep_attention": also
# recomputes linear layers. "blocks": saves only block inputs.
Remat = Literal["none", "keep_products", "keep_attention", "blocks"]
PRODUCTS = "product"

_KEPT = {"blocks": (), "keep_attention": (RESIDUALS,), "keep_products": (RESIDUALS, PRODUCTS)}


def rematerialised(block: type[nn.Module], remat: Remat, scanned: bool) -> type[nn.Module]:
    """Wraps a block so that its backward pass recomputes everything that `remat` does not save.

    Args:
      block: Block whose products are marked by `product`.
      remat: See `Remat`.
      scanned: Whether the block is the body of a scan, which is compiled separately, so CSE cannot undo the remat.
    """
    if remat == "none":
        return block
    policy = jax.checkpoint_policies.save_only_these_names(*_KEPT[remat])
    return nn.remat(block, prevent_cse=not scanned, policy=policy)


def block_run(
    block: type[nn.Module], name: str, first: int, last: int, remat: Remat
) -> Callable[..., nn.Module]:
    """Returns the constructor of equal blocks first..last of a torch list as one module, scanned if there are several.

    Blocks take (carry, *others) and return (carry, None); all blocks share the others.
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
    """Marks the result of a linear layer for the remat policy."""
    return checkpoint_name(y, PRODUCTS)
