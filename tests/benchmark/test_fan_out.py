"""Weights to many hosts: the formulas against simulations of every chunk, and processes that really take."""

import heapq
import math
import runpy

import pytest

from digen_jax.benchmark.fan_out import (
    MANY,
    bytes_of,
    check,
    computed,
    piped_tree,
    sizes,
    star,
    whole_tree,
)
from digen_jax.config.door import open_recipe
from digen_jax.errors import ConfigError
from tests.engine import toy
from tests.pipelines import ROOT
from tests.scripts import run_forked

SIZE, RATE = 1000.0, 10.0  # bytes, bytes a second


def taken_one_after_the_other(takers, at_once):
    """Seconds of a tree whose hosts give all to `at_once` others that wait, and then to the next ones."""
    free, waiting, last = [0.0], takers, 0.0
    while waiting:
        begin = heapq.heappop(free)
        # Givers that are free at the same time share who still waits.
        givers = 1
        while free and free[0] == begin:
            heapq.heappop(free)
            givers += 1
        counts = [waiting // givers + (i < waiting % givers) for i in range(givers)]
        for count in (min(at_once, c) for c in counts if c):
            end = begin + count * SIZE / RATE
            last, waiting = max(last, end), waiting - count
            for _ in range(count + 1):  # its takers, too
                heapq.heappush(free, end)
    return last


def passed_on_in_chunks(takers, at_once, chunk):
    """Seconds of a tree, by level, in which host i gives to at_once * i + 1 and the next ones."""
    chunks = round(SIZE / chunk)
    children = {
        i: range(at_once * i + 1, min(at_once * (i + 1), takers) + 1) for i in range(takers + 1)
    }
    has = {0: [0.0] * chunks}
    for giver in range(takers + 1):
        free = 0.0
        for number in range(chunks):
            free = max(free, has[giver][number]) + len(children[giver]) * chunk / RATE
            for child in children[giver]:
                has.setdefault(child, []).append(free)
    return max(times[-1] for times in has.values())


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("takers", [1, 2, 3, 4, 8, 9, 26, 27, 100])
def test_a_tree_of_whole_copies_takes_as_long_as_its_simulation(takers, at_once):
    expected = taken_one_after_the_other(takers, at_once)
    assert whole_tree(SIZE, takers, RATE, at_once) == pytest.approx(expected)


@pytest.mark.parametrize("at_once", [1, 2, 3])
@pytest.mark.parametrize("takers", [1, 2, 3, 4, 8, 9, 26, 27, 100])
def test_a_tree_of_chunks_takes_as_long_as_its_simulation(takers, at_once):
    """Within a chunk and what givers with fewer takers gain."""
    found = piped_tree(SIZE, takers, RATE, at_once, chunk=10.0)
    expected = passed_on_in_chunks(takers, at_once, 10.0)
    assert expected <= found + 1e-9 and found - expected <= 2 * at_once * 10.0 / RATE


def test_one_giver_gives_all_in_turn_and_a_tree_saves_most_of_it():
    assert star(SIZE, 64, RATE) == 64 * SIZE / RATE
    assert whole_tree(SIZE, 1024, RATE) == 13 * SIZE / RATE
    assert piped_tree(SIZE, 1024, RATE) < 21 * SIZE / RATE


def test_the_table_has_a_row_for_each_link_and_scheme():
    lines = computed(25e9, "All weights", (25, 100)).splitlines()
    assert lines[0] == f"| All weights, 25.00 GB | {' | '.join(f'{n:,}' for n in MANY)} |"
    assert lines[2] == "| 25 Gbit/s, from the trainer alone | 8 | 32 | 128 | 512 | 2,048 | 8,192 |"
    assert len(lines) == 2 + 2 * 4 and lines[6].startswith(
        "| 100 Gbit/s, from the trainer alone | 2 |"
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (((0,), 1, (25,)), "--takers must be above 0"),
        (((1,), 0, (25,)), "--rounds must be above 0"),
        (((1,), 1, (math.nan,)), "--links must be above 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(asked, sentence):
    with pytest.raises(ConfigError, match=sentence):
        check(*asked)


def test_a_recipe_without_a_lora_is_refused():
    with pytest.raises(ConfigError, match=r"config.lora.rank = 0: give a recipe"):
        sizes(toy.opened(toy.config()))


@pytest.mark.slow
def test_a_lora_and_all_weights_have_the_sizes_of_their_shapes():
    """Of Qwen-Image's 60 blocks: rank 64 on 8 layers of attention and 4 of feed-forward in both streams."""
    file = runpy.run_path(ROOT / "configs" / "qwen_image.py")
    lora, whole = sizes(open_recipe(file["get_config"]("ocr,4")))
    width, wide = 3072, 4 * 3072
    of_block = 8 * 2 * width + 4 * (width + wide)
    assert bytes_of(lora) == 2 * 60 * 64 * of_block
    assert whole == pytest.approx(2 * 20e9, rel=0.03)  # a model of 20B parameters


def test_numbers_that_are_none_are_refused():
    config = "--config=configs/shapes_demo.py", "--takers=1,many"
    done = run_forked("benchmark.py", "fan_out", *config)
    assert done.returncode == 2 and "--takers=1,many: give numbers" in done.stderr
