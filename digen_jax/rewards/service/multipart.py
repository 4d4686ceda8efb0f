"""Bodies of type multipart/form-data as lists of parts, both directions.

Source of the format: RFC 7578 and RFC 2046, section 5.1.
"""

import secrets
from collections.abc import Sequence
from typing import NamedTuple

from digen_jax.rewards.service.limits import Refused

TYPE = b"multipart/form-data"
HEADERS, HEADER = 8, 1024  # headers of a part, and bytes of each, at most


class Part(NamedTuple):
    """A named part; a file's name in the request is ignored."""

    name: str
    content: bytes | bytearray


def encode_parts(parts: Sequence[tuple[str, str, bytes]]) -> tuple[str, bytes]:
    """(content type, body) of parts (name, type, content)."""
    boundary = secrets.token_hex(16)  # 128 random bits are in no content
    pieces = []
    for name, kind, content in parts:
        file = f'; filename="{name}"' if kind != "application/json" else ""
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"{file}\r\nContent-Type: {kind}\r\n\r\n'
        pieces += [head.encode(), content, b"\r\n"]
    pieces.append(f"--{boundary}--\r\n".encode())
    return f"{TYPE.decode()}; boundary={boundary}", b"".join(pieces)


def check_type(content_type: str) -> bytes:
    """The boundary in a request's Content-Type.

    Raises:
      Refused: 415, the type is another one; 400, it has no boundary of 1 to 70 bytes.
    """
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(content_type)
    if kind != TYPE:
        raise Refused(415, "the request's type must be multipart/form-data")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 70:
        raise Refused(400, "the Content-Type must have a boundary of 1 to 70 bytes")
    return boundary


def decode_parts(content_type: str, body: bytes | bytearray, most: int) -> list[Part]:
    """The parts of a body, at most a number of them.

    Raises:
      Refused: it is no whole multipart body, a part has no name, or there are too many.
    """
    from python_multipart.exceptions import FormParserError
    from python_multipart.multipart import MultipartParser

    reader = _Reader(most)
    try:
        parser = MultipartParser(
            check_type(content_type),
            reader.callbacks(),
            max_header_count=HEADERS,
            max_header_size=HEADER,
        )
        parser.write(body)
        parser.finalize()
    except FormParserError as error:
        raise Refused(
            400, "the body is no multipart/form-data with the announced boundary"
        ) from error
    if not reader.ended:
        raise Refused(400, "the body ends before its last boundary")
    return reader.parts


class _Reader:
    """Collects what the parser finds."""

    def __init__(self, most: int):
        self.parts: list[Part] = []
        self.ended = False
        self._most = most
        self._header, self._value = bytearray(), bytearray()
        self._name: str | None = None
        self._content = bytearray()

    def callbacks(self) -> dict:
        names = "part_begin part_data part_end header_field header_value header_end headers_finished end"
        return {f"on_{name}": getattr(self, name) for name in names.split()}

    def part_begin(self) -> None:
        if len(self.parts) == self._most:
            raise Refused(413, f"the request has more than {self._most} parts")
        self._name, self._content = None, bytearray()

    def header_field(self, data: bytes | bytearray, start: int, end: int) -> None:
        self._header += data[start:end]

    def header_value(self, data: bytes | bytearray, start: int, end: int) -> None:
        self._value += data[start:end]

    def header_end(self) -> None:
        from python_multipart.multipart import parse_options_header

        header = bytes(self._header).lower()
        if header == b"content-disposition":
            kind, options = parse_options_header(bytes(self._value))
            if kind == b"form-data" and b"name" in options:
                self._name = options[b"name"].decode("utf-8", "replace")
        elif header == b"content-transfer-encoding" and self._value.lower() != b"binary":
            raise Refused(400, "a part has a Content-Transfer-Encoding: send its bytes as they are")
        self._header, self._value = bytearray(), bytearray()

    def headers_finished(self) -> None:
        if self._name is None:
            raise Refused(400, "a part has no name in a Content-Disposition: form-data")

    def part_data(self, data: bytes | bytearray, start: int, end: int) -> None:
        self._content += data[start:end]

    def part_end(self) -> None:
        self.parts.append(Part(self._name or "", self._content))

    def end(self) -> None:
        self.ended = True
