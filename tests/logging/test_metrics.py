import json
import os
import pathlib
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from digen_jax.errors import ConfigError
from digen_jax.logging import metrics
from digen_jax.logging.metrics import MetricsLog, read_metrics, without_timing

PACKAGE = pathlib.Path(metrics.__file__).parents[1]


def values(step: int) -> dict:
    line = {"reward/mean": np.float32(step / 7), "grad_norm": jnp.float32(step), "seconds/train": 1}
    return line | ({"evaluation/reward": step * 0.1} if step % 2 else {})


def write(log: MetricsLog, steps) -> None:
    for step in steps:
        log.write(step, values(step))


def tags(workdir: pathlib.Path) -> list[tuple]:
    """(step, name, kind of value) of every summary in the folder."""
    found = events(workdir)
    return [(e.step, v.tag, v.WhichOneof("value")) for e in found for v in e.summary.value]


def scalars(workdir: pathlib.Path) -> list[tuple]:
    """(step, name, value) of every number in the folder's events."""
    values = [(e.step, v) for e in events(workdir) for v in e.summary.value]
    return [(step, v.tag, v.simple_value) for step, v in values if v.HasField("simple_value")]


def events(workdir: pathlib.Path) -> list[Event]:
    """Every event in the folder, checksums verified."""
    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            body, data = data[: size + 16], data[size + 16 :]
            assert struct.unpack("<I", body[8:12])[0] == masked_crc32c(body[:8])
            assert struct.unpack("<I", body[-4:])[0] == masked_crc32c(body[12:-4])
            found.append(Event.FromString(body[12:-4]))
    return found


def lines(workdir: pathlib.Path) -> list[dict]:
    return [without_timing(line) for line in read_metrics(workdir / "metrics.jsonl")]


def unbroken(folder: pathlib.Path, steps) -> pathlib.Path:
    log = MetricsLog(folder)
    write(log, steps)
    log.close()
    return folder


def test_lines_and_events_say_the_same(tmp_path):
    unbroken(tmp_path, range(5))
    assert lines(tmp_path)[3] == {
        "step": 3,
        "reward/mean": float(np.float32(3 / 7)),
        "grad_norm": 3.0,
        "evaluation/reward": 3 * 0.1,
    }
    assert scalars(tmp_path) == [
        (line["step"], name, float(np.float32(value)))
        for line in read_metrics(tmp_path / "metrics.jsonl")
        for name, value in line.items()
        if name not in ("step", "seconds/clock")
    ]


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "rewa', b'{"step": 6}'])
def test_after_cut_back_the_record_is_an_unbroken_runs(tmp_path, torn):
    whole = unbroken(tmp_path / "whole", range(9))
    log = MetricsLog(tmp_path / "cut")
    write(log, range(4))
    position = log.position()
    write(log, range(4, 6))
    with (tmp_path / "cut" / "metrics.jsonl").open("ab") as file:
        file.write(torn)

    log = MetricsLog(tmp_path / "cut")
    log.cut_back(position)
    write(log, range(4, 9))
    assert lines(tmp_path / "cut") == lines(whole)
    assert len(lines(whole)) == 9
    timed = ("seconds/train",)
    assert [s for s in scalars(tmp_path / "cut") if s[1] not in timed] == [
        s for s in scalars(whole) if s[1] not in timed
    ]


def test_a_run_killed_before_its_first_checkpoint_begins_afresh(tmp_path):
    unbroken(tmp_path, range(3))
    log = MetricsLog(tmp_path)
    log.cut_back(0)
    write(log, [0])
    assert [line["step"] for line in lines(tmp_path)] == [0]
    assert {step for step, _, _ in scalars(tmp_path)} == {0}


def test_a_torn_last_line_is_dropped_and_the_rest_written_on(tmp_path):
    unbroken(tmp_path, range(2))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "rew')
    log = MetricsLog(tmp_path)
    assert log.position() == 2
    write(log, [2])
    assert [line["step"] for line in lines(tmp_path)] == [0, 1, 2]


