"""Errors of JAX's own class, as XLA raises them for compilations, runs and messages."""

import jax
import pytest

from digen_jax.process.shutdown import during, out_of_memory

OF_TPU = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 21G of 15G"


def failed(text: str, kind: type[Exception] = jax.errors.JaxRuntimeError) -> Exception:
    with pytest.raises(kind) as caught, during("training"):
        raise kind(text)
    return caught.value


def test_what_ran_and_the_first_line_are_told():
    found = out_of_memory(failed(f"{OF_TPU}.\n\nTotal hbm usage >= 21.0G"))
    assert found == f"a device ran out of memory during training ({OF_TPU})"
    bare = jax.errors.JaxRuntimeError(f"{OF_TPU} {'x' * 900}")
    assert out_of_memory(bare).startswith("a device ran out of memory (RESOURCE_EXHAUSTED: XLA:TPU")
    assert len(out_of_memory(bare)) < 400


def test_it_is_found_behind_the_error_that_it_led_to():
    try:
        try:
            raise failed(OF_TPU)
        except RuntimeError:
            raise KeyError("too often") from None
    except KeyError as hidden:
        assert out_of_memory(hidden) is None
    try:
        try:
            raise failed(OF_TPU)
        except RuntimeError:
            raise KeyError("too often")  # noqa: B904
    except KeyError as shown:
        assert "during training" in out_of_memory(shown)


@pytest.mark.parametrize(
    "error",
    [
        failed("RESOURCE_EXHAUSTED: Received message larger than max (9 vs. 4)"),
        failed("INTERNAL: out of memory"),
        failed(OF_TPU, ValueError),
    ],
    ids=str,
)
def test_others_are_left_alone(error):
    assert out_of_memory(error) is None and not getattr(error, "__notes__", [])
