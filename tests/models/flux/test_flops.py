"""FLOPs of a forward pass of the FLUX.1 transformer, against the compiler's count for the program."""

import jax
import jax.numpy as jnp
import pytest

from digen_jax.models.flux import network as flux
from digen_jax.models.flux.network import forward_flops


@pytest.mark.parametrize(("h", "w"), [(16, 24), (32, 20)])
def test_the_compiler_counts_as_many_operations(h, w):
    """The compiler counts a loop's body once, so there is one block of each kind."""
    config = flux.FluxConfig(
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=4,
        joint_attention_dim=256,
        guidance_embeds=True,
    )
    network = flux.FluxTransformer(config)
    shapes = (1, h, w, 16), (1,), (1, 77, 256), (1, 768), (1,)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params = jax.eval_shape(network.init, jax.random.key(0), *arrays)
    counted = jax.jit(network.apply).lower(params, *arrays).compile().cost_analysis()["flops"]
    found = forward_flops(config, (h, w, 16), 77)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


def test_each_stream_is_counted_by_hand():
    """Width 36, blocks 2 + 3: 6 tokens of image, 3 of text."""
    d = 36
    config = flux.FluxConfig(
        in_channels=16,
        out_channels=16,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=12,
        num_attention_heads=3,
        joint_attention_dim=10,
        pooled_projection_dim=7,
        guidance_embeds=True,
        axes_dims_rope=(2, 4, 6),
    )
    block = 4 * d * d + 2 * d * 4 * d  # q k v out, feed-forward to 4 d and back
    assert forward_flops(config, (4, 6, 4), 3) == {
        "image": 2 * 6 * (2 * 16 * d + 5 * block),
        "text": 2 * 3 * (10 * d + 5 * block),
        "attention": 2 * 5 * 2 * 9 * 9 * d,
        # 6 vectors for each stream, 3 for a single block, 2 for the end; time, guidance and text, two layers each
        "modulation": 2 * ((2 * 12 + 3 * 3 + 2) * d * d + 2 * (256 + d) * d + (7 + d) * d),
    }
