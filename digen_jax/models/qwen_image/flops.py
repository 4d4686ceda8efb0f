"""The number of arithmetic operations in a forward pass of the Qwen-Image transformer."""

from digen_jax.models.layers import TIME_FEATURES
from digen_jax.models.packing import SIDE
from digen_jax.models.qwen_image.network import QwenImageConfig


def forward_flops(
    config: QwenImageConfig, latent: tuple[int, int, int], text: int
) -> dict[str, float]:
    """FLOPs of one sequence by stream: matrix products and attention, a multiply-add counts as two.

    "image" and "text" are the operations on each token alone, "attention" the products of queries, keys and values,
    "modulation" the operations once a sequence, on the embedding of time. Norms, softmax, rotations and other
    elementwise operations are not counted.

    Args:
      config: the transformer's.
      latent: (h, w, c) of the latents.
      text: tokens of the context, padding included, as it is computed, too.
    """
    d, blocks = config.dim, config.num_layers
    h, w, _ = latent
    image = (h // SIDE) * (w // SIDE)
    # For each stream four linear layers of the attention, two of a feed-forward network four times as wide.
    wide = blocks * (4 * d * d + 8 * d * d)
    of_a_token = config.in_channels + config.out_channels * SIDE**2
    modulations = blocks * 12 + 2  # the last of them is norm_out
    products = {
        "image": image * (wide + of_a_token * d),
        # Of the last block only keys and values are read, but the scan computes the rest, too.
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * blocks * (image + text) ** 2,
        "modulation": modulations * d * d + (TIME_FEATURES + d) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}
