import json
import pathlib
import struct
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.record_writer import RecordWriter, masked_crc32c
from tensorboardX.summary import text

from digen_jax.errors import ConfigError
from digen_jax.logging import metrics
from digen_jax.logging.metrics import MetricsLog, read_metrics, without_timing

PACKAGE = pathlib.Path(metrics.__file__).parents[1]


def values(step: int) -> dict:
    line = {"reward/mean": np.float32(step / 7), "größe": jnp.float32(step), "seconds/train": 1}
    return line | ({"evaluation/reward": step * 0.1} if step % 2 else {})


def write(log: MetricsLog, steps) -> None:
    for step in steps:
        log.write(step, values(step))


def event_file(workdir: pathlib.Path) -> pathlib.Path:
    """The only file with events."""
    (file,) = (one for one in (workdir / "tensorboard").iterdir() if one.stat().st_size)
    return file


def events(workdir: pathlib.Path) -> list[Event]:
    """All events, with verified checksums."""
    found, data = [], event_file(workdir).read_bytes()
    while data:
        (size,) = struct.unpack("<Q", data[:8])
        body, data = data[: size + 16], data[size + 16 :]
        assert struct.unpack("<I", body[8:12])[0] == masked_crc32c(body[:8])
        assert struct.unpack("<I", body[-4:])[0] == masked_crc32c(body[12:-4])
        found.append(Event.FromString(body[12:-4]))
    return found


def tags(workdir: pathlib.Path) -> list[tuple]:
    """(step, name, kind of value) of every summary."""
    found = events(workdir)
    return [(e.step, v.tag, v.WhichOneof("value")) for e in found for v in e.summary.value]


def scalars(workdir: pathlib.Path) -> list[tuple]:
    """(step, name, value) of every scalar."""
    found = [(e.step, v) for e in events(workdir) for v in e.summary.value]
    return [(step, v.tag, v.simple_value) for step, v in found if v.HasField("simple_value")]


def shown(workdir: pathlib.Path) -> list[tuple[int, str]]:
    """Step and name of every other value."""
    return [(step, tag) for step, tag, kind in tags(workdir) if kind != "simple_value"]


def lines(workdir: pathlib.Path) -> list[dict]:
    return [without_timing(line) for line in read_metrics(workdir / "metrics.jsonl")]


def draw(workdir: pathlib.Path, name: str, mode: str = "RGB") -> pathlib.Path:
    """Writes an image of a run."""
    path = workdir / "images" / name
    path.parent.mkdir(exist_ok=True)
    Image.new(mode, (4, 3), 7).save(path)
    return path


def test_lines_and_events_agree(tmp_path):
    write(MetricsLog(tmp_path), range(5))
    assert lines(tmp_path)[3] == {
        "step": 3,
        "reward/mean": float(np.float32(3 / 7)),
        "größe": 3.0,
        "evaluation/reward": 3 * 0.1,
    }
    records = read_metrics(tmp_path / "metrics.jsonl")
    assert scalars(tmp_path) == [
        (line["step"], name, float(np.float32(value)))
        for line in records
        for name, value in line.items()
        if name not in ("step", "seconds/clock")
    ]
    times = [event.wall_time for event in events(tmp_path) if event.summary.value]
    assert times == [line["seconds/clock"] for line in records]


def test_the_event_file_is_as_tensorboardx_writes_it(tmp_path):
    log = MetricsLog(tmp_path, config={"größe": 1})
    for mode, channels in (("RGB", 3), ("RGBA", 4), ("L", 1)):
        log.image(draw(tmp_path, f"{mode}.png", mode), channels)
    log.write(300, {"a": 0.1})
    found = events(tmp_path)
    assert found[0].file_version == "brain.Event:2"
    assert found[1].session_log.status == SessionLog.START and found[1].step == 0
    (config,), (expected,) = found[2].summary.value, text("config", "x").value
    assert config.tag == "config" and config.metadata == expected.metadata
    assert config.tensor.dtype == expected.tensor.dtype
    assert json.loads(config.tensor.string_val[0]) == {"größe": 1}
    for event, mode in zip(found[3:6], ("RGB", "RGBA", "L"), strict=True):
        (value,) = event.summary.value
        image, png = value.image, (tmp_path / "images" / f"{mode}.png").read_bytes()
        assert value.tag == f"images/{mode}" and image.encoded_image_string == png
        assert (image.height, image.width, image.colorspace) == (3, 4, event.step)
    writer = RecordWriter(str(tmp_path / "expected"))
    for event in found:
        writer.write(event.SerializeToString())
    writer.close()
    assert (tmp_path / "expected").read_bytes() == event_file(tmp_path).read_bytes()


