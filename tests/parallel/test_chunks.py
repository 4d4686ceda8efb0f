import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup, chunked_map

pytestmark = pytest.mark.usefixtures("exact_and_split")


def mesh(data: int, fsdp: int, time: int = 1):
    devices = jax.devices()[: data * fsdp * time]
    return DeviceGroup(make_mesh(devices, data=data, fsdp=fsdp, time=time))


def widened(sizes: list[int], rows: jax.Array) -> jax.Array:
    """Gives another shape than its input's; records with how many rows it is traced."""
    sizes.append(len(rows))
    return jnp.sin(rows[:, None, :] * jnp.arange(1.0, 4)[:, None]) + rows[:, :1, None]


@pytest.mark.parametrize(
    ("axes", "share", "at_once", "traced"),
    [
        ((1, 1), 6, 2, 2),
        ((2, 2), 6, 3, 12),
        ((2, 2), 5, 4, 16),  # two chunks of four rows a device, the last of them filled up
        ((4, 1), 7, 3, 12),
        ((1, 2, 2), 7, 1, 2),
        ((4, 1), 3, 3, 12),
        ((4, 1), 3, 100, 12),
    ],
)
def test_every_device_takes_its_own_rows_in_chunks(axes, share, at_once, traced):
    group = mesh(*axes)
    devices = axes[0] * axes[1]
    batch = np.random.default_rng(0).normal(size=(share * devices, 5)).astype(np.float32)
    sizes = []
    program = jax.jit(
        lambda batch: chunked_map(functools.partial(widened, sizes), batch, at_once, group)
    )
    given = jax.device_put(batch, group.batch)
    text = program.lower(given).compile().as_text()
    assert set(sizes) == {traced}
    assert not re.findall(r"all-gather|all-to-all|collective-permute|all-reduce", text)
    found = program(given)
    assert isinstance(found.sharding, NamedSharding)
    assert {shard.data.shape for shard in found.addressable_shards} == {(share, 3, 5)}
    np.testing.assert_allclose(found, widened([], jnp.asarray(batch)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("at_once", [1, 100])
def test_where_parameters_are_split_they_are_gathered_and_rows_stay(at_once):
    group = mesh(1, 4)
    rng = np.random.default_rng(0)
    rows = jax.device_put(rng.normal(size=(8, 16)).astype(np.float32), group.batch)
    kernels = {
        name: jax.device_put(
            rng.normal(size=(16, 16)).astype(np.float32), NamedSharding(group.mesh, split)
        )
        for name, split in (("one", PartitionSpec("fsdp")), ("other", PartitionSpec(None, "fsdp")))
    }

    def network(kernels, rows):
        return jnp.tanh(rows @ kernels["one"]) @ kernels["other"]

    program = jax.jit(
        lambda kernels, rows: chunked_map(functools.partial(network, kernels), rows, at_once, group)
    )
    text = program.lower(kernels, rows).compile().as_text()
    moved = re.findall(
        r"= (\S+?)\{.*? (all-gather|all-to-all|collective-permute|all-reduce)\(", text
    )
    assert set(moved) == {("f32[16,16]", "all-gather")}
    found = program(kernels, rows)
    assert {shard.data.shape for shard in found.addressable_shards} == {(2, 16)}
    np.testing.assert_allclose(found, network(kernels, rows), rtol=1e-5, atol=1e-5)
