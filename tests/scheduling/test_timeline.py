import json

import pytest
from PIL import Image

from digen_jax.logging.timeline import TraceFile, busy_seconds, draw_timeline
from digen_jax.scheduling.commands import CAUSES, Chunk, Interval, bubbles
from digen_jax.scheduling.settings import Costs, Settings
from digen_jax.scheduling.simulator import WorkerLayout, simulate

INTERVALS = [
    Interval("rollout 0", "generate", 0.0, 2.0, Chunk(0, 1)),
    Interval("trainer", "wait", 0.0, 2.5, None, "sampling"),
    Interval("reward", "score", 2.0, 2.5, Chunk(0, 1)),
    Interval("trainer", "generate", 2.5, 3.0, Chunk(0, 2)),
]
DEVICES = {"rollout 0": 4, "trainer": 2}


def test_seconds_of_work_and_of_waiting():
    assert busy_seconds(INTERVALS, DEVICES, 0.0, 3.0) == pytest.approx(2 * 4 + 0.5 * 2)
    assert busy_seconds(INTERVALS, DEVICES, 1.0, 2.75) == pytest.approx(1 * 4 + 0.25 * 2)
    assert bubbles(INTERVALS, DEVICES) == {"sampling": 5.0}


def test_a_simulated_run_accounts_for_every_device_second():
    """Every worker works or waits from the beginning of a run to its end."""
    plan = Settings(1, groups=8, images=1, chunk_images=1, max_policy_lag=0, passes=4)
    costs = Costs(generate=1.0, train=0.5, score=0.3, update=0.2, sync=0.1)
    workers = WorkerLayout(), WorkerLayout(devices=2), WorkerLayout(roles=("sample",))
    report = simulate(workers, costs, plan, 3)
    end = report.step_ends[-1]
    recorded = report.intervals, report.devices
    busy, waits = busy_seconds(*recorded, 0.0, end), bubbles(*recorded)
    assert set(waits) <= set(CAUSES)
    assert busy + sum(waits.values()) == pytest.approx(4 * end)


def events(path):
    found = json.loads(path.read_text())
    names = {e["tid"]: e["args"]["name"] for e in found if e["name"] == "thread_name"}
    work = [e for e in found if e["ph"] == "X"]
    return [(names[e["tid"]], e["name"], e["ts"], e["dur"], e["args"]) for e in work]


def test_a_trace_has_a_row_for_each_worker_and_is_whole_after_every_write(tmp_path):
    path = tmp_path / "timeline.json"
    trace = TraceFile(path)
    assert events(path) == []
    expected = []
    for interval in INTERVALS:
        trace.write([interval], clock=10.0)
        name = f"wait for {interval.cause}" if interval.cause else interval.kind
        f = interval.chunk
        args = {"step": f.step, "chunk": f.index} if f else {}
        times = round((10 + interval.start) * 1e6), round(interval.seconds * 1e6)
        expected.append((interval.worker, name, *times, args))
        assert events(path) == expected


@pytest.mark.parametrize("cut", [0, 1, 3, 20, 60])
def test_a_resumed_run_writes_on_behind_what_a_kill_left(tmp_path, cut):
    path = tmp_path / "timeline.json"
    TraceFile(path).write(INTERVALS[:2])
    whole = events(path)
    path.write_text(path.read_text()[: -cut or None])
    trace = TraceFile(path)
    kept = events(path)
    assert kept == whole[: len(kept)] and len(kept) >= 1
    trace.write(INTERVALS[2:])
    assert [e[:2] for e in events(path)][len(kept) :] == [
        ("reward", "score"),
        ("trainer", "generate"),
    ]


def test_what_belongs_to_early_steps_can_be_cut_off(tmp_path):
    path = tmp_path / "timeline.json"
    trace = TraceFile(path)
    trace.write([*INTERVALS, Interval("rollout 1", "decode", 0.5, 2.2, Chunk(1, 0))], 10.0)
    whole = events(path)
    trace.truncate(1, 12.2)
    assert events(path) == [e for e in whole if e[1] in ("wait for sampling", "decode")]
    trace.write([Interval("trainer", "update", 3.0, 3.5)], 10.0)
    assert events(path)[-1][:2] == ("trainer", "update")
    trace.truncate(2, 20.0)
    assert events(path) == []
    trace.write(INTERVALS, 20.0)
    assert [e[:2] for e in events(path)] == [e[:2] for e in whole[:-1]]


def test_garbage_in_a_trace_is_dropped(tmp_path):
    path = tmp_path / "timeline.json"
    TraceFile(path).write(INTERVALS)
    whole = events(path)
    garbage = b'\x93\xff\n5,\n{"name": "thread_name"},\n{"ph": "X"},\n'
    path.write_bytes(path.read_bytes().replace(b"[\n", b"[\n" + garbage))
    TraceFile(path)
    assert events(path) == whole


def test_a_picture_has_a_row_for_each_worker(tmp_path):
    draw_timeline(INTERVALS, tmp_path / "few.png", "step 1")
    draw_timeline([*INTERVALS, Interval("rollout 1", "decode", 0.0, 1.0)], tmp_path / "more.png")
    few, more = (Image.open(tmp_path / name).size for name in ("few.png", "more.png"))
    assert few[0] == more[0] and few[1] < more[1]
