"""FLOPs of a forward pass of the Qwen-Image transformer, against the compiler's count for the program."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from digen_jax.models.qwen_image import network as qwen_image
from digen_jax.models.qwen_image.network import forward_flops


@pytest.mark.parametrize(("h", "w"), [(16, 24), (32, 20)])
def test_the_compiler_counts_as_many_operations(h, w):
    """The compiler counts a scan's body once; of a block that is not scanned it would leave out the text's end."""
    config = qwen_image.QwenImageConfig(
        num_layers=2, num_attention_heads=4, joint_attention_dim=256
    )
    network = qwen_image.QwenImageTransformer(config)
    shapes = (1, h, w, 16), (1,), (1, 77, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arrays.append(jax.ShapeDtypeStruct((1, 77), bool))
    params = jax.eval_shape(network.init, jax.random.key(0), *arrays)
    counted = jax.jit(network.apply).lower(params, *arrays).compile().cost_analysis()["flops"]
    found = forward_flops(dataclasses.replace(config, num_layers=1), (h, w, 16), 77)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


def test_each_stream_is_counted_by_hand():
    """Width 36, three blocks: 6 tokens of image, 3 of text."""
    d = 36
    config = qwen_image.QwenImageConfig(
        in_channels=16,
        out_channels=5,
        num_layers=3,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=10,
        axes_dims_rope=(2, 4, 6),
    )
    block = 4 * d * d + 2 * d * 4 * d  # q k v out, feed-forward to 4 d and back
    assert forward_flops(config, (4, 6, 4), 3) == {
        "image": 2 * 6 * (16 * d + 20 * d + 3 * block),
        "text": 2 * 3 * (10 * d + 3 * block),
        "attention": 2 * 3 * 2 * 9 * 9 * d,
        # 6 vectors for each stream, 2 for the end; time, two layers
        "modulation": 2 * ((3 * 12 + 2) * d * d + (256 + d) * d),
    }
