import io
import zlib

import numpy as np
import pytest
from PIL import Image
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter, masked_crc32c
from tensorboardX.summary import text

from digen_jax.logging import event_file


@pytest.mark.parametrize("data", [b"", b"123456789", bytes(range(256)) * 3])
def test_record_is_byte_for_byte_what_tensorboardx_writes(tmp_path, data):
    writer = RecordWriter(str(tmp_path / "records"))
    writer.write(data)
    writer.close()
    assert event_file.record(data) == (tmp_path / "records").read_bytes()


def test_masked_crc_is_castagnoli_and_not_zlibs():
    # The check value of CRC-32C for "123456789" is 0xE3069283 (RFC 3720); the mask is undone here.
    rotated = (event_file.masked_crc(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated << 15 | rotated >> 17) & 0xFFFFFFFF == 0xE3069283
    assert event_file.masked_crc(b"abc") == masked_crc32c(b"abc") != zlib.crc32(b"abc")


@pytest.mark.parametrize("step", [0, 1, 127, 128, 300, 2**40])
def test_scalars_event_means_to_protobuf_what_was_put_in(step):
    scalars = {"reward/mean": 0.1, "größe": -3.5e7, "zero": 0.0, "x" * 300: 1e-30}
    event = Event.FromString(event_file.scalars_event(1795200000.25, step, scalars))
    assert (event.wall_time, event.step) == (1795200000.25, step)
    assert {v.tag: v.simple_value for v in event.summary.value} == {
        name: float(np.float32(value)) for name, value in scalars.items()
    }


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("RGBA", 4), ("L", 1)])
def test_picture_event_is_what_tensorboardx_makes_of_the_same_file(mode, channels):
    file = io.BytesIO()
    Image.new(mode, (5, 3), 7).save(file, "PNG")
    event = Event.FromString(event_file.picture_event(3.5, 20, "pictures/step", file.getvalue()))
    (found,) = event.summary.value
    size = dict(height=3, width=5, colorspace=channels, encoded_image_string=file.getvalue())
    assert (event.wall_time, event.step, found.tag) == (3.5, 20, "pictures/step")
    assert found.image == Summary.Image(**size)


def test_text_event_is_for_the_text_plugin():
    event = Event.FromString(event_file.text_event(1.0, 0, "config", "größe = 1"))
    (found,), (expected,) = event.summary.value, text("config", "größe = 1").value
    assert found.metadata == expected.metadata
    assert found.tensor.dtype == expected.tensor.dtype
    assert found.tensor.string_val == expected.tensor.string_val


def test_opening_events_are_the_version_and_a_session_start():
    version, session = map(Event.FromString, event_file.opening_events(5.0))
    assert version.file_version == "brain.Event:2"
    assert session.session_log.status == SessionLog.START
    assert version.step == session.step == 0


def test_replaced_files_hold_nothing_and_do_not_pile_up(tmp_path):
    event = event_file.scalars_event(1.0, 1, {"a": 1.0})
    paths = [event_file.replace_events(tmp_path, [event] * n) for n in range(4)]
    left = sorted(tmp_path.iterdir())
    assert left == paths[-2:]
    assert paths[-2].stat().st_size == 0 < paths[-1].stat().st_size
