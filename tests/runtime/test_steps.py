"""The data of the steps that have begun, and of no others."""

import itertools

import jax
import numpy as np
import pytest

from digen_jax.diffusion.windows import Window
from digen_jax.parallel.sampler import SampleRng
from digen_jax.runtime.steps import Steps
from digen_jax.scheduling.commands import Chunk
from tests.parallel import toy


def steps(drawn=None, first=0):
    given = itertools.islice(toy.batches(2), first, None)
    noted = given if drawn is None else (drawn.append(1) or batch for batch in given)
    return Steps(noted, 2, 2, SampleRng(3, Window(length=2)), first, set_steps=4)


def test_a_mesh_that_joins_late_draws_what_it_missed_and_holds_none_of_it():
    drawn, whole = [], steps()
    late = steps(drawn)
    late.forget(5)
    assert late[6].records == whole[6].records and len(drawn) == 7
    assert sorted(late._steps) == [5, 6] and late.first == 5
    for found, expected in ((late[5], whole[5]), (late[6], whole[6])):
        for keys, others in (
            (found.drawn.keys, expected.drawn.keys),
            (found.training_keys, expected.training_keys),
        ):
            assert np.array_equal(jax.random.key_data(keys), jax.random.key_data(others))
    with pytest.raises(KeyError):
        late[4]


def test_steps_are_forgotten_once_and_in_any_order():
    found = steps(first=2)
    found[4]
    found.end()
    found.forget(3)
    assert found.first == 3 and sorted(found._steps) == [3, 4]
    found.forget(5)
    found.forget(4)
    found.forget(0)
    assert found.first == 5 and not found._steps
    assert found.find(Chunk(4, 0)) is None and found[5].size == 2
