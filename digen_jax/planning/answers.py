"""The compiler's answers about programs, kept in a folder, so that no program is compiled twice."""

import gzip
import hashlib
import json
import pathlib
import re
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from digen_jax import files


class Answer(NamedTuple):
    """A compiled program, or the memory that a program needs which does not fit.

    Attributes:
      text: of the program; "" means that it does not fit.
      peak: bytes of a device that it holds at most, arguments included.
      beyond: bytes of its temporaries and results on a device, without results that reuse an argument's memory.
    """

    text: str
    peak: int
    beyond: int


def answer_of(compiled: jax.stages.Compiled) -> Answer:
    """What is known of a program after its compilation."""
    found = compiled.memory_analysis()
    beyond = found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    peak = getattr(found, "peak_memory_in_bytes", 0) or found.argument_size_in_bytes + beyond
    return Answer(compiled.as_text(), peak, beyond)


class Answers:
    """Compiles programs for one kind of slice, each once.

    Args:
      target: everything that decides on the result in addition to the program: slice, versions.
      folder: for the answers. None means that they are not kept.
      note: called with what is compiled, and with the seconds that it took.
      memory: bytes of a device above which a program does not fit. None means that the compiler decides.
    """

    def __init__(
        self,
        target: str,
        folder: pathlib.Path | None,
        note: Callable[[str], None],
        memory: float | None = None,
    ):
        self.target, self.folder, self.note, self.memory = target, folder, note, memory
        self.compiled = self.found = 0  # programs so far

    def __call__(self, name: str, lowered: jax.stages.Lowered) -> Answer:
        """Returns the compiler's answer for a program."""
        answer = self._found(name, lowered)
        if self.memory is not None and answer.peak > self.memory:
            self.note(_does_not_fit(name, answer.peak))
            return answer._replace(text="")
        return answer

    def _found(self, name: str, lowered: jax.stages.Lowered) -> Answer:
        if self.folder is None:
            return self._compile(name, lowered)
        program = hashlib.sha256(f"{self.target}\0{lowered.as_text()}".encode())
        path = self.folder / f"{program.hexdigest()}.json.gz"
        if path.exists():
            self.found += 1
            self.note(f"{name}: compiled before")
            return Answer(**json.loads(gzip.decompress(path.read_bytes())))
        answer = self._compile(name, lowered)
        self.folder.mkdir(parents=True, exist_ok=True)
        files.replace(path, gzip.compress(json.dumps(answer._asdict()).encode(), mtime=0))
        return answer

    def _compile(self, name: str, lowered: jax.stages.Lowered) -> Answer:
        self.note(f"{name}: compiling for {self.target.partition(' ')[0]}")
        begin = time.monotonic()
        try:
            answer = answer_of(lowered.compile())
        except jax.errors.JaxRuntimeError as error:
            if (needed := _exceeded(str(error))) is None:
                raise
            answer = Answer("", needed, needed)
            self.note(_does_not_fit(name, needed))
        self.compiled += 1
        self.note(f"{name}: compiled in {time.monotonic() - begin:.1f} s")
        return answer


def _does_not_fit(name: str, needed: int) -> str:
    return f"{name}: does not fit, because it needs {needed / 1e9:.1f} GB of a device"


def _exceeded(error: str) -> int | None:
    """The bytes that a program needs, from the compiler's message that a device has less; None: it is another one."""
    found = re.search(
        r"RESOURCE_EXHAUSTED.*?([\d.]+)([KMGT])\)? (?:exceeds|of [\d.]+[KMGT])", error, re.S
    )
    if found is None:
        return None
    return round(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))
