"""Attention compiled for GPUs: cuDNN at any number of tokens, and blocks of scores in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from digen_jax import assemble
from digen_jax.attention.attend import MOST_SCORES, attend
from digen_jax.attention.kernels import on_device
from digen_jax.config.load import read_config
from digen_jax.planning.estimate import with_published_folder
from digen_jax.planning.hardware import topology_devices
from digen_jax.planning.programs import trace_gradient, trained_samples
from tests.attention import oracle
from tests.attention.oracle import draw, error, gradients_of, weights
from tests.attention.test_tpu import pairs
from tests.test_configs import load

pytestmark = pytest.mark.gpu

FORWARD, BACKWARD = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
# Heads of queries and keys, and channels, of SD3.5; FLUX.1, Kontext and Qwen-Image; klein; Z-Image; of no family.
HEADS = [(24, 24, 64), (24, 24, 128), (32, 32, 128), (30, 30, 128), (8, 2, 40)]


@functools.cache
def gpus():
    return topology_devices("h100:8")


def compiled(rows, s, t, heads, groups, width, dtype, lengths=False, log_weights=None):
    """The gradient of attention of s queries and t keys, on one GPU."""
    sharding = SingleDeviceSharding(gpus()[0])
    q, k = (
        jax.ShapeDtypeStruct((rows, n, number, width), dtype, sharding=sharding)
        for n, number in ((s, heads), (t, groups))
    )
    counts = jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=sharding)

    def loss(q, k, v, counts):
        with on_device(gpus()[0]):
            out = attend(q, k, v, counts if lengths else None, log_weights)
        return jnp.sum(jnp.square(out.astype(jnp.float32)))

    return jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, counts).compile()


@pytest.mark.parametrize(("s", "t"), [(1229, 1229), (1024, 1025), (1089, 1102), (1, 3)])
@pytest.mark.parametrize(("heads", "groups", "width"), HEADS)
@pytest.mark.parametrize("lengths", [False, True])
def test_any_number_of_tokens_trains_with_cudnn(s, t, heads, groups, width, lengths):
    """With weights of keys, too, where their further channels fit."""
    for weighted in {False, width < 128}:
        log_weights = np.log(np.r_[np.ones(t - 1), 256.0]) if weighted else None
        program = compiled(2, s, t, heads, groups, width, jnp.bfloat16, lengths, log_weights)
        text = program.as_text()
        assert text.count(f'"{FORWARD}"') == text.count(f'"{BACKWARD}"') == 1
        assert s == 1 or not pairs(program, t)


def test_float32_attention_has_a_block_of_scores_at_a_time():
    """9 images with and without their prompts, as in a pass of SD3.5 Medium's recipe."""
    tokens = 1229
    program = compiled(18, tokens, tokens, 24, 24, 64, jnp.float32)
    assert not pairs(program, tokens)
    arrays = 18 * tokens * 24 * 64 * 4
    temporaries = program.memory_analysis().temp_size_in_bytes
    assert temporaries < 4 * MOST_SCORES + 9 * arrays < 18 * 24 * tokens**2 * 4


@pytest.mark.parametrize(
    ("config", "argument", "length"),
    [
        ("sd35_medium", "geneval,8", 131),
        ("flux_dev", "pickscore,8", 130),
        ("flux_kontext", "8", 130),
        ("flux2_klein", "base_lora,8", 130),
        ("qwen_image", "ocr,8", 130),
        ("zimage_turbo", "8", 131),
    ],
)
def test_families_train_with_cudnn_at_odd_sizes_and_lengths(config, argument, length):
    """At their real size: 33 x 33 tokens of an image, an odd number in all but for Z-Image, which pads; traced only."""
    c = load(config, argument)
    c.model.update(height=528, width=528, max_sequence_length=length)
    c.precision.update(arithmetic="bfloat16", frozen="bfloat16")
    train_config = with_published_folder(read_config(c))
    system = assemble.outline(train_config, gpus())
    text = trace_gradient(system, train_config, trained_samples(train_config)).lower().as_text()
    assert f"{FORWARD}(" in text and f"{BACKWARD}(" in text


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="there is no GPU")
@pytest.mark.parametrize(("number", "groups", "width"), [(3, 3, 64), (2, 2, 128), (8, 2, 40)])
@pytest.mark.parametrize("lengths", [None, (77, 38)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 1e-2), ("float32", 2e-3)])
def test_on_a_gpu_attention_is_that_of_float64(
    number, groups, width, lengths, weighted, dtype, bound
):
    q, k, v, direction = draw(2, 77, 77, number, groups, width, dtype)
    rows = None if lengths is None else jnp.array(lengths)
    log_weights = weights(77) if weighted else None

    def attention(*arrays):
        with on_device(jax.devices()[0]):
            return attend(*arrays, rows, log_weights)

    found = jax.jit(gradients_of(attention))(q, k, v, direction)
    of_float64 = oracle.attention(q, k, v, lengths, log_weights)
    expected = of_float64, *oracle.gradients(q, k, v, direction, lengths, log_weights)
    assert all(error(*pair) < bound for pair in zip(found, expected, strict=True))
