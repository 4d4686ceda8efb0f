"""FLOPs of traced programs, by hand, against the compiler's count, and against those that their work needs."""

import functools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from digen_jax.attention.packed import attend as packed_attention
from digen_jax.config.load import complete, load_config
from digen_jax.models.published import published_folder
from digen_jax.parallel.mesh import make_mesh
from digen_jax.planning.flops import Flops, peak_flops, program_flops
from digen_jax.planning.programs import step_programs
from tests.tiny_runs import once, tiny_config


def flops(f, *shapes, platform="tpu", dtype=jnp.float32):
    given = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
    return program_flops(jax.jit(f).trace(*given).jaxpr, platform)


def scanned(rounds):
    """The gradient of products in a loop in a loop, which run again in the backward pass."""

    def f(w, x):
        def block(x, w):
            return jnp.tanh(x @ w), None

        def again(x, _):
            return jax.checkpoint(lambda x: jax.lax.scan(block, x, w)[0])(x), None

        return (jax.lax.scan(again, x, length=rounds)[0] ** 2).sum()

    return jax.grad(f)


def test_products_in_loops_count_as_often_as_they_run():
    """Forward, again in the backward pass, and two products backward."""
    assert flops(scanned(3), (5, 64, 64), (32, 64)).count == 5 * 3 * 4 * 2 * 32 * 64 * 64


