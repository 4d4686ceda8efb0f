import time

import jax
import jax.numpy as jnp

from digen_jax.runtime.executors.clock import _length, measured
from digen_jax.runtime.executors.log import CommandLog, read_log
from digen_jax.runtime.scheduler.commands import DropVersion, Fragment, Generate, Score, Switch

COMMANDS = [
    Generate(1, "rollout 0", Fragment(2, 3), 1),
    Score(2, Fragment(2, 3, evaluation=True)),
    Switch(3, "trainer", "sample"),
    DropVersion(4, 1),
]


def test_compilation_does_not_count():
    def program(x):
        for i in range(200):  # takes long to trace and to compile, and no time to run
            x = jnp.sin(x * i) @ x
        return x

    x = jnp.ones((2, 2))
    begin = time.perf_counter()
    with measured() as watch:
        jax.block_until_ready(jax.jit(program)(x))
    assert 0 < watch.seconds < 0.3 * (time.perf_counter() - begin)
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
