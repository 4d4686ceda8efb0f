import contextlib
import json
import resource
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from digen_jax.logging.command_log import CommandLog, read_log, since
from digen_jax.runtime.clock import _length, limited, measured, paused
from digen_jax.scheduling.commands import (
    Chunk,
    DropVersion,
    Encode,
    Generate,
    Score,
    SyncWeights,
    Train,
    Update,
    WeightsVersion,
)

LONG = 120.0  # seconds: until a test ends
COMMANDS = [
    Generate(1, "rollout 0", Chunk(2, 3), WeightsVersion(1)),
    Score(2, Chunk(2, 3, evaluation=True), "rollout 0"),
    Train(3, "trainer", Chunk(2, 3), version=1, update=0, first=2, count=4),
    DropVersion(4, WeightsVersion(1)),
]


def test_compilation_does_not_count():
    def program(x):
        for i in range(400):  # takes long to trace and to compile, and no time to run
            x = jnp.sin(x * i) @ x
        return x

    x = jnp.ones((2, 2))
    begin = time.perf_counter()
    with measured() as watch:
        jax.block_until_ready(jax.jit(program)(x))
    assert 0 < watch.seconds < 0.5 * (time.perf_counter() - begin)
    with measured() as watch:
        time.sleep(0.2)
    assert watch.seconds >= 0.2


def test_nested_spans_count_once():
    assert _length([(2.0, 3.0), (1.0, 4.0), (6.0, 7.0), (3.5, 5.0)], 0.5) == 5.0
    assert _length([(0.0, 2.0)], 1.0) == 1.0


def test_a_log_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "commands.jsonl"
    log = CommandLog(path, 0)
    log.extend(COMMANDS[:1])
    log.extend(COMMANDS[1:])
    assert read_log(path) == (0, COMMANDS)
    CommandLog(path, 5).extend(COMMANDS[:3])
    assert read_log(path) == (5, COMMANDS[:3])
    path.write_text(path.read_text()[:-4])  # killed while writing
    assert read_log(path) == (5, COMMANDS[:2])
    CommandLog(path, 7).extend(COMMANDS[:1])
    assert read_log(path) == (7, COMMANDS[:1])
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 5 + 3 + 2
    path.write_text(path.read_text() + "nonsense\n")
    with pytest.raises(
        ValueError, match=r"commands\.jsonl, line 11 is not a command: delete the file"
    ):
        read_log(path)


def test_a_log_is_cut_back_to_the_process_that_a_checkpoint_is_of(tmp_path):
    path = tmp_path / "commands.jsonl"
    ahead = [SyncWeights(7, "rollout 0", WeightsVersion(1)), Encode(8, "rollout 0", 2), COMMANDS[0]]
    end, later = (
        [Update(9, "trainer", 1, 0, ("trainer",))],
        [DropVersion(10, WeightsVersion(0)), Score(11, Chunk(2, 3), "rollout 0")],
    )
    CommandLog(path, 0).extend([Encode(5, "rollout 0", 1), *ahead, *end, *later])
    log = CommandLog(path, 1)  # of a run that was killed at once
    log = CommandLog(path, 2)
    log.extend(COMMANDS)
    text = path.read_text()
    log.truncate(1)
    assert path.read_text() == "".join(text.splitlines(keepends=True)[8:])
    log.truncate(2)
    assert read_log(path) == (2, COMMANDS) and len(path.read_text().splitlines()) == 5
    assert since([Encode(5, "rollout 0", 1), *ahead, *end, *later], 2) == [*ahead, *later]
    log.extend(COMMANDS[:1])
    assert read_log(path) == (2, COMMANDS + COMMANDS[:1])
    assert [file.name for file in tmp_path.iterdir()] == ["commands.jsonl"]


@contextlib.contextmanager
def files_of_at_most(size):
    """A limit on the size of files, which fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_log_has_no_space_for_is_written_once_there_is_some(tmp_path):
    path = tmp_path / "commands.jsonl"
    log = CommandLog(path, 0)
    log.extend(COMMANDS[:1])
    text = path.read_text()
    with files_of_at_most(len(text) + 10):
        log.extend(COMMANDS[1:])
        assert path.read_text() == text
        with pytest.raises(OSError, match="File too large"):
            log.flush()
        assert path.read_text() == text
    log.flush()
    assert read_log(path) == (0, COMMANDS)


# ----------------------------------------------------------------------------------- the watch


def late_in(deadline, seconds, block):
    """Whether a block of this duration was late."""
    late = []
    with limited(deadline, None, late.append):
        block(seconds)
    return late


def test_only_work_counts_until_a_deadline():
    found, late = [], threading.Event()
    with limited(0.4, None, lambda seconds: (found.append(seconds), late.set())):
        assert late.wait(LONG)
        time.sleep(0.1)  # for some checks more
    assert found == [0.4]
    assert late_in(0.4, 0.01, time.sleep) == []

    def wait(seconds):
        with paused():
            time.sleep(seconds)

    assert late_in(0.4, 1.0, wait) == []
    assert late_in(0, 0.1, time.sleep) == []


def test_a_compiler_at_work_is_not_late():
    """Between the event that ends lowering and the one that ends compilation."""

    def compiles(seconds):
        tell = jax.monitoring.record_event_duration_secs
        tell("/jax/core/compile/jaxpr_to_mlir_module_duration", 0.0)
        time.sleep(seconds)
        tell("/jax/core/compile/backend_compile_duration", seconds)

    assert late_in(0.4, 1.0, compiles) == []
    with measured() as stopwatch:
        compiles(1.0)
        time.sleep(0.1)
    assert 0.1 <= stopwatch.seconds < 0.9  # 1.1 with the compilation


def test_a_process_that_was_stopped_for_a_while_is_not_late(monkeypatch):
    """Its clock continues, but the time between two checks counts at most twice its nominal length."""
    seen, real, often = [], time.perf_counter, threading.Event()

    def clock():
        """As if the process were suspended before each call."""
        seen.append(1)
        if len(seen) > 6:  # a block's start, and three checks
            often.set()
        return real() + 20 * len(seen)

    monkeypatch.setattr("digen_jax.runtime.clock.time.perf_counter", clock)
    assert late_in(10.0, LONG, often.wait) == [] and often.is_set()
