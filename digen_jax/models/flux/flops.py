"""The number of arithmetic operations in a forward pass of the FLUX.1 transformer."""

from digen_jax.models.flux.network import FluxConfig
from digen_jax.models.layers import TIME_FEATURES
from digen_jax.models.packing import SIDE


def forward_flops(
    config: FluxConfig, latent: tuple[int, int, int], text: int, source: int = 0
) -> dict[str, float]:
    """FLOPs of one sequence by stream: matrix products and attention, a multiply-add counts as two.

    "image" and "text" are the operations on each token alone, "attention" the products of queries, keys and values,
    "modulation" the operations once a sequence, on the embedding of time, guidance and pooled text. Norms, softmax,
    rotations and other elementwise operations are not counted.

    Args:
      config: the transformer's.
      latent: (h, w, c) of the latents.
      text: tokens of the context.
      source: tokens of a picture that is edited, which belong to the stream "image".
    """
    d, blocks, singles = config.dim, config.num_layers, config.num_single_layers
    h, w, _ = latent
    own = (h // SIDE) * (w // SIDE)
    image = own + source
    # Of a dual block, for each stream: four linear layers of the attention, two of a feed-forward network four times
    # as wide. A single block has the same for all tokens.
    wide = (blocks + singles) * (4 * d * d + 8 * d * d)
    modulations = blocks * 12 + singles * 3 + 2  # the last of them is norm_out
    numbers = 2 if config.guidance_embeds else 1  # time, guidance
    embedders = (numbers * (TIME_FEATURES + d) + config.pooled_projection_dim + d) * d
    products = {
        "image": image * (wide + config.in_channels * d) + own * config.out_channels * d,
        "text": text * (wide + config.joint_attention_dim * d),
        "attention": 2 * d * (blocks + singles) * (image + text) ** 2,
        "modulation": modulations * d * d + embedders,
    }
    return {stream: 2.0 * count for stream, count in products.items()}
