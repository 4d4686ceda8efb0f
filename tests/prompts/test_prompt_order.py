import collections
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from digen_jax.data import prompt_order
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.data.prompt_order import prompt_batches
from digen_jax.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"


@pytest.fixture
def seven(tmp_path):
    """A file of seven prompts, of which two read the same."""
    path = tmp_path / "seven.txt"
    path.write_text("\n".join(["a", "b", "c", "d", "e", "e", "f"]))
    return path


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def take(batches, count):
    return list(itertools.islice(batches, count))


def without_serial(records):
    return [{key: value for key, value in record.items() if key != "serial"} for record in records]


def built(cache):
    """When each dataset in the cache was written."""
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.array_record*")}


@pytest.mark.parametrize("name", ["geneval_test_metadata.jsonl", "ocr_test.txt"])
def test_unshuffled_stream_is_the_file_over_and_over(name, cache):
    records = read_prompt_file(DATA / name)
    steps = take(prompt_batches(DATA / name, 64, 0, cache, shuffle=False), 6)
    stream = [record for step in steps for record in step]
    assert without_serial(stream) == (records * 4)[: len(stream)]
    assert [record["serial"] for record in stream] == list(range(64 * 6))


def test_metadata_survives_the_cache(tmp_path, cache):
    record = {
        "prompt": 'ein "Käfig"\u2028\n😀',
        "include": [{"class": "ü", "count": 1}],
        "x": [None, 0.1],
    }
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps(record))
    assert take(prompt_batches(path, 1, 0, cache), 1) == [[record | {"serial": 0}]]


def test_pictures_lie_beside_the_file_that_is_read_not_the_one_that_was_built(tmp_path, cache):
    for folder in ("one", "other"):
        (tmp_path / folder).mkdir()
        path = tmp_path / folder / "p.jsonl"
        path.write_text('{"prompt": "a", "image": "pictures/a.png"}\n')
        ((record,),) = take(prompt_batches(path, 1, 0, cache), 1)
        assert record["image"] == str(tmp_path / folder / "pictures" / "a.png")
        assert [record] == [r | {"serial": 0} for r in read_prompt_file(path)]
    assert len(built(cache)) == 1


def test_every_epoch_holds_each_prompt_once_in_an_order_of_its_own(seven, cache):
    steps = take(prompt_batches(seven, 2, 3, cache), 70)
    stream = [record["prompt"] for step in steps for record in step]
    epochs = [tuple(stream[start : start + 7]) for start in range(0, 140, 7)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple("abcdeef")}
    assert len(set(epochs)) > 15


def test_a_step_may_hold_several_epochs(seven, cache):
    (step,) = take(prompt_batches(seven, 18, 0, cache), 1)
    assert [record["serial"] for record in step] == list(range(18))
    counts = collections.Counter(record["prompt"] for record in step[:14])
    assert counts == {"a": 2, "b": 2, "c": 2, "d": 2, "e": 4, "f": 2}


def test_same_seed_same_stream_other_seed_another(seven, cache, tmp_path):
    first = take(prompt_batches(seven, 3, 5, cache), 20)
    assert take(prompt_batches(seven, 3, 5, tmp_path / "elsewhere"), 20) == first
    streams = [take(prompt_batches(seven, 7, seed, cache), 8) for seed in (0, 1, 2)]
    epochs = [[tuple(r["prompt"] for r in step) for step in stream] for stream in streams]
    # Not even shifted by an epoch, as seed + epoch would be.
    assert all(len(set(one) & set(other)) < 3 for one, other in itertools.combinations(epochs, 2))


def test_restart_after_any_step_continues_the_unbroken_stream(seven, cache):
    unbroken = prompt_batches(seven, 3, 1, cache)
    states, steps = [unbroken.get_state()], []
    for _ in range(12):
        steps.append(next(unbroken))
        states.append(json.loads(json.dumps(unbroken.get_state())))
    for done, state in enumerate(states[:-1]):
        restarted = prompt_batches(seven, 3, 1, cache)
        next(restarted)
        restarted.set_state(state)
        assert take(restarted, 12 - done) == steps[done:]


def test_a_fixed_set_comes_again_with_its_serials_and_goes_on_after_a_restart(seven, cache):
    first = take(prompt_batches(seven, 3, 1, cache), 4)
    batches = prompt_batches(seven, 3, 1, cache, set_steps=4)
    assert take(batches, 6) == [*first, *first[:2]]
    restarted = prompt_batches(seven, 3, 1, cache, set_steps=4)
    restarted.set_state(json.loads(json.dumps(batches.get_state())))
    assert take(restarted, 4) == [*first[2:], *first[:2]]


