"""TensorBoard's event files with scalars, pictures and a text, without TensorFlow or torch.

A file is a sequence of TFRecords (length, masked CRC-32C of the length, message, masked CRC-32C of the
message), each with one `Event` protocol buffer. tensorboardX writes the same but imports torch where it
is installed, and a training process must not import torch.
"""

import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

# Field numbers of event.proto and summary.proto, and protocol buffer wire types.
WALL_TIME, STEP, FILE_VERSION, SUMMARY, SESSION_LOG = 1, 2, 3, 5, 7
VALUE, TAG, SIMPLE_VALUE, IMAGE, TENSOR, METADATA, STATUS, START = 1, 1, 2, 4, 8, 9, 1, 1
IMAGE_HEIGHT, IMAGE_WIDTH, IMAGE_COLORS, IMAGE_DATA = 1, 2, 3, 4
TENSOR_TYPE, TENSOR_STRING, STRING_TYPE, PLUGIN, PLUGIN_NAME = 1, 8, 7, 1, 1
PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}  # by a PNG's colour type
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def _crc_table() -> list[int]:
    """CRC-32C (Castagnoli, reflected polynomial 0x82F63B78) of every byte."""
    table = list(range(256))
    for _ in range(8):
        table = [(c >> 1) ^ (0x82F63B78 if c & 1 else 0) for c in table]
    return table


CRC = _crc_table()


def masked_crc(data: bytes) -> int:
    """CRC-32C of the data, rotated and shifted as a TFRecord stores it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def record(message: bytes) -> bytes:
    """One TFRecord around a message."""
    length = struct.pack("<Q", len(message))
    crcs = [struct.pack("<I", masked_crc(part)) for part in (length, message)]
    return length + crcs[0] + message + crcs[1]


def scalars_event(wall_time: float, step: int, scalars: Mapping[str, float]) -> bytes:
    """An `Event` with one float32 scalar a name; wall_time in seconds since 1970."""
    values = [
        _bytes(VALUE, _bytes(TAG, name.encode()) + _number(SIMPLE_VALUE, FIXED32, "<f", value))
        for name, value in scalars.items()
    ]
    return _moment(wall_time, step) + _bytes(SUMMARY, b"".join(values))


def picture_event(wall_time: float, step: int, name: str, png: bytes) -> bytes:
    """An `Event` with a picture, given as the bytes of a PNG file."""
    # The header is a PNG's first chunk.
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    sizes = {IMAGE_HEIGHT: height, IMAGE_WIDTH: width, IMAGE_COLORS: PNG_CHANNELS[kind]}
    image = b"".join(_key(field, VARINT) + _varint(number) for field, number in sizes.items())
    value = _bytes(TAG, name.encode()) + _bytes(IMAGE, image + _bytes(IMAGE_DATA, png))
    return _moment(wall_time, step) + _bytes(SUMMARY, _bytes(VALUE, value))


def text_event(wall_time: float, step: int, name: str, markdown: str) -> bytes:
    """An `Event` with a text, which TensorBoard's text plugin shows."""
    kind = _key(TENSOR_TYPE, VARINT) + _varint(STRING_TYPE)
    tensor = _bytes(TENSOR, kind + _bytes(TENSOR_STRING, markdown.encode()))
    plugin = _bytes(METADATA, _bytes(PLUGIN, _bytes(PLUGIN_NAME, b"text")))
    value = _bytes(TAG, name.encode()) + plugin + tensor
    return _moment(wall_time, step) + _bytes(SUMMARY, _bytes(VALUE, value))


def opening_events(wall_time: float) -> list[bytes]:
    """The two events at the beginning of every file: its version, and a session that starts at step 0.

    The second makes a running TensorBoard drop what it has read of a file that is now replaced.
    """
    session = _key(STATUS, VARINT) + _varint(START)
    return [
        _moment(wall_time, 0) + _bytes(FILE_VERSION, b"brain.Event:2"),
        _moment(wall_time, 0) + _bytes(SESSION_LOG, session),
    ]


def _moment(wall_time: float, step: int) -> bytes:
    return _number(WALL_TIME, FIXED64, "<d", wall_time) + _key(STEP, VARINT) + _varint(step)


def _number(field: int, wire: int, layout: str, value: float) -> bytes:
    return _key(field, wire) + struct.pack(layout, value)


def _bytes(field: int, payload: bytes) -> bytes:
    return _key(field, BYTES) + _varint(len(payload)) + payload


def _key(field: int, wire: int) -> bytes:
    return _varint(field << 3 | wire)


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*digits, number])


def replace_events(folder: Path, events: list[bytes]) -> Path:
    """Writes one event file with these events, which replaces all others in the folder.

    Args:
      folder: where TensorBoard looks; created if it does not exist.
      events: encoded `Event`s without the opening ones.

    Returns:
      The new file, to which further records may be appended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = time.time()
    path = folder / f"events.out.tfevents.{now:017.6f}.{socket.gethostname()}"
    unfinished = folder / "unfinished"
    unfinished.write_bytes(b"".join(map(record, opening_events(now) + events)))
    os.replace(unfinished, path)
    for old in set(folder.glob("events.out.tfevents.*")) - {path}:
        # A running TensorBoard continues from a file that is empty, but not from one that is gone.
        if old.stat().st_size:
            os.truncate(old, 0)
        else:
            old.unlink()
    return path
