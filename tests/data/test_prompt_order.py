import collections
import itertools
import json

import numpy as np
import pytest

from digen_jax.data.prompt_files import prompt_batches, read_prompt_file
from tests.pipelines import ROOT

DATA = ROOT / "tests" / "data"


@pytest.fixture
def seven(tmp_path):
    """A file of seven prompts, of which two read the same."""
    path = tmp_path / "seven.txt"
    path.write_text("\n".join(["a", "b", "c", "d", "e", "e", "f"]))
    return path


@pytest.fixture
def three(tmp_path, seven):
    """Files of seven, two and five prompts."""
    other, more = tmp_path / "other.jsonl", tmp_path / "more.txt"
    other.write_text('{"prompt": "u", "tag": "t"}\n{"prompt": "a"}')
    more.write_text("v\nw\nx\ny\nz")
    return [seven, other, more]


def take(batches, count):
    return list(itertools.islice(batches.since(0), count))


def prompts(steps):
    return [record["prompt"] for step in steps for record in step]


def without_serial(records):
    return [{key: value for key, value in record.items() if key != "serial"} for record in records]


# Recorded while prompts were read from TFDS data sets: runs continue in the same order.
GOLDEN = {
    (7,): (dict(groups_per_step=2, seed=0), "12 45 36 05 61 42 03 65 24 10 34 63"),
    (3,): (dict(groups_per_step=1, seed=2**31), "0 2 1 2 1 0 1 2 0"),
    (7, 3): (dict(groups_per_step=3, seed=2, weights=(3, 1), set_steps=2), "153 706 153 706 153"),
    (7, 3, 4): (
        dict(groups_per_step=5, seed=3, weights=(0.5, 0.125, 0.375)),
        "486d0 c2b59 3a1a2 d173c 4b6d0 75a4c 0b592 a3c1d",
    ),
}


def golden_files(tmp_path, lengths):
    """Files of the digits 0123456, 789 and so on."""
    first, paths = 0, []
    for length in lengths:
        paths.append(tmp_path / f"{first}.txt")
        paths[-1].write_text("\n".join("0123456789abcd"[first : first + length]))
        first += length
    return paths


@pytest.mark.parametrize("lengths", GOLDEN, ids=str)
def test_the_order_is_that_of_older_versions(tmp_path, lengths):
    arguments, expected = GOLDEN[lengths]
    expected = expected.split()
    steps = take(prompt_batches(golden_files(tmp_path, lengths), **arguments), len(expected))
    assert ["".join(record["prompt"] for record in step) for step in steps] == expected


@pytest.mark.parametrize("name", ["geneval_test_metadata.jsonl", "ocr_test.txt"])
def test_serials_number_the_groups_of_a_run(name):
    records = read_prompt_file(DATA / name)
    steps = take(prompt_batches(DATA / name, 64, 0), len(records) // 64 + 1)
    stream = [record for step in steps for record in step]
    assert [record["serial"] for record in stream] == list(range(len(stream)))
    epoch = without_serial(stream[: len(records)])
    assert sorted(map(json.dumps, epoch)) == sorted(map(json.dumps, records))


def test_a_changed_record_is_not_seen_by_later_epochs(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "x": [1]}')
    for (record,) in take(prompt_batches(path, 1, 0), 3):
        assert record["x"] == [1]
        record["x"].append(2)


def test_every_epoch_has_each_prompt_once_in_its_own_order(seven):
    stream = prompts(take(prompt_batches(seven, 2, 3), 70))
    epochs = [tuple(stream[start : start + 7]) for start in range(0, 140, 7)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple("abcdeef")}
    assert len(set(epochs)) > 15


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"set_steps": 4},
        {"files": 3, "weights": (3, 1, 2)},
        {"files": 3, "weights": (3, 1, 2), "set_steps": 3},
    ],
    ids=str,
)
def test_restart_after_any_step_continues_the_unbroken_stream(three, arguments):
    paths = three[: arguments.get("files", 1)]
    arguments = {name: value for name, value in arguments.items() if name != "files"}
    unbroken = prompt_batches(paths, 3, 1, **arguments)
    steps = take(unbroken, 12)
    for done in (0, 1, 5, 11):
        restarted = prompt_batches(paths, 3, 1, **arguments)
        restarted.check(json.loads(json.dumps(unbroken.stream)))
        assert list(itertools.islice(restarted.since(done), 12 - done)) == steps[done:]


