"""FLOPs of a forward pass of the FLUX.2 transformer, against the compiler's count for the program."""

import jax
import jax.numpy as jnp
import pytest

from digen_jax.models.flux2 import network as flux2
from digen_jax.models.flux2.network import Flux2Config, forward_flops


@pytest.mark.parametrize(("h", "w"), [(8, 12), (16, 10)])
def test_the_compiler_counts_as_many_operations(h, w):
    """The compiler counts a loop's body once, so there is one block of each kind."""
    config = Flux2Config(
        num_layers=1, num_single_layers=1, num_attention_heads=4, joint_attention_dim=256
    )
    network = flux2.Flux2Transformer(config)
    shapes = (1, h, w, 128), (1,), (1, 77, 256)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params = jax.eval_shape(network.init, jax.random.key(0), *arrays)
    counted = jax.jit(network.apply).lower(params, *arrays).compile().cost_analysis()["flops"]
    found = forward_flops(config, (h, w, 128), 77)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


def test_each_stream_is_counted_by_hand():
    """Width 36, blocks 2 + 3: 24 tokens of image, 3 of text; a hidden layer of 72."""
    d = 36
    config = Flux2Config(
        in_channels=6,
        out_channels=6,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=10,
        mlp_ratio=2.0,
        axes_dims_rope=(2, 4, 4, 2),
    )
    block = 4 * d * d + 3 * d * 72  # q k v out; gate, value, back
    assert forward_flops(config, (4, 6, 6), 3) == {
        "image": 2 * 24 * (2 * 6 * d + 5 * block),
        "text": 2 * 3 * (10 * d + 5 * block),
        "attention": 2 * 5 * 2 * 27 * 27 * d,
        # Six vectors for each stream, three for single blocks, two for the end; time, two layers.
        "modulation": 2 * ((2 * 6 + 3 + 2) * d * d + (256 + d) * d),
    }
