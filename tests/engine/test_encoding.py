"""Rows of encoded prompts, of a family whose network does not attend to padded states."""

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from digen_jax.engine import encoding
from tests.cases import said
from tests.engine import toy

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
    rows = encoding.rows_of(family, made)
    for prompt, own, states, pooled in zip(PROMPTS, rows, made.states, made.pooled, strict=True):
        assert own.keys() == {"states", "pooled"}
        assert own["states"].shape == (len(prompt), toy.TEXT)
        assert own["states"].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(own["states"], states[: len(prompt)])
        np.testing.assert_array_equal(own["pooled"], pooled)


def test_they_are_padded_again(family, encoders, made):
    rows = dict(zip(PROMPTS, encoding.rows_of(family, made), strict=True))
    rows[encoding.NULL] = rows[""]
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), encoders)
    stored = encoding.Stored(family, shapes, lambda texts: [rows[text] for text in texts])
    found = stored.conditioning(said("x", "yellow", "x"))
    order = [3, 2, 3]
    assert isinstance(found, Masked)
    np.testing.assert_array_equal(found.mask, made.mask[order])
    np.testing.assert_array_equal(found.pooled, made.pooled[order])
    padded = np.where(made.mask[order][..., None], made.states[order], 0)
    np.testing.assert_array_equal(found.states, padded)
    assert (found.mask.dtype, found.states.dtype) == (np.bool_, ml_dtypes.bfloat16)
    null = stored.null()
    assert null.states.shape == (1, toy.LETTERS, toy.TEXT) and not null.mask.any()


def test_bytes_are_known_before_and_without_parameters(family, encoders, made):
    # 32 GB of them.
    table = jax.ShapeDtypeStruct((2**30, toy.TEXT), np.float32)
    found = encoding.row_bytes(
        family, {"text_encoder": {"table": table}}, family.tokenize(said(*PROMPTS))
    )
    rows = encoding.rows_of(family, made)
    assert found.tolist() == [sum(a.nbytes for a in own.values()) for own in rows]
    plain, shapes = toy.ToyFamily(), jax.tree.map(jnp.asarray, encoders)
    assert encoding.row_bytes(plain, shapes, plain.tokenize(said("red"))).tolist() == [
        4 * (toy.LETTERS * toy.TEXT + toy.TEXT)
    ]


def test_rows_of_another_model_and_masks_with_holes_are_refused(family, encoders, made):
    shapes = encoding.encoded_shapes(family, encoders)
    (own, *_) = encoding.rows_of(family, made)
    for wrong in (
        {"states": np.zeros((toy.LETTERS + 1, toy.TEXT), ml_dtypes.bfloat16)},
        {"states": np.zeros((1, 1), ml_dtypes.bfloat16)},
        {"states": np.zeros((1, toy.TEXT), np.float32)},
        {"pooled": np.zeros(1, np.float32)},
    ):
        with pytest.raises(
            ValueError, match=r"of an encoded prompt is \S+\[.*, but the model's is"
        ):
            encoding.joined(family, shapes, [own | wrong])
    mask = made.mask.copy()
    mask[0, 0] = False
    with pytest.raises(ValueError, match="excludes a token in front of another"):
        encoding.rows_of(family, made._replace(mask=mask))


def test_a_pass_without_the_prompt_is_one_for_all(family):
    assert encoding.null_tokens(family).shape == (1, toy.LETTERS)

    @dataclasses.dataclass(frozen=True)
    class Each(toy.ToyFamily):
        def tokenize_null(self, records):
            return self.tokenize(records)

    with pytest.raises(ValueError, match="differs from text to text"):
        encoding.null_tokens(Each())
