"""A program is compiled once for a target."""

import jax
import jax.numpy as jnp
import pytest

from digen_jax.planning.answers import Answers


def test_an_answer_is_kept_by_program_and_target(tmp_path):
    notes = []

    def program(factor):
        return jax.jit(lambda x: jnp.tanh(factor * x)).lower(jnp.zeros(8))

    first = Answers("slice jax 1", tmp_path, notes.append)
    answer = first("double", program(2))
    assert "ENTRY" in answer.text and answer.peak > 0
    assert first("double", program(2)) == answer and (first.compiled, first.found) == (1, 1)
    assert notes[0] == "double: compiling for slice" and notes[-1] == "double: compiled before"

    again = Answers("slice jax 1", tmp_path, notes.append)
    assert again("double", program(2)) == answer and again.compiled == 0
    again("triple", program(3))
    Answers("slice jax 2", tmp_path, notes.append)("double", program(2))
    assert again.compiled == 1 and len(list(tmp_path.iterdir())) == 3


def test_a_program_above_the_memory_does_not_fit_and_its_answer_is_kept(tmp_path):
    """The CUDA compiler refuses none; another limit needs no other compilation."""
    program = jax.jit(lambda x: 2 * x).lower(jnp.zeros(8))
    small = Answers("slice jax 1", tmp_path, lambda text: None, memory=63.0)
    large = Answers("slice jax 1", tmp_path, lambda text: None, memory=64.0)
    assert small("double", program) == ("", 64, 32)
    assert "ENTRY" in large("double", program).text and (large.compiled, large.found) == (0, 1)


def test_without_a_folder_nothing_is_kept():
    answers = Answers("here", None, print)
    for _ in range(2):
        answers("double", jax.jit(lambda x: 2 * x).lower(jnp.zeros(8)))
    assert (answers.compiled, answers.found) == (2, 0)


class Refused:
    """A program that the compiler refuses with a message."""

    def __init__(self, message):
        self.message = message

    def as_text(self):
        return self.message

    def compile(self):
        raise jax.errors.JaxRuntimeError(self.message)


@pytest.mark.parametrize(
    "message",
    [
        "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.99G) exceeds "
        "available HBM (15.75G).",
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 19.99G of "
        "15.75G hbm. Exceeded hbm capacity by 4.24G.",
    ],
)
def test_a_program_that_needs_more_memory_than_there_is_has_no_text_and_is_kept(tmp_path, message):
    notes = []
    answers = Answers("slice jax 1", tmp_path, notes.append)
    answer = answers("train", Refused(message))
    assert answer.text == "" and answer.peak == answer.beyond == round(19.99 * 2**30)
    assert "train: does not fit, because it needs 21.5 GB of a device" in notes
    assert answers("train", Refused(message)) == answer and answers.compiled == 1


def test_another_error_of_the_compiler_is_not_about_memory():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        Answers("here", None, print)("train", Refused("INTERNAL: 3.1G of 4.2G"))
