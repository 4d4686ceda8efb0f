"""What families of images have in common: a part of the protocol `Family`.

The autoencoder is an AutoencoderKL unless `factor` and `decode` are another's.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from digen_jax.checkpoints import folder as weights
from digen_jax.errors import FieldError
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.family import Params, Record, Size, logical_axes, negative_of
from digen_jax.models.linear import exact_products


class ImageFamily:
    """The base of a frozen dataclass with these networks, of which the transformer is tuned.

    Attributes:
      transformer: gives the velocity.
      vae: always computes in float32, because it overflows in half precision.
      lists: by component, see `Family`.
      tables: by component, the logical axes of its kernels: see `logical_axes`.
      ignored: by component, patterns of tensors in its files that it does not read.
      renamed: by component, from a tensor's name in a file to its name here.
    """

    transformer: Any
    vae: Any

    lists: ClassVar[Mapping[str, Any]]
    tables: ClassVar[Mapping[str, Any]]
    ignored: Mapping[str, Sequence[str]] = {}
    renamed: Mapping[str, Callable[[str], str]] = {}

    trained: ClassVar[tuple[str, ...]] = ("transformer",)
    unused: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    frozen: ClassVar[Mapping[str, Sequence[str]]] = {}
    masked: ClassVar[Mapping[str, str]] = {}
    decoders: ClassVar[tuple[str, ...]] = ("vae",)
    edits: ClassVar[bool] = False
    source: Size | None = None
    negative_prompt: ClassVar[str] = ""
    # Eight images of 512 x 512, which take an AutoencoderKL 6.5 GB of a TPU by its compiler. Four would take as much,
    # since it fills them up to eight.
    decoded_pixels: ClassVar[int] = 2**21

    def in_dtype(self, dtype: Any) -> "ImageFamily":
        """The same family, whose transformer computes in this dtype."""
        return dataclasses.replace(self, transformer=self.transformer.clone(dtype=jnp.dtype(dtype)))

    def tokenize_null(self, records: Sequence[Record]) -> Any:
        """The tokens of each record's negative prompt, one row for all if it is the same."""
        prompts = [negative_of(self, record) for record in records or [{}]]
        distinct = prompts if len(set(prompts)) > 1 else prompts[:1]
        return self.tokenize([{"prompt": prompt} for prompt in distinct])

    def source_size(self, height: int, width: int) -> Size:
        """That of the picture: a family that edits says what its pipeline does."""
        return Size(height, width)

    @property
    def factor(self) -> int:
        """Pixels of a latent along each side."""
        return 2 ** (len(self.vae.config.block_out_channels) - 1)

    @exact_products
    def decode(self, params: Params, latents: Float[Array, "b h w c"]) -> Float[Array, "b 1 H W 3"]:
        """Images in [0, 1], each a clip of one frame."""
        return autoencoder_kl.decode_images(self.vae, params["vae"], latents)[:, None]

    def axes(self) -> Params:
        """The logical axes of every parameter's dimensions, in trees like `shapes`."""
        return {
            part: logical_axes(tree, self.tables[part], self.lists[part])
            for part, tree in self.shapes().items()
        }

    def read(
        self, folder: pathlib.Path, part: str, shardings: Any = None, dtype: Any = jnp.float32
    ) -> Params:
        """Reads one component's parameters from the pipeline folder directly onto the devices of `shardings`."""
        return weights.read_params(
            folder / part,
            self.shapes()[part],
            self.lists[part],
            shardings=shardings,
            dtype=dtype,
            ignore=self.ignored.get(part, ()),
            rename=self.renamed.get(part),
        )

    def check(self, folder: pathlib.Path, part: str) -> None:
        """Raises ValueError where one component's weights are incomplete or do not fit; only headers are read."""
        weights.check_params(
            folder / part,
            self.shapes()[part],
            self.lists[part],
            ignore=self.ignored.get(part, ()),
            rename=self.renamed.get(part),
        )


def check_widths(folder: pathlib.Path, widths: Iterable[tuple[str, str, int, str, int]]) -> None:
    """Refuses components that do not fit the transformer.

    Args:
      folder: the pipeline's.
      widths: a component, a field of its config and its value; the transformer's field, and the value that fits.

    Raises:
      ValueError: names the file and the number.
    """
    for part, name, found, of_transformer, expected in widths:
        if found != expected:
            raise ValueError(
                f"{folder / part / 'config.json'}: {name} must be {expected}, the transformer's {of_transformer}, "
                f"and is {found}"
            )


def check_tokens(asked: int, most: int, why: str) -> None:
    """Refuses a `max_sequence_length` above `most`; `why` ends the sentence "... must be at most ...,".

    Raises:
      FieldError: names the field of the config, as the folder is not to blame.
    """
    if asked > most:
        raise FieldError(
            f"config.model.max_sequence_length must be at most {most}, {why}, not {asked}"
        )


@functools.cache
def shapes_of(init: Callable[..., Params], *networks: Any) -> Params:
    """The parameters that `init(*networks, key)` makes, as shapes.

    Kept, because tracing every component takes seconds, and every read of a component asks for the shapes.
    """
    return jax.eval_shape(functools.partial(init, *networks), jax.random.key(0))