@pytest.fixture
def three(tmp_path, seven):
    """Files of seven, two and five prompts."""
    other, more = tmp_path / "other.jsonl", tmp_path / "more.txt"
    other.write_text('{"prompt": "u", "tag": "t"}\n{"prompt": "a"}')
    more.write_text("v\nw\nx\ny\nz")
    return [seven, other, more]


def test_of_several_files_every_first_part_of_a_run_holds_each_ones_share(three, cache):
    weights = np.array([0.5, 0.125, 0.375])
    steps = take(prompt_batches(three, 5, 3, cache, weights=weights), 16)
    stream = [record for step in steps for record in step]
    assert [record["serial"] for record in stream] == list(range(80))
    names = [str(path) for path in three]
    drawn = np.array([[record["prompt_file"] == name for name in names] for record in stream])
    counts, shares = drawn.cumsum(axis=0), np.arange(1, 81)[:, None] * weights
    assert np.abs(counts - shares).max() < 1.5
    equal = take(prompt_batches(three, 3, 3, cache), 5)
    assert all({record["prompt_file"] for record in step} == set(names) for step in equal)


def test_several_files_are_each_a_stream_of_its_own(three, cache):
    steps = take(prompt_batches(three, 4, 9, cache, weights=(2, 1, 1)), 16)
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
    alone = [r["prompt"] for step in take(prompt_batches(three[0], 4, 9, cache), 8) for r in step]
    assert [record["prompt"] for record in of_file[str(three[0])]] == alone
    twin = three[0].with_name("twin.txt")
    twin.write_text(three[0].read_text().upper())
    both = [r for step in take(prompt_batches([three[0], twin], 4, 9, cache), 16) for r in step]
    upper = [r["prompt"] for r in both if r["prompt_file"] == str(twin)]
    assert [text.lower() for text in upper] != alone and len(upper) == 32


def test_a_single_file_in_a_list_is_a_single_file(seven, cache):
    listed, alone = (prompt_batches(given, 3, 1, cache) for given in ([seven], seven))
    assert take(listed, 5) == take(alone, 5)
    assert listed.get_state() == alone.get_state()


@pytest.mark.parametrize("set_steps", [0, 3])
def test_several_files_continue_after_a_restart(three, cache, set_steps):
    given = dict(cache_dir=cache, weights=(3, 1, 2), set_steps=set_steps)
    batches = prompt_batches(three, 4, 1, **given)
    take(batches, 2)
    state = json.loads(json.dumps(batches.get_state()))
    restarted = prompt_batches(three, 4, 1, **given)
    restarted.set_state(state)
    assert take(restarted, 4) == take(batches, 4)
    for other, field in [
        (prompt_batches(three, 4, 1, **given | {"weights": (3, 1, 1)}), "weights"),
        (prompt_batches(three[::-1], 4, 1, **given), "prompt_file_hash"),
        (prompt_batches(three[0], 4, 1, cache, set_steps=set_steps), "prompt_file_hash"),
    ]:
        with pytest.raises(ValueError, match=f"its {field} is "):
            other.set_state(state)
    with pytest.raises(ValueError, match="its prompt_file_hash is "):
        restarted.set_state(prompt_batches(three[0], 4, 1, cache).get_state())


@pytest.mark.parametrize(
    ("field", "other"),
    [("groups_per_step", 4), ("seed", 2), ("shuffle", False), ("prompt_file_hash", None)],
)
def test_refuses_the_state_of_another_stream(seven, cache, tmp_path, field, other):
    arguments = {"groups_per_step": 3, "seed": 1, "shuffle": True}
    state = prompt_batches(seven, cache_dir=cache, **arguments).get_state()
    if field == "prompt_file_hash":
        seven = tmp_path / "other.txt"
        seven.write_text("a\nb")
    else:
        arguments[field] = other
    batches = prompt_batches(seven, cache_dir=cache, **arguments)
    before = batches.get_state()
    with pytest.raises(ValueError, match=f"its {field} is .*, here it is .*; restore what"):
        batches.set_state(state)
    assert batches.get_state() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"groups_per_step": 0}, "groups_per_step is 0: it must be 1 or more"),
        ({"seed": -1}, "seed is -1: it must not be negative"),
    ],
)
def test_refuses_wrong_arguments(seven, cache, arguments, message):
    with pytest.raises(ValueError, match=message):
        prompt_batches(seven, cache_dir=cache, **{"groups_per_step": 4, "seed": 0} | arguments)


