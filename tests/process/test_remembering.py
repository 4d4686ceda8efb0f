import io
import sys

from digen_jax.process import terminal as module
from digen_jax.process.terminal import keep_log_tail, log_tail


def test_the_last_lines_are_kept_without_progress(monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with keep_log_tail():
        print("step 3 of 9: reward 0.5", file=sys.stderr)
        print("\r 50%|##", end="", file=sys.stderr)
        print("\r\x1b[Krollout 0 hangs", "and is given up", file=sys.stderr)
        print("\n x", end="", file=sys.stderr)
        assert sys.stderr.getvalue().count("\n") == 3 and not sys.stderr.isatty()
    assert [line for _, line in log_tail()] == ["rollout 0 hangs and is given up"]
    assert sys.stderr is stream
    assert stream.getvalue().startswith("step 3 of 9: reward 0.5\n\r 50%|##\r\x1b[Krollout 0")


def test_few_lines_are_kept_and_of_each_the_begin(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with keep_log_tail():
        for number in range(100):
            print(number, "x" * 10000, file=sys.stderr)
        sys.stderr.write("x" * 10**6)
        assert len(sys.stderr._begun) == module.WIDEST
    found = [line for _, line in log_tail()]
    assert len(found) == module.KEPT and found[-1] == f"99 {'x' * 497}"
    with keep_log_tail():
        assert log_tail() == []
