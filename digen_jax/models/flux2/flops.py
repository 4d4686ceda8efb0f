"""The number of arithmetic operations in a forward pass of the FLUX.2 transformer."""

from digen_jax.models.flux2.config import Flux2Config
from digen_jax.models.layers import TIME_FEATURES


def forward_flops(config: Flux2Config, latent: tuple[int, int, int], text: int) -> dict[str, float]:
    """FLOPs of one sequence by stream: matrix products and attention, a multiply-add counts as two.

    "image" and "text" are the operations on each token alone, "attention" the products of queries, keys and values,
    "modulation" the operations once a sequence, on the embedding of time. Norms, softmax, rotations and other
    elementwise operations are not counted.

    Args:
      config: the transformer's.
      latent: (h, w, c) of the latents.
      text: tokens of the context, padding included, as it is computed, too.
    """
    d, blocks = config.dim, config.num_layers + config.num_single_layers
    h, w, _ = latent
    image = h * w
    # Of a dual block, for each stream: four linear layers of the attention, three matrices of a gated feed-forward
    # network, of which two are one. A single block has the same for all tokens, in two matrices.
    wide = blocks * (4 * d * d + 3 * d * config.hidden)
    modulations = 2 * 6 + 3 + 2  # of the streams, of the single blocks, of norm_out
    products = {
        "image": image * (wide + (config.in_channels + config.out_channels) * d),
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * blocks * (image + text) ** 2,
        "modulation": modulations * d * d + (TIME_FEATURES + d) * d,
    }
    return {stream: 2.0 * count for stream, count in products.items()}