def test_products_without_loops_are_those_that_the_compiler_counts():
    """Batched, strided, dilated and grouped; elementwise operations and padding are few."""

    def f(x, y, kernel):
        z = jnp.einsum("bqhd,bkhd->bhqk", x, y)
        image = z[..., None] * jnp.ones(16)
        maps = jax.lax.conv_general_dilated(
            image.reshape(-1, 48, 48, 16), kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # fmt: skip
        return jax.lax.conv_general_dilated(
            maps, kernel[..., :2, :], (1, 1), "SAME", rhs_dilation=(2, 2), feature_group_count=8,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    shapes = (2, 48, 4, 64), (2, 48, 4, 64), (3, 3, 16, 16)
    compiled = jax.jit(f).lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()
    counted = compiled.cost_analysis()["flops"]
    assert flops(f, *shapes).count == pytest.approx(counted, rel=0.05)


def test_a_result_that_nothing_reads_does_not_count():
    """As the weights' gradient under a LoRA, also in a loop."""

    @jax.custom_vjp
    def product(x, w):
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def f(x, w):
        return jax.lax.scan(lambda x, _: (product(x, w), None), x, length=3)[0].sum()

    once = 3 * 2 * 8**3
    assert flops(jax.grad(f), (8, 8), (8, 8)).count == 2 * once
    assert flops(jax.grad(f, (0, 1)), (8, 8), (8, 8)).count == 3 * once


@pytest.mark.parametrize(
    ("platform", "precision", "dtype", "passes"),
    [
        ("gpu", "high", jnp.float32, 2),
        ("gpu", "highest", jnp.float32, 16),
        ("gpu", "high", jnp.bfloat16, 1),
        ("tpu", "default", jnp.float32, 1),
        ("tpu", "high", jnp.float32, 3),
        ("tpu", "highest", jnp.float32, 6),
        ("tpu", jax.lax.DotAlgorithmPreset.BF16_BF16_F32, jnp.float32, 1),
    ],
)
def test_a_float32_product_is_several_of_bfloat16(platform, precision, dtype, passes):
    def f(x):
        return jnp.matmul(x, x, precision=precision)

    assert flops(f, (8, 8), platform=platform, dtype=dtype) == Flops(1024, passes * 1024)


@pytest.mark.parametrize(
    ("kind", "dtype", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", None, 989),
        ("NVIDIA H100 80GB HBM3", "float32", None, 494.5),  # TF32
        ("NVIDIA H100 80GB HBM3", "float32", "float32", 61.8125),
        ("NVIDIA H100 80GB HBM3", "float32", "BF16_BF16_F32", 989),
        ("NVIDIA H100 80GB HBM3", "float32", "F64_F64_F64", None),
        ("TPU v5", "bfloat16", "float32", 458.752),
        ("TPU v5", "float32", None, 458.752 / 3),
        ("TPU v5", "float32", "bfloat16", 458.752),
        ("cpu", "float32", None, None),
    ],
)
def test_the_peak_is_that_of_the_precision_of_products(kind, dtype, precision, tera):
    with jax.default_matmul_precision(precision):
        found = peak_flops(kind, dtype)
    assert found == pytest.approx(1e12 * tera) if tera else math.isnan(found)


def test_sharded_parts_and_the_largest_branch_count():
    mesh = make_mesh(jax.devices()[:4], data=4)
    spec = PartitionSpec("data")
    part = jax.shard_map(lambda x: x @ x.T, mesh=mesh, in_specs=spec, out_specs=spec)
    assert flops(part, (8, 16)).count == 4 * 2 * 2 * 2 * 16  # of [2 16] [16 2] on each of four

    def branches(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x, x)

    assert flops(branches, (4, 4)).count == 2 * 2 * 4**3


def test_a_loop_of_unknown_length_is_an_error():
    with pytest.raises(ValueError):
        flops(lambda x: jax.lax.while_loop(lambda x: x.sum() > 0, lambda x: x @ x, x), (4, 4))


def test_kernels_count_by_their_estimate_or_their_grid():
    """Packed attention states its FLOPs, two products of b h s t d; other kernels are their body at every step."""

    def attention(q, k, v):
        return packed_attention((q,), (k,), (v,))[0]

    shape = (2, 256, 2, 64)
    assert flops(attention, shape, shape, shape).count == 2 * 2 * (2 * 2 * 256 * 256) * 64

    def body(x, out):
        out[...] = jnp.dot(x[...], x[...])

    def kernel(x):
        return pl.pallas_call(
            body,
            grid=(3, 2),
            out_shape=jax.ShapeDtypeStruct((8, 8), jnp.float32),
            in_specs=[pl.BlockSpec(memory_space=pltpu.VMEM)],
        )(x)

    assert flops(kernel, (8, 8)).count == 6 * 2 * 8**3


def test_cudnns_attention_counts_two_products_forward_and_five_backward(monkeypatch):
    import jax._src.cudnn.fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 90800)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda *given: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda *given: False)

    def attention(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn").sum()

    shapes = (2, 64, 4, 32), (2, 128, 4, 32), (2, 128, 4, 32)
    product = 2 * (2 * 4 * 64 * 128) * 32
    of = functools.partial(flops, platform="gpu", dtype=jnp.bfloat16)
    assert of(attention, *shapes) == Flops(2 * product, 2 * product)
    assert of(jax.grad(attention, (0, 1, 2)), *shapes).count == (2 + 5) * product


# Wide enough that what is not counted, elementwise operations aside, is small: the ends of the network.
SMALL = {
    "transformer": dict(
        num_layers=12,
        num_attention_heads=4,
        caption_projection_dim=256,
        joint_attention_dim=256,
        pooled_projection_dim=64,
        dual_attention_layers=[0, 1, 2, 3],
    ),
    "text_encoder": dict(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, projection_dim=32
    ),
    "text_encoder_2": dict(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, projection_dim=32
    ),
    "text_encoder_3": dict(d_model=256, d_kv=16, d_ff=32, num_layers=2, num_heads=2),
    "vae": dict(block_out_channels=[32, 32, 32, 32]),
}


def small_model(folder):
    """Stable Diffusion 3.5 Medium's configuration, smaller."""
    shutil.copytree(published_folder("stabilityai/stable-diffusion-3.5-medium"), folder)
    for part, fields in SMALL.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def recipe_of(base, kind, **changes):
    config = complete(tiny_config(base, kind))
    config.model.update(folder=str(once(base / "small-sd35", small_model)), height=256, width=256)
    config.batch.update(groups=1, images=2)
    config.sampler.chunk = config.trainer.micro_batch = config.evaluation.batch = 2
    config.placement.rollout.data = 0
    config.update_from_flattened_dict(changes)
    return load_config(config)


CHANGES = {
    "algorithm.kl_coefficient": 0.1,
    "sampler.guidance": 4.0,
    "algorithm.old_log_probs": "recomputed",
    "lora.rank": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "blocks"])
def test_a_program_has_the_needed_flops_and_what_remat_repeats(base, remat):
    config = recipe_of(base, "lora", **CHANGES | {"model.remat": remat})
    made = {program.name: program for program in step_programs(config, jax.devices()[:1])}
    for name in ("generate", "train"):
        needed = sum(made[name].work.values())
        done = program_flops(made[name].trace().jaxpr, "cpu").count
        if name == "train" and remat == "blocks":
            assert 1.15 * needed < done < 1.4 * needed
        else:
            assert done == pytest.approx(needed, rel=0.02), name
