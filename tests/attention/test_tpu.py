"""Attention compiled for TPUs: the kernel is in the program, and no array of all pairs of tokens."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from digen_jax import assemble, policies
from digen_jax.attention import flash, packed
from digen_jax.attention.attend import attend
from digen_jax.attention.kernels import on_device, on_mesh
from digen_jax.config.load import complete, read_config
from digen_jax.parallel.mesh import make_mesh
from digen_jax.planning.hardware import topology_devices
from digen_jax.planning.programs import trace_generate, trace_gradient
from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.tpu


@functools.cache
def chips(topology):
    return topology_devices(topology)


def compiled(topology, shape, dtype, lengths=False, log_weights=None, kernel="auto", **axes):
    """The gradient of attention over all tokens, for a mesh with these axes."""
    mesh = make_mesh(chips(topology)[: np.prod([*axes.values(), 1], dtype=int)], **axes)
    sharding = NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence", "tensor"))
    array = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    rows = jax.ShapeDtypeStruct(
        shape[:1], jnp.int32, sharding=NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
    )

    def loss(q, k, v, rows):
        with on_mesh(mesh, ("data", "fsdp"), kernel):
            out = attend(q, k, v, rows if lengths else None, log_weights)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(array, array, array, rows).compile()


def pairs(program, tokens):
    """Shapes of arrays with two dimensions of tokens, which may be padded to a multiple of 128."""
    shapes = set(re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", program.as_text()))
    sizes = {tokens, -(-tokens // 128) * 128}
    return {s for s in shapes if sum(int(n) in sizes for n in s.split(",")) > 1}


@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("kernel", ["packed", "splash"])
def test_the_gradient_is_two_kernels_without_scores_in_memory(topology, width, dtype, kernel):
    log_weights = np.log(np.r_[np.ones(299), 256.0]) if width == 64 else None
    program = compiled(topology, (2, 300, 4, width), dtype, True, log_weights, kernel)
    assert len(re.findall(r"custom_call_target=\"tpu_custom_call\"", program.as_text())) == 2
    assert not pairs(program, 300)


def test_xlas_gradient_has_the_scores_in_memory():
    program = compiled("v5p:2x2x1", (2, 300, 4, 64), jnp.bfloat16, True, kernel="xla")
    assert pairs(program, 300) and "tpu_custom_call" not in program.as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("topology", ["v5e:2x4", "v5p:2x2x1", "v6e:2x2"])
@pytest.mark.parametrize("kernel", ["packed", "splash"])
def test_the_largest_blocks_fit_the_chips(topology, dtype, kernel):
    size = jnp.dtype(dtype).itemsize
    if kernel == "packed":
        tokens = max(n for n in range(packed.LANES, 2**14, packed.LANES) if packed.fits(n, size))
    else:
        tokens = 2 * flash.LARGEST_BLOCK[size]
    program = compiled(topology, (1, tokens, 2, 128), dtype, True, kernel=kernel)
    assert not pairs(program, tokens)


def test_packed_attention_needs_no_copies_of_heads_that_fill_half_a_tile():
    """Splash attention takes [b h s d], of which 64 channels take 128 lanes."""

    def temporary(kernel):
        device = chips("v5p:2x2x1")[0]
        tokens = jax.ShapeDtypeStruct(
            (4, 1024, 512), jnp.bfloat16, sharding=SingleDeviceSharding(device)
        )

        def loss(*tokens):
            with on_device(device, kernel):
                out = attend(*(a.reshape(4, 1024, 8, 64) for a in tokens)).reshape(4, 1024, 512)
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        program = jax.jit(jax.grad(loss, (0, 1, 2))).lower(tokens, tokens, tokens).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary("packed") < temporary("splash") / 2


def test_on_a_mesh_each_device_runs_the_kernel_on_its_rows_and_heads():
    for kernel, shape in (("splash", "2,2,256,64"), ("packed", "2,256,128")):
        shapes = (4, 256, 4, 64)
        program = compiled("v5p:2x2x1", shapes, jnp.bfloat16, kernel=kernel, data=2, tensor=2)
        text = program.as_text()
        assert "all-gather" not in text and "all-reduce" not in text
        assert re.search(rf"bf16\[{shape}\].* custom-call", text)


@pytest.mark.parametrize("kernel", ["packed", "splash"])
def test_devices_of_the_sequence_axis_exchange_tokens_for_heads(kernel):
    """Of queries, keys and values, forward and backward; the kernel has all tokens of half of the heads."""
    shape = (2, 512, 4, 64)
    program = compiled("v5p:2x2x1", shape, jnp.bfloat16, kernel=kernel, data=2, sequence=2)
    text = program.as_text()
    assert "all-gather" not in text and not pairs(program, 512)
    assert len(re.findall(r" all-to-all(?:-start)?\(", text)) >= 4
    whole = {"packed": "1,512,128", "splash": "1,2,512,64"}[kernel]
    assert re.search(rf"bf16\[{whole}\].* custom-call", text)


@pytest.mark.parametrize("rules", ["replicate", "fsdp"])
def test_a_runs_programs_have_the_kernel(base, rules):
    """Where each device sums its own gradients, and where XLA partitions the program."""
    config = complete(tiny_config(base, "full"))
    config.placement.update(sizes="given", rules=((".*", rules),))
    config.placement.rollout.data = 0
    config.placement.trainer.update(data=2, fsdp=2)
    train_config = read_config(config)
    system = assemble.outline(train_config, chips("v5p:2x2x1")[:4])
    kernels = policies.attention_kernels(train_config, system.policy.family, system.placement)
    assert kernels == {"sampling": "splash", "training": "splash"}
    samples = train_config.sampler.chunk
    sampling = trace_generate(system, system.sampler, train_config, samples).lower().as_text()
    training = trace_gradient(system, train_config, samples).lower().as_text()
    assert "splash_mha_fwd" in sampling and "splash_mha_dkv" not in sampling
    assert "splash_mha_fwd" in training and "splash_mha_dkv" in training
