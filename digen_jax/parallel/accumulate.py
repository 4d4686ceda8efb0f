"""Sums of gradients over the passes of a chunk, also before its group is complete.

With the ratio identically 1 ("current" old log-probabilities, fresh chunks, one update a step)
the policy's gradient is linear in the advantages. For rewards r_i with mean m and std s, and the
gradient g_i of image i for advantage 1, it is

    sum((r_i - m) g_i) / (s + eps)

An open group keeps sum((r_i - m) g_i) and sum(g_i), with m the mean of the rewards so far: for a new
mean m', (m - m') times the second sum is added to the first. So when the group is complete the first
sum is centred, and nothing large was ever subtracted from it. The KL does not depend on the
advantages and has its own sum. The global std is known, and divides, only at the update.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from digen_jax.parallel.mesh import SAMPLES, SEQUENCE
from digen_jax.parallel.objectives import GroupSums, Term, Totals
from digen_jax.parallel.packing import MicroBatch, Shared, merged, merged_on_device
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.sharding import traced_on
from digen_jax.target import on_device


def sum_passes(
    gradient: Callable[..., Any],
    group: DeviceGroup,
    parameters: tuple[Any, ...],
    shared: Shared,
    micros: MicroBatch,
    totals: Any,
    layout: Any,
    piece: Any = None,
) -> Any:
    """`totals` + the sum over passes of gradient(*parameters, shared, pass), with the memory of one pass.

    `piece` is (first, count) of the passes, which may be traced, so that one program is for all pieces; None: all.

    If the parameters are whole on every device and tokens are not split, each device sums its own share, and the
    sums are reduced once, at the end, over the devices with other samples; otherwise XLA reduces in every pass.
    `layout` contains the totals' shardings.
    """

    def scan(parameters, shared, micros, totals, piece, merge, laid_out):
        def body(number, totals):
            micro = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, number, 0, False), micros
            )
            new = gradient(*parameters, shared, merge(micro))
            return laid_out(jax.tree.map(jnp.add, totals, new))

        passes = len(jax.tree.leaves(micros)[0])
        first, count = (0, passes) if piece is None else piece
        # A chunk of which images are left out has fewer passes.
        end = passes if piece is None else jnp.minimum(first + count, passes)
        return jax.lax.fori_loop(first, end, body, totals)

    def own_share(parameters, shared, micros, totals, piece):
        first = jax.lax.axis_index(SAMPLES) == 0
        mine = jax.tree.map(lambda a: jnp.where(first, a, 0), totals)
        with on_device(group.mesh.devices.flat[0], group.attention):
            mine = scan(
                parameters, shared, micros, mine, piece, merged_on_device, lambda sums: sums
            )
        return jax.lax.psum(mine, SAMPLES)

    whole = PartitionSpec()
    apart = group.mesh.shape[SEQUENCE] == 1 and all(map(group.holds_whole, parameters))
    if group.mesh.size == 1 or not apart:
        with traced_on(group.merged, group.attention):
            return scan(
                parameters,
                shared,
                micros,
                totals,
                piece,
                lambda micro: merged(micro, group),
                lambda sums: jax.lax.with_sharding_constraint(sums, layout),
            )
    # Unchecked, because the check would make every gradient of whole parameters a sum over all devices.
    return jax.shard_map(
        own_share,
        mesh=group.mesh,
        in_specs=(whole, whole, group.passes(1).spec, whole, whole),
        out_specs=whole,
        check_vma=False,
    )(parameters, shared, micros, totals, piece)


@dataclasses.dataclass(frozen=True)
class OpenGroup:
    """A group of which some images are trained: their rewards, and the sums over them."""

    rewards: Float[np.ndarray, "n"]
    sums: GroupSums


def recentred(sums: GroupSums, shift: Float[Array, ""]) -> GroupSums:
    """The same sums after the mean of the rewards fell by `shift`."""
    return sums._replace(centred=_add(sums.centred, sums.plain, shift))


def folded(
    totals: Totals, sums: GroupSums, scale: Float[Array, ""] | None, kl_coefficient: float
) -> Totals:
    """Adds a complete group to a step's totals; `scale` is 1 / (std + eps), None while that is not known."""
    if scale is None:
        totals = totals._replace(unscaled=_add(totals.unscaled, sums.centred, 1.0))
    else:
        totals = _with_policy(totals, sums.centred, scale)
    others = dict(sums.sums)
    if sums.kl is not None:
        penalty = _add(Term(totals.gradient, totals.sums["loss"]), sums.kl, kl_coefficient)
        totals = totals._replace(
            gradient=penalty.gradient, sums=totals.sums | {"loss": penalty.loss}
        )
        others["kl"] = sums.kl.loss
    added = {name: totals.sums[name] + value for name, value in others.items()}
    return totals._replace(sums=totals.sums | added)


def settled(totals: Totals, scale: Float[Array, ""]) -> Totals:
    """Totals whose unscaled part is divided by the global std: `scale` is 1 / (std + eps)."""
    return _with_policy(totals._replace(unscaled=None), totals.unscaled, scale)


def _with_policy(totals: Totals, term: Term, scale: Any) -> Totals:
    """Adds `scale` times the policy's part of the loss."""
    gradient = jax.tree.map(lambda a, b: a + scale * b, totals.gradient, term.gradient)
    added = {name: totals.sums[name] + scale * term.loss for name in ("loss", "policy_loss")}
    return totals._replace(gradient=gradient, sums=totals.sums | added)


def _add(a: Term, b: Term, scale: Any) -> Term:
    return jax.tree.map(lambda a, b: a + scale * b, a, b)
