"""FLOPs of a forward pass, against the compiler's count for the program."""

import jax
import jax.numpy as jnp
import pytest

from digen_jax.models.sd3 import network as sd3
from digen_jax.models.sd3.network import forward_flops

# Wide enough that elementwise operations hardly count. The compiler counts a loop's body once, so no two blocks
# in a row are of one kind: with dual attention, without, and the last.
CONFIG = sd3.SD3Config(
    num_layers=3,
    num_attention_heads=8,
    caption_projection_dim=512,
    joint_attention_dim=256,
    pooled_projection_dim=128,
    dual_attention_layers=(0,),
    qk_norm="rms_norm",
)
TEXT = 77


def test_the_compiler_counts_as_many():
    h, w = 16, 24
    assert all(first == last for first, last, _ in sd3.segments(CONFIG)), "nothing is scanned"
    network = sd3.SD3Transformer(CONFIG)
    shapes = (1, h, w, 16), (1,), (1, TEXT, 256), (1, 128)
    inputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    params = jax.eval_shape(network.init, jax.random.key(0), *inputs)
    program = jax.jit(lambda params, *given: network.apply(params, *given, null_tokens=256))
    counted = program.lower(params, *inputs).compile().cost_analysis()["flops"]
    found = forward_flops(CONFIG, (h, w, 16), TEXT + 1)
    assert found.keys() == {"image", "text", "attention", "modulation"}
    assert sum(found.values()) == pytest.approx(counted, rel=0.02)


def test_each_stream_is_counted_by_hand():
    """One block, which is the last, of width 8: 6 tokens of image, 3 of text."""
    config = sd3.SD3Config(
        in_channels=1,
        out_channels=1,
        num_layers=1,
        attention_head_dim=4,
        num_attention_heads=2,
        joint_attention_dim=5,
        caption_projection_dim=8,
        pooled_projection_dim=7,
    )
    assert forward_flops(config, (4, 6, 1), 3) == {
        # patches of 4 numbers in and out, q k v out, feed-forward to 32 and back
        "image": 2 * 6 * (4 * 8 + 8 * 4 + 4 * 8 * 8 + 2 * 8 * 32),
        "text": 2 * 3 * (5 * 8 + 2 * 8 * 8),  # k and v
        "attention": 2 * 2 * 6 * (6 + 3) * 8,  # queries of the image alone
        # the block's 6 vectors for the image, 2 for the text, 2 for the end; time and text, two layers each
        "modulation": 2 * ((6 + 2 + 2) * 8 * 8 + (256 + 8) * 8 + (7 + 8) * 8),
    }
