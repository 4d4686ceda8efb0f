"""The number of arithmetic operations in a forward pass of the SD3 transformer."""

from digen_jax.models.layers import TIME_FEATURES
from digen_jax.models.sd3.network import SD3Config


def forward_flops(config: SD3Config, latent: tuple[int, int, int], text: int) -> dict[str, float]:
    """FLOPs of one sequence by stream: matrix products and attention, a multiply-add counts as two.

    "image" and "text" are the operations on each token alone, "attention" the products of queries, keys and values,
    "modulation" the operations once a sequence, on the embedding of time and pooled text. Norms, softmax and other
    elementwise operations are not counted.

    Args:
      config: the transformer's.
      latent: (h, w, c) of the latents.
      text: tokens of the context, including the one that stands for all null tokens.
    """
    d, patch = config.dim, config.patch_size
    h, w, _ = latent
    image = (h // patch) * (w // patch)
    patches = patch * patch * (config.in_channels + config.out_channels)
    blocks, dual = config.num_layers, len(set(config.dual_attention_layers))
    # Linear layers of a block: four of the attention, two of a feed-forward network four times as wide. The last
    # block does not update the text, for which it needs only keys and values.
    attention, feed_forward = 4 * d * d, 8 * d * d
    wide = blocks * (attention + feed_forward)
    modulations = blocks * 6 + dual * 3 + (blocks - 1) * 6 + 2 + 2  # the last of them is norm_out
    embedders = (TIME_FEATURES + config.pooled_projection_dim + 2 * d) * d
    tokens = image + text
    products = {
        "image": image * (wide + dual * attention + patches * d),
        "text": text * (wide - 2 * d * d - feed_forward + config.joint_attention_dim * d),
        "attention": 2 * d * ((blocks - 1) * tokens**2 + image * tokens + dual * image**2),
        "modulation": modulations * d * d + embedders,
    }
    return {stream: 2.0 * count for stream, count in products.items()}