@pytest.mark.parametrize("torn", [b"", b'{"step": 6, "rewa', b'{"step": 6}'])
def test_after_cut_back_the_metrics_equal_those_of_an_uninterrupted_run(tmp_path, torn):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    write(MetricsLog(whole), range(9))
    log = MetricsLog(cut)
    write(log, range(4))
    position = log.position()
    write(log, range(4, 6))
    with (cut / "metrics.jsonl").open("ab") as file:
        file.write(torn)

    log = MetricsLog(cut)
    assert log.position() == 6
    log.truncate(position)
    write(log, range(4, 9))
    assert lines(cut) == lines(whole) and len(lines(cut)) == 9
    assert scalars(cut) == scalars(whole)
    with pytest.raises(ConfigError):
        log.truncate(10)
    assert len(lines(cut)) == 9
    log.truncate(0)
    write(log, [0])
    assert [line["step"] for line in lines(cut)] == [0]
    assert {step for step, _, _ in scalars(cut)} == {0}
    # A running TensorBoard needs the file that it reads until it has found the next one.
    assert len(list((cut / "tensorboard").iterdir())) <= 2


KILLED = """
import os, signal, sys
from digen_jax.logging.metrics import MetricsLog
log = MetricsLog(sys.argv[1])
for step in range(3):
    log.write(step, {"a": step})
found = [name for name in ("torch", "tensorflow", "diffusers") if name in sys.modules]
assert not found, found
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_metrics_survive_a_kill_and_import_neither_torch_nor_tensorflow(tmp_path):
    run = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(run, cwd=PACKAGE.parent, check=False).returncode == -9
    assert [line["a"] for line in lines(tmp_path)] == [0, 1, 2]
    assert scalars(tmp_path) == [(step, "a", step) for step in range(3)]


@pytest.mark.parametrize("bad", [{"kl": float("nan")}, {"kl": np.float32("inf")}, {"step": 1.0}])
def test_invalid_values_and_names_are_rejected(tmp_path, bad):
    log = MetricsLog(tmp_path)
    with pytest.raises(ValueError, match=next(iter(bad))):
        log.write(3, {"reward": 1.0} | bad)
    assert lines(tmp_path) == []


@pytest.mark.parametrize("garbage", [b"nonsense", b"\x93\xff", b"5", b'{"step": "x"}', b"[]"])
def test_a_malformed_line_is_named(tmp_path, garbage):
    line = b'{"step": 0, "seconds/clock": 0}\n'
    (tmp_path / "metrics.jsonl").write_bytes(line + garbage + b"\n" + line)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 "):
        read_metrics(tmp_path / "metrics.jsonl")


def test_images_and_config_are_events_that_a_resumed_run_keeps(tmp_path):
    log = MetricsLog(tmp_path, config={"seed": 3})
    for step in (1, 2):
        log.image(draw(tmp_path, f"step_{step:06d}.png"))
        log.write(step, {"a": step})
    log.image(draw(tmp_path, "timeline_000003.png"))  # of a step that is never written
    log.image(draw(tmp_path, "before_after.png"), 3)
    expected = [(0, "config"), (1, "images/step"), (2, "images/step")]
    assert shown(tmp_path) == [*expected, (3, "images/timeline"), (3, "images/before_after")]
    for kept in (2, 1):
        log.truncate(kept)
        log.write(kept + 1, {"a": 0})
        assert shown(tmp_path) == expected[: kept + 1]