def test_each_of_several_files_has_its_share_of_every_prefix(three):
    weights = np.array([0.5, 0.125, 0.375])
    steps = take(prompt_batches(three, 5, 3, weights=weights), 16)
    stream = [record for step in steps for record in step]
    assert [record["serial"] for record in stream] == list(range(80))
    names = [str(path) for path in three]
    drawn = np.array([[record["prompt_file"] == name for name in names] for record in stream])
    counts, shares = drawn.cumsum(axis=0), np.arange(1, 81)[:, None] * weights
    assert np.abs(counts - shares).max() < 1.5
    equal = take(prompt_batches(three, 3, 3), 5)
    assert all({record["prompt_file"] for record in step} == set(names) for step in equal)


def test_each_of_several_files_is_a_separate_stream(three):
    steps = take(prompt_batches(three, 4, 9, weights=(2, 1, 1)), 16)
    of_file = collections.defaultdict(list)
    for record in (record for step in steps for record in step):
        of_file[record["prompt_file"]].append(record)
    assert [len(of_file[str(path)]) for path in three] == [32, 16, 16]
    for path, length in zip(three, (7, 2, 5), strict=True):
        known = [json.dumps(r | {"prompt_file": str(path)}) for r in read_prompt_file(path)]
        drawn = [*map(json.dumps, without_serial(of_file[str(path)]))]
        for first in range(0, len(drawn) - length + 1, length):  # an epoch has each prompt once
            assert sorted(drawn[first : first + length]) == sorted(known)
    # The first file has the order that it has alone, and another of the same length has another order.
    alone = prompts(take(prompt_batches(three[0], 4, 9), 8))
    assert [record["prompt"] for record in of_file[str(three[0])]] == alone
    twin = three[0].with_name("twin.txt")
    twin.write_text(three[0].read_text().upper())
    both = [r for step in take(prompt_batches([three[0], twin], 4, 9), 16) for r in step]
    upper = [r["prompt"] for r in both if r["prompt_file"] == str(twin)]
    assert [text.lower() for text in upper] != alone and len(upper) == 32


def test_a_single_file_in_a_list_is_a_single_file(seven):
    listed, alone = (prompt_batches(given, 3, 1) for given in ([seven], seven))
    assert take(listed, 5) == take(alone, 5)
    assert listed.stream == alone.stream


@pytest.mark.parametrize(
    ("other", "field"),
    [
        ({"groups_per_step": 4}, "groups_per_step"),
        ({"seed": 2}, "seed"),
        ({"paths": [0, 2]}, "prompt_file_hash"),
        ({"paths": [0]}, "prompt_file_hash"),
        ({"paths": [0, 1], "weights": (3, 2)}, "weights"),
    ],
    ids=str,
)
def test_a_state_of_another_stream_is_refused(three, other, field):
    def batches(paths=(0, 1), groups_per_step=3, seed=1, weights=(3, 1)):
        weights = weights if len(paths) > 1 else ()
        files = [three[number] for number in paths]
        return prompt_batches(files, groups_per_step, seed, weights=weights)

    with pytest.raises(ValueError, match=field):
        batches(**other).check(batches().stream)


@pytest.mark.parametrize("arguments", [{"groups_per_step": 0}, {"seed": -1}], ids=str)
def test_invalid_arguments_are_refused_by_name(seven, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        prompt_batches(seven, **{"groups_per_step": 4, "seed": 0} | arguments)


def test_an_invalid_file_is_refused_with_its_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}')
    with pytest.raises(ValueError, match=f'{path}, line 2: "prompt"'):
        prompt_batches(path, 1, 0)
    with pytest.raises(FileNotFoundError, match="none"):
        prompt_batches(tmp_path / "none.txt", 1, 0)
