"""Text encoders on a mesh. Their outputs are rows on the host, which can be cached."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped

from digen_jax.checkpoints.quantization import quantized_layers
from digen_jax.errors import user_input
from digen_jax.images import black_image, image_hash, source_images
from digen_jax.models.family import Conditioning, Family, Params, Record, Tokens, negative_of
from digen_jax.parallel.placement import DeviceGroup, chunked_map

# Arrays of one prompt by conditioning field, without tokens that the network does not attend to.
Rows = Mapping[str, np.ndarray]
NULL = "\0"  # key of the family's null conditioning, and prefix of the keys of records' null conditioning


@dataclasses.dataclass(frozen=True)
class PrecomputedPrompts:
    """Precomputed prompt embeddings, used instead of text encoders on the devices.

    Attributes:
      family: Model family.
      encoders: Shapes of the text encoders' parameters.
      read: Returns the rows of given keys (`prompt_key`, `null_prompt_key`).
    """

    family: Family
    encoders: Params
    read: Callable[[Sequence[str]], list[Rows]]

    def conditioning(self, records: Sequence[Record]) -> Conditioning:
        """Returns the conditioning of each record, on the host."""
        rows = self.read([prompt_key(self.family, record) for record in records])
        return pad_rows(self.family, self._shapes, rows)

    def null(self, records: Sequence[Record]) -> Conditioning:
        """Returns the null conditioning; one row for all records if `Family.tokenize_null` has one."""
        keys = [null_prompt_key(self.family, record) for record in records]
        if self.family.source is None and len(set(keys)) == 1:
            keys = keys[:1]
        return pad_rows(self.family, self._shapes, self.read(keys))

    @functools.cached_property
    def _shapes(self) -> Conditioning:
        return encoded_shapes(self.family, self.encoders)


def jit_encoder(family: Family, group: DeviceGroup) -> Any:
    """Returns the jitted program (components, tokens) -> conditioning, replicated on every device."""
    return jax.jit(functools.partial(_encode, family, group), out_shardings=group.replicated)


def block_size(family: Family, group: DeviceGroup) -> int:
    """Returns the number of prompts that a mesh encodes per chunk."""
    return family.encoded_prompts * group.images


def example_record(family: Family) -> Record:
    """Returns a record with every field that the family reads, for programs and shapes."""
    if family.source is None:
        return {"prompt": ""}
    return {"prompt": "", "image": [black_image(*family.source[:2])] * family.sources}


def prompt_key(family: Family, record: Record) -> str:
    """Returns the key of a record's conditioning: its prompt, and the hashes of the images that are edited.

    Raises:
      ConfigError: the image file is missing.
    """
    if family.source is None:
        return record["prompt"]
    with user_input():
        return "\0".join([record["prompt"], *map(image_hash, source_images(record))])


def null_prompt_key(family: Family, record: Record) -> str:
    """Returns the key of a record's null conditioning: its negative prompt, and the hashes of its images.

    Raises:
      ConfigError: the image file is missing.
    """
    negative = negative_of(family, record)
    if family.source is None and negative == family.negative_prompt:
        return NULL
    return NULL + prompt_key(family, {**record, "prompt": NULL + negative})


def encoded_shapes(family: Family, encoders: Params) -> Conditioning:
    """Returns the shapes of one prompt's conditioning."""
    return jax.eval_shape(family.encode, encoders, family.tokenize([example_record(family)]))


def row_bytes(family: Family, encoders: Params, tokens: Tokens) -> Int[np.ndarray, "b"]:
    """Returns the bytes of each prompt's rows without encoding it; `encoders` are shapes."""
    masks = set(family.masked.values())

    def encode_masks(encoders: Params, tokens: Tokens) -> dict[str, Bool[Array, "b n"]]:
        fields = _fields(family.encode(encoders, tokens))
        return {mask: fields[mask] for mask in masks}

    if masks:
        # Masks depend only on tokens, so the program reads no parameter; broadcast zeros take no memory.
        empty = jax.tree.map(lambda leaf: np.broadcast_to(leaf.dtype.type(0), leaf.shape), encoders)
        encoded = jax.jit(encode_masks)(empty, tokens)
    total = np.zeros(len(jax.tree.leaves(tokens)[0]), np.int64)
    for field, leaf in _fields(encoded_shapes(family, encoders)).items():
        if field in masks:
            continue
        mask = family.masked.get(field)
        length = _lengths(np.asarray(encoded[mask])) if mask else leaf.shape[1]
        total += length * int(np.prod(leaf.shape[2:])) * leaf.dtype.itemsize
    return total


def unpad_rows(family: Family, conditioning: Conditioning) -> list[Rows]:
    """Returns the rows of each prompt from the conditioning on the host; row counts replace the masks.

    Raises:
      ValueError: a mask excludes a token before another one.
    """
    fields = _fields(conditioning)
    lengths = {field: _lengths(fields[mask]) for field, mask in family.masked.items()}
    kept = [field for field in fields if field not in family.masked.values()]
    count = len(next(iter(fields.values())))
    return [
        # Copies: a view would keep the padding in memory.
        {f: fields[f][i, : lengths[f][i]].copy() if f in lengths else fields[f][i] for f in kept}
        for i in range(count)
    ]


def pad_rows(family: Family, shapes: Conditioning, rows: Sequence[Rows]) -> Conditioning:
    """Returns the conditioning of prompts on the host from their rows: the inverse of `unpad_rows`.

    Tokens that the network does not attend to are 0. `shapes` are the shapes of one prompt's conditioning.

    Raises:
      ValueError: the rows belong to another model.
    """
    encoded = {
        field: np.zeros((len(rows), *leaf.shape[1:]), leaf.dtype)
        for field, leaf in _fields(shapes).items()
    }
    for i, prompt in enumerate(rows):
        for field, array in prompt.items():
            full, mask = encoded[field][i], family.masked.get(field)
            fits = len(array) <= len(full) if mask else len(array) == len(full)
            if not fits or (array.shape[1:], array.dtype) != (full.shape[1:], full.dtype):
                raise ValueError(
                    f"{field} of an encoded prompt is {array.dtype}{list(array.shape)}, but the model's is "
                    f"{full.dtype}{list(full.shape)}"
                )
            full[: len(array)] = array
            if mask:
                encoded[mask][i, : len(array)] = True
    return jax.tree.unflatten(jax.tree.structure(shapes), list(encoded.values()))


def _lengths(mask: Bool[np.ndarray, "b n"]) -> Int[np.ndarray, "b"]:
    lengths = mask.sum(1)
    if not np.array_equal(mask, np.arange(mask.shape[1]) < lengths[:, None]):
        raise ValueError("the mask of encoded prompts excludes a token before another one")
    return lengths


def _fields(conditioning: Conditioning) -> dict[str, Any]:
    """Returns the arrays of a conditioning by name, in the order of its leaves."""
    named = jax.tree.leaves_with_path(conditioning)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in named}


def _encode(family: Family, group: DeviceGroup, frozen: Any, tokens: Any) -> Any:
    """Encodes each device's share of the prompts, in chunks of a size that bounds memory."""
    prompts = len(jax.tree.leaves(tokens)[0])

    def pad(array: Shaped[Array, "b ..."]) -> Shaped[Array, "n ..."]:
        free = [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, [(0, -prompts % group.images), *free], mode="edge")

    encode = functools.partial(family.encode, frozen)
    with quantized_layers():
        done = chunked_map(encode, jax.tree.map(pad, tokens), family.encoded_prompts, group)
    return jax.tree.map(lambda c: c[:prompts], done)
