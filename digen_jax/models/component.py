"""A row in a family's table of components, and what the configs of transformers have in common."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import flax.linen as nn

from digen_jax.json_fields import fields_of


@dataclasses.dataclass(frozen=True)
class Component:
    """A network of a pipeline folder: its class in the folder's files, and how its parameters are stored.

    Attributes:
      library: of its class, "diffusers" or "transformers".
      classes: names of its class there, each of which will do.
      network: the module, of a config and a dtype.
      read_config: the object in config.json to the network's config; raises ValueError.
      inputs: small inputs for a network with this config, for `init`.
      lists: modules whose children a checkpoint numbers: see `checkpoints.tensors`.
      axes: logical axes of its kernels: see `family.logical_axes`.
      method: of the network, which runs all modules. None means `__call__`.
      ignored: of a network, patterns of tensors in its files that it does not read.
      renamed: a tensor's name in a file to its name here.
      tokenizer: class of a text encoder's tokenizer in transformers; "" for other networks.
      flops: of a transformer's config, the (h, w, c) of its latents and the tokens of its text, padding included: FLOPs
        of one sequence by stream. "image" and "text" are the operations on each token alone, "attention" the products
        of queries, keys and values, "modulation" what is computed once a sequence. Matrix products and attention are
        counted, a multiply-add as two; norms, softmax, rotations and other elementwise operations are not.
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
    """The base of a frozen dataclass with the fields of a diffusers transformer's config.json, and its defaults.

    Attributes:
      title: of the network, in errors.
      absent: values of fields that a file lacks, where they differ from the class's defaults.
      unread: fields of files that diffusers' network does not read.
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

        Raises a ValueError that names a key that is unknown or whose value is not supported.
        """
        config = {**cls.absent, **{k: v for k, v in config.items() if k not in cls.unread}}
        if config.get("out_channels", 0) is None:
            config["out_channels"] = config.get("in_channels", cls.in_channels)
        return cls(**fields_of(cls, config, cls.title))

    def check_packed(self, *names: str) -> None:
        """Raises ValueError if a number of channels is not that of tokens of 2 x 2 latents."""
        for name in names:
            if getattr(self, name) % 4:
                raise ValueError(
                    f"{name} must be a multiple of 4, of the 2 x 2 latents of a token, not {getattr(self, name)}."
                )

    def check_rope(self, axes: int) -> None:
        """Raises ValueError if a head's channels are not shared out among so many axes of positions."""
        widths = self.axes_dims_rope
        positive = all(width > 0 and width % 2 == 0 for width in widths)
        if len(widths) != axes or not positive or sum(widths) != self.attention_head_dim:
            raise ValueError(
                f"axes_dims_rope must be {axes} even numbers whose sum is attention_head_dim = "
                f"{self.attention_head_dim}, not {list(widths)}."
            )