def test_a_bad_file_is_refused_with_its_line_and_leaves_no_cache(tmp_path, cache):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": 3}')
    with pytest.raises(ValueError, match='line 2: "prompt" is 3') as raised:
        prompt_batches(path, 1, 0, cache)
    assert str(raised.value).startswith(f"{path}, line 2")
    assert not list(cache.iterdir())
    with pytest.raises(FileNotFoundError, match="no prompt file at"):
        prompt_batches(tmp_path / "none.txt", 1, 0, cache)


def test_only_a_changed_file_is_built_again(seven, cache):
    take(prompt_batches(seven, 2, 0, cache), 1)
    first = built(cache)
    take(prompt_batches(seven, 4, 1, cache), 1)
    assert built(cache) == first and len(first) == 1

    seven.write_text("x\ny\n")
    (step,) = take(prompt_batches(seven, 2, 0, cache), 1)
    assert {record["prompt"] for record in step} == {"x", "y"}
    both = built(cache)
    assert len(both) == 2 and first.items() <= both.items()
    assert [path.name for path in cache.iterdir()] == ["prompt_file"]


def test_the_same_lines_as_text_and_as_json_are_two_datasets(tmp_path, cache):
    line = '{"prompt": "a"}'
    for name, prompt in (("p.txt", line), ("p.jsonl", "a")):
        (tmp_path / name).write_text(line)
        assert take(prompt_batches(tmp_path / name, 1, 0, cache), 1)[0][0]["prompt"] == prompt


def test_a_build_that_another_process_overtakes_uses_the_others(seven, cache, monkeypatch):
    build = prompt_order.PromptFile.download_and_prepare
    overtaken = []

    def overtake(builder, **arguments):
        build(builder, **arguments)
        if not overtaken:
            overtaken.append(True)
            overtaken.append(take(prompt_batches(seven, 7, 0, cache), 2))
            overtaken.append(built(cache))

    monkeypatch.setattr(prompt_order.PromptFile, "download_and_prepare", overtake)
    steps = take(prompt_batches(seven, 7, 0, cache), 2)
    assert steps == overtaken[1]
    others = {path: time for path, time in overtaken[2].items() if "building." not in str(path)}
    assert built(cache) == others and len(others) == 1


FRESH = """
import json, sys
from absl import logging
logging.set_verbosity("info")
from digen_jax.data.prompt_order import prompt_batches
path, cache, state = sys.argv[1:]
batches = prompt_batches(path, 3, 1, cache)
if state:
    batches.set_state(json.loads(state))
step = next(batches)
foreign = sorted({"torch", "tensorflow"} & {name.split(".")[0] for name in sys.modules})
print(json.dumps({"step": step, "state": batches.get_state(), "foreign": foreign}))
"""


def fresh_process(path, cache, state=""):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", FRESH, str(path), str(cache), state],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_build_at_once_agree_quietly_without_torch_or_tensorflow(seven, cache):
    processes = [fresh_process(seven, cache) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [errors for _, errors in results] == ["", ""]
    # Nothing but the JSON was printed, or this would not be JSON.
    first, second = (json.loads(output) for output, _ in results)
    assert first == second and first["foreign"] == []
    assert len(built(cache)) == 1

    batches = prompt_batches(seven, 3, 1, cache)
    assert next(batches) == first["step"]
    output, _ = fresh_process(seven, cache, json.dumps(first["state"])).communicate(timeout=120)
    assert json.loads(output)["step"] == next(batches)


@pytest.mark.parametrize("damage", ["overwritten", "truncated", "missing", "empty folder"])
def test_a_damaged_dataset_is_refused_by_its_folder(tmp_path, damage):
    cache, many = tmp_path / "own", tmp_path / "many.txt"
    many.write_text("".join(f"prompt {number}\n" for number in range(400)))
    prompt_batches(many, 2, seed=0, cache_dir=cache)
    (file,) = cache.rglob("*array_record*")
    if damage == "overwritten":
        data = bytearray(file.read_bytes())
        data[: len(data) // 2] = bytes(len(data) // 2)
        file.write_bytes(data)
    elif damage == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        for one in [file] if damage == "missing" else list(file.parent.iterdir()):
            one.unlink()
    with pytest.raises(ConfigError) as caught:
        take(prompt_batches(many, 2, seed=0, cache_dir=cache), 200)
    assert str(file.parent) in str(caught.value)