def test_cutting_back_to_more_than_there_is_is_refused(tmp_path):
    log = MetricsLog(tmp_path)
    write(log, range(3))
    with pytest.raises(ValueError, match=r"fewer than the 4 lines .* checkpoint"):
        log.cut_back(4)
    assert len(lines(tmp_path)) == 3


KILLED = """
import os, signal, sys
from digen_jax.logging.metrics import MetricsLog
log = MetricsLog(sys.argv[1])
for step in range(3):
    log.write(step, {"a": step})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_is_written_survives_a_kill(tmp_path):
    run = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(run, cwd=PACKAGE.parent, check=False).returncode == -9
    assert [line["a"] for line in lines(tmp_path)] == [0, 1, 2]
    assert scalars(tmp_path) == [(step, "a", step) for step in range(3)]


@pytest.mark.parametrize("bad", [float("nan"), np.float32("inf")])
def test_values_that_json_has_no_word_for_stop_the_run_by_name(tmp_path, bad):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=r"metric kl is (nan|inf) at step 3"):
        log.write(3, {"reward": 1.0, "kl": bad})
    assert lines(tmp_path) == []


def test_a_metric_cannot_take_the_name_of_the_step(tmp_path):
    with pytest.raises(ValueError, match="metric 'step' needs another name"):
        MetricsLog(tmp_path).write(3, {"step": 1.0})


def test_a_malformed_line_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = b'{"step": 0, "seconds/clock": 0}\n'
    for garbage in (b"nonsense", b"\x93\xff", b"5", b'{"step": "x"}', b"[]"):
        path.write_bytes(line + garbage + b"\n" + line)
        with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 holds no metrics: bring"):
            read_metrics(path)


def test_timing_fields_are_left_out():
    line = {"step": 1, "seconds/clock": 2.0, "images_per_second": 3.0, "images": 4, "in/seconds": 5}
    assert without_timing(line) == {"step": 1, "images": 4, "in/seconds": 5}


def drawn(workdir: pathlib.Path, name: str) -> pathlib.Path:
    """A picture of a run."""
    path = workdir / "pictures" / name
    path.parent.mkdir(exist_ok=True)
    Image.new("RGB", (4, 3)).save(path)
    return path


def shown(workdir: pathlib.Path) -> list[tuple[int, str]]:
    """Step and name of everything in the event files that is not a number."""
    return [(step, tag) for step, tag, kind in tags(workdir) if kind != "simple_value"]


def test_pictures_and_config_are_events_that_a_resumed_run_keeps(tmp_path):
    log = MetricsLog(tmp_path, config={"seed": 3})
    for step in (1, 2):
        log.picture(drawn(tmp_path, f"step_{step:06d}.png"))
        log.write(step, {"a": step})
    log.picture(drawn(tmp_path, "timeline_000003.png"))  # step 3 is never written down
    log.picture(drawn(tmp_path, "before_after.png"), 3)
    expected = [(0, "config"), (1, "pictures/step"), (2, "pictures/step")]
    assert shown(tmp_path) == [*expected, (3, "pictures/timeline"), (3, "pictures/before_after")]
    for kept in (2, 1):
        log.cut_back(kept)
        log.write(kept + 1, {"a": 0})
        assert shown(tmp_path) == expected[: kept + 1]


def test_the_runs_bookkeeping_imports_neither_torch_nor_tensorflow():
    code = (
        "import json, sys\n"
        "from digen_jax.process import terminal\n"
        "from digen_jax.checkpoints import checkpointer\n"
        "from digen_jax.logging import event_file, images, metrics\n"
        "from digen_jax.config import fields\n"
        "print(json.dumps([m for m in ('torch', 'tensorflow', 'diffusers') if m in sys.modules]))"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=PACKAGE.parent, capture_output=True, env=os.environ, check=True)
    assert json.loads(done.stdout) == []
