"""The number of arithmetic operations in a forward pass of the Z-Image transformer."""

from digen_jax.models.zimage.config import ZImageConfig, filled_up
from digen_jax.models.zimage.network import TIME_FEATURES, TIME_HIDDEN


def forward_flops(
    config: ZImageConfig, latent: tuple[int, int, int], text: int
) -> dict[str, float]:
    """FLOPs of one sequence by stream: matrix products and attention, a multiply-add counts as two.

    "image" and "text" are the operations on each token alone, "attention" the products of queries, keys and values,
    "modulation" the operations once a sequence, on the embedding of time. Norms, softmax and other elementwise
    operations are not counted.

    Args:
      config: the transformer's.
      latent: (h, w, c) of the latents.
      text: tokens of the captions, padding included, as it is computed, too.
    """
    d, patch = config.dim, config.patch
    h, w, _ = latent
    patches = (h // patch) * (w // patch)
    image, captions = filled_up(patches), filled_up(text)
    numbers = patch * patch * config.in_channels
    refiners, blocks = config.n_refiner_layers, config.n_layers
    block = 4 * d * d + 3 * d * config.hidden
    wide = (refiners + blocks) * block
    time = TIME_FEATURES * TIME_HIDDEN + TIME_HIDDEN * config.embedding
    modulations = 4 * (refiners + blocks) + 1  # the last of them is the final layer's
    products = {
        "image": image * wide + patches * 2 * numbers * d,
        "text": captions * (wide + config.cap_feat_dim * d),
        "attention": 2
        * d
        * (refiners * (image**2 + captions**2) + blocks * (image + captions) ** 2),
        "modulation": modulations * config.embedding * d + time,
    }
    return {stream: 2.0 * count for stream, count in products.items()}
