"""A program is compiled once for a target."""

import jax
import jax.numpy as jnp

from digen_jax.accelerators.answers import Answers


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


def test_without_a_folder_nothing_is_kept():
    answers = Answers("here", None, print)
    for _ in range(2):
        answers("double", jax.jit(lambda x: 2 * x).lower(jnp.zeros(8)))
    assert (answers.compiled, answers.found) == (2, 0)
