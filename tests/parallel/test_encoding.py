"""Rows of encoded prompts, of a family whose network does not attend to padded states."""

from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from digen_jax.parallel import encoding
from tests.cases import said
from tests.parallel import toy

PROMPTS = ["red", "", "yellow", "x"]


class Masked(NamedTuple):
    mask: jax.Array
    pooled: jax.Array
    states: jax.Array


class MaskedFamily(toy.ToyFamily):
    """States of the letters that there are; those behind them are no zeros."""

    masked: ClassVar = {"states": "mask"}

    def encode(self, params, ids):
        states = params["text_encoder"]["table"][ids].astype(jnp.bfloat16)
        return Masked(ids != 0, states[:, 0].astype(jnp.float32), states)


class NotEmpty(MaskedFamily):
    """Its pass without a prompt has one nevertheless, as that of Qwen-Image."""

    negative_prompt: ClassVar = " "


@pytest.fixture(scope="module")
def family():
    return MaskedFamily()


@pytest.fixture(scope="module")
def encoders(family):
    return {"text_encoder": family.params()["text_encoder"]}


@pytest.fixture(scope="module")
def made(family, encoders):
    return jax.tree.map(np.asarray, family.encode(encoders, family.tokenize(said(*PROMPTS))))


def test_exactly_the_states_that_are_attended_to_are_kept(family, made):
    rows = encoding.unpad_rows(family, made)
    for prompt, own, states, pooled in zip(PROMPTS, rows, made.states, made.pooled, strict=True):
        assert own.keys() == {"states", "pooled"}
        assert own["states"].shape == (len(prompt), toy.TEXT)
        assert own["states"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(own["states"], states[: len(prompt)])
        np.testing.assert_array_equal(own["pooled"], pooled)


def test_they_are_padded_again(family, encoders, made):
    rows = dict(zip(PROMPTS, encoding.unpad_rows(family, made), strict=True))
    rows[encoding.NULL] = rows[""]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), encoders)
    stored = encoding.PrecomputedPrompts(
        family, shapes, lambda texts: [rows[text] for text in texts]
    )
    found = stored.conditioning(said("x", "yellow", "x"))
    order = [3, 2, 3]
    assert isinstance(found, Masked)
    np.testing.assert_array_equal(found.mask, made.mask[order])
    np.testing.assert_array_equal(found.pooled, made.pooled[order])
    padded = np.where(made.mask[order][..., None], made.states[order], 0)
    np.testing.assert_array_equal(found.states, padded)
    assert (found.mask.dtype, found.states.dtype) == (np.bool_, ml_dtypes.bfloat16)
    null = stored.null(said("x", "red"))
    assert null.states.shape == (1, toy.LETTERS, toy.TEXT) and not null.mask.any()


def test_the_pass_without_the_prompt_is_stored_for_each_negative_prompt(family, encoders):
    """As the mesh makes it: one row if all are equal, be it because one is the family's own."""
    plain, own, red = said("x", "y")[0], {"negative_prompt": ""}, {"negative_prompt": "red"}
    keys = [encoding.null_prompt_key(family, plain | more) for more in ({}, own, red)]
    assert keys[:2] == [encoding.NULL] * 2 and keys[2] not in {*keys[:2], "red"}
    assert encoding.null_prompt_key(family, {"prompt": "y"} | red) == keys[2]
    # A family whose own one is not empty tells it from an empty one.
    spaced = NotEmpty()
    others = {encoding.null_prompt_key(spaced, plain | more) for more in ({}, own, red)}
    assert encoding.NULL in others and len(others) == 3

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), encoders)
    texts = {encoding.NULL: "", keys[2]: "red"}

    def read(wanted):
        made = family.encode(encoders, family.tokenize(said(*(texts[key] for key in wanted))))
        return encoding.unpad_rows(family, jax.tree.map(np.asarray, made))

    stored = encoding.PrecomputedPrompts(family, shapes, read)
    for records, count in (
        ([plain, plain | own], 1),
        ([plain | red] * 2, 1),
        ([plain | red, plain], 2),
    ):
        made = family.encode(encoders, family.tokenize_null(records))
        found = stored.null(records)
        assert len(found.states) == count
        np.testing.assert_array_equal(found.mask, made.mask)
        np.testing.assert_array_equal(found.pooled, made.pooled)


def test_bytes_are_known_before_and_without_parameters(family, encoders, made):
    # 32 GB of them.
    table = jax.ShapeDtypeStruct((2**30, toy.TEXT), np.float32)
    found = encoding.row_bytes(
        family, {"text_encoder": {"table": table}}, family.tokenize(said(*PROMPTS))
    )
    rows = encoding.unpad_rows(family, made)
    assert found.tolist() == [sum(a.nbytes for a in own.values()) for own in rows]
    plain, shapes = toy.ToyFamily(), jax.tree.map(jnp.asarray, encoders)
    assert encoding.row_bytes(plain, shapes, plain.tokenize(said("red"))).tolist() == [
        4 * (toy.LETTERS * toy.TEXT + toy.TEXT)
    ]


def test_rows_of_another_model_and_masks_with_holes_are_refused(family, encoders, made):
    shapes = encoding.encoded_shapes(family, encoders)
    (own, *_) = encoding.unpad_rows(family, made)
    for wrong in (
        {"states": np.zeros((toy.LETTERS + 1, toy.TEXT), ml_dtypes.bfloat16)},
        {"states": np.zeros((1, 1), ml_dtypes.bfloat16)},
        {"states": np.zeros((1, toy.TEXT), np.float32)},
        {"pooled": np.zeros(1, np.float32)},
    ):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))} "):
            encoding.pad_rows(family, shapes, [own | wrong])
    mask = made.mask.copy()
    mask[0, 0] = False
    with pytest.raises(ValueError, match="mask"):
        encoding.unpad_rows(family, made._replace(mask=mask))
