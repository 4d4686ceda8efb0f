"""Components of a family, and the base class of transformer configs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn

from digen_jax.json_fields import fields_of


@dataclasses.dataclass(frozen=True)
class Component:
    """Network of a pipeline folder: its class in the folder's files, and how its parameters are stored.

    Attributes:
      library: Library of its class, "diffusers" or "transformers".
      classes: Accepted class names in that library.
      network: Builds the module from a config and a dtype.
      read_config: Converts the object in config.json to the network's config; raises ValueError.
      inputs: Returns small inputs for a network with this config, for `init`.
      lists: Modules whose children a checkpoint numbers (see `checkpoints.tensors`).
      axes: Logical axes of its kernels (see `family.logical_axes`).
      method: Method of the network that runs all modules. None means `__call__`.
      ignored: Returns patterns of tensors in the files that a network does not read.
      renamed: Maps a tensor's name in a file to its name in this package.
      tokenizer: transformers class of a text encoder's tokenizer; "" for other networks.
      flops: Returns the FLOPs of one sequence by stream, from a transformer's config, the (h, w, c) of its latents, and
        the tokens of its text, padding included. "image" and "text" are per-token operations, "attention" the products
        of queries, keys and values, "modulation" the operations per sequence. Counts matrix products and attention, a
        multiply-add as two; not norms, softmax, rotations and other elementwise operations.
    """

    library: str
    classes: tuple[str, ...]
    network: Callable[..., nn.Module]
    read_config: Callable[[Mapping[str, Any]], Any]
    inputs: Callable[[Any], tuple[Any, ...]]
    lists: tuple[str, ...]
    axes: Sequence[tuple[str, tuple[str | None, ...]]]
    method: str | None = None
    ignored: Callable[[Any], Sequence[str]] = lambda network: ()
    renamed: Callable[[str], str] | None = None
    tokenizer: str = ""
    flops: Callable[..., dict[str, float]] | None = None


class TransformerConfig:
    """Base of a frozen dataclass with the fields of a diffusers transformer's config.json, and its defaults.

    Attributes:
      title: Name of the network in error messages.
      absent: Values of fields that a file lacks, where they differ from the class's defaults.
      unread: Fields of files that diffusers' network does not read.
    """

    title: ClassVar[str]
    absent: ClassVar[Mapping[str, Any]] = {}
    unread: ClassVar[tuple[str, ...]] = ()

    @property
    def dim(self) -> int:
        """Width of the transformer."""
        return self.num_attention_heads * self.attention_head_dim

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Reads diffusers' config.json, ignoring keys that start with an underscore.

        Raises a ValueError that names an unknown key or a key with an unsupported value.
        """
        config = {**cls.absent, **{k: v for k, v in config.items() if k not in cls.unread}}
        if config.get("out_channels", 0) is None:
            config["out_channels"] = config.get("in_channels", cls.in_channels)
        return cls(**fields_of(cls, config, cls.title))

    def check_packed(self, *names: str) -> None:
        """Raises ValueError if a channel count is not that of tokens of 2 x 2 latents."""
        for name in names:
            if getattr(self, name) % 4:
                raise ValueError(
                    f"{name} must be a multiple of 4, of the 2 x 2 latents of a token, not {getattr(self, name)}."
                )

    def check_rope(self, axes: int) -> None:
        """Raises ValueError if a head's channels are not split over `axes` position axes."""
        widths = self.axes_dims_rope
        positive = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != axes or not positive or sum(widths) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope must be {axes} even numbers whose sum is attention_head_dim = "
                f"{self.attention_head_dim}, not {list(widths)}."
            )
