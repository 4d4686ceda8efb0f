"""Several processes of one command, with small scripts in place of a run."""

import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from digen_jax.config.command_line import cut_command
from digen_jax.errors import ConfigError
from digen_jax.process import cluster
from digen_jax.process.cluster import TOKEN, Cluster, WholeLines, check_command
from tests.pipelines import ROOT, environment
from tests.scripts import ends, is_alive

# What every script begins with; `me` is its number.
HEAD = """
import os, pathlib, re, signal, sys, time
given = dict(word[2:].split("=", 1) for word in sys.argv[1:] if word.startswith("--"))
me = int(given["process"])

def begun(name):
    "How often this process has been started before."
    path = pathlib.Path(f"{name}{me}")
    count = int(path.read_text()) if path.exists() else 0
    path.write_text(str(count + 1))
    return count

def until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a script in the present folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN, raising=False)

    def one(text: str) -> str:
        pathlib.Path("script.py").write_text(HEAD + textwrap.dedent(text))
        return "script.py"

    return one


@pytest.fixture
def hurried(monkeypatch):
    monkeypatch.setattr(cluster, "PAUSE", 0.05)
    monkeypatch.setattr(cluster, "PATIENCE", 0.3)


@pytest.mark.parametrize(
    ("read", "lines"),
    [
        ([b"one\ntw", b"o\nthree", b""], [b"one", b"two", b"three"]),
        ([b"\r 10%", b"\r 50%\r100%\nnext\n"], [b"100%", b"next"]),
        ([b"100%\r", b"\nnext\r\n"], [b"100%", b"next"]),
        ([b"\r100%\r", b"    \r", b"next\n", b""], [b"next"]),
        ([b"\r100%\r    \r", b""], []),
        ([b"\n\na\n"], [b"", b"", b"a"]),
    ],
)
def test_lines_are_whole_and_in_their_last_state(read, lines):
    found = WholeLines()
    assert [line for data in read for line in found.take(data)] == lines


def test_neither_a_bar_nor_a_line_without_an_end_fills_the_memory(monkeypatch):
    monkeypatch.setattr(cluster, "LONGEST", 100)
    found = WholeLines()
    for step in range(1000):
        assert found.take(b"\r%8d" % step) == [] and len(found._begun) < 10
    assert found.take(b"x" * 150) == [b"     999" + b"x" * 150] and found._begun == b""


def test_every_process_gets_its_place_and_a_common_secret(write, capfd):
    script = write("""
        print("at", given["coordinator"], me, "of", given["processes"], given["config"])
        print("knows", os.environ["DIGEN_JAX_TOKEN"], file=sys.stderr)
        sys.exit(3 if me == 0 else 0)
    """)
    assert Cluster([script, "--config=a b"], 3).run() == 3
    out, errors = capfd.readouterr()
    places = re.findall(r"^\[(\d)\] at (127\.0\.0\.1:\d+) \1 of 3 a b$", out, re.M)
    assert len(out.splitlines()) == 3 and sorted(number for number, _ in places) == ["0", "1", "2"]
    assert len({place for _, place in places}) == 1
    secrets = re.findall(r"^\[\d\] knows (\w{32})$", errors, re.M)
    assert len(secrets) == 3 and len(set(secrets)) == 1
    assert "cluster.py: process 0 has ended with code 3" in errors


def test_a_secret_that_is_set_is_kept(write, capfd, monkeypatch):
    monkeypatch.setenv(TOKEN, "mine")
    assert Cluster([write("print(os.environ['DIGEN_JAX_TOKEN'])")], 1).run() == 0
    assert capfd.readouterr() == ("[0] mine\n", "")


def test_the_others_have_some_seconds_after_the_first_one(write, capfd, hurried):
    script = write("""
        if me == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            pathlib.Path("there").touch()
            time.sleep(300)
        until("there")
    """)
    begin = time.monotonic()
    assert Cluster([script], 2).run() == 0 and 0.3 < time.monotonic() - begin < 200
    assert capfd.readouterr().err.splitlines() == [
        "cluster.py: process 0 has ended with code 0: the others have 0.3 seconds to end",
        "cluster.py: 1 process still running after 0.3 seconds: killed",
        "cluster.py: process 1 has ended by SIGKILL",
    ]


def test_a_signal_is_passed_on_once_and_the_second_kills(write, capfd):
    script = write("""
        def noted(number, frame):
            print("got", number)
            pathlib.Path(f"got{me}").touch()
        signal.signal(signal.SIGTERM, noted)
        pathlib.Path(f"ready{me}").touch()
        if me == 0:
            until("ready1")
            os.kill(os.getppid(), signal.SIGTERM)
            until("got0")
            until("got1")
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(300)
    """)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    # Restarts do not follow what was asked for.
    assert Cluster([script], 2, restarts=3).run() == 128 + signal.SIGKILL
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    out, errors = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[0] got 15", "[1] got 15"]
    first, second, *ends = errors.splitlines()
    assert first == "cluster.py: SIGTERM is passed on to 2 processes; once more kills"
    assert second == "cluster.py: 2 processes killed"
    assert {line.partition(" by ")[2].partition(":")[0] for line in ends} == {"SIGKILL"}


def test_failed_processes_and_jobs_are_started_again(write, capfd, hurried):
    """A process once, until its code is 2; then the whole job, whose first process is killed at first."""
    script = write("""
        count = begun("count")
        if me == 1:
            if count < 2:
                os.kill(os.getpid(), signal.SIGKILL) if count == 0 else sys.exit(2)
            print("joined", given["coordinator"])
            sys.exit()
        if count == 0:
            until("count1")
            while pathlib.Path("count1").read_text() != "2":
                time.sleep(0.01)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit(75 if count == 1 else 0)
    """)
    assert Cluster([script], 2, restarts=2).run() == 0
    out, errors = capfd.readouterr()
    said = [line.removeprefix("cluster.py: ") for line in errors.splitlines()]
    assert said[:4] == [
        "process 1 has ended by SIGKILL and is started again (1 of 2)",
        "process 1 has ended with code 2",
        "process 0 has ended by SIGKILL",
        "the whole job is started again (1 of 2)",
    ]
    assert "the whole job is started again (2 of 2)" in said[4:]
    assert pathlib.Path("count0").read_text() == "3" and out.count("[1] joined") == 2


def test_without_restarts_the_others_go_on(write, capfd):
    script = write("""
        if me == 1:
            pathlib.Path("pid").write_text(str(os.getpid()))
            os.rename("pid", "who")
            sys.exit(9)
        until("who")
        while pathlib.Path("/proc", pathlib.Path("who").read_text()).exists():
            time.sleep(0.01)
        time.sleep(0.5)
    """)
    assert Cluster([script], 2).run() == 0
    assert capfd.readouterr().err == "cluster.py: process 1 has ended with code 9\n"


def test_what_cannot_be_started_is_one_sentence(tmp_path):
    (tmp_path / "a.py").touch()
    there = str(tmp_path / "a.py")
    for command, sentence in {
        (): "there is no command: write it after --",
        ("none.py",): "'none.py', which is no Python file",
        (str(tmp_path),): "which is no Python file",
        (there, "--process=3"): "each process gets its own --process: leave it out",
        (there, "-coordinator", "x"): "each process gets its own --coordinator: leave it out",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            check_command(command)
    check_command([there, "--processes_of_rewards=3", "process"])


def test_the_command_is_cut_from_the_command_line():
    for given, own, command in [
        (["-n", "2", "--", "a.py", "--x", "--", "y"], ["-n", "2"], ["a.py", "--x", "--", "y"]),
        (["-n", "2", "a.py", "--x"], ["-n", "2"], ["a.py", "--x"]),
        (["-n", "2"], ["-n", "2"], []),
    ]:
        argv = ["cluster.py", *given]
        assert cut_command(argv) == command and argv == ["cluster.py", *own]


def begin(*words, **variables) -> subprocess.Popen:
    """launch/cluster.py in the present folder, what it prints read as text."""
    return subprocess.Popen(
        [sys.executable, ROOT / "launch" / "cluster.py", *words],
        env=environment(1, PYTHONPATH=str(ROOT), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_many_lines_arrive_whole_and_in_order(write):
    """Also parts of lines, and of letters, which are printed at different times."""
    write("""
        for line in range(200):
            for part in (b"%d: " % line, "\u00e4".encode()[:1], "\u00e4".encode()[1:], b"x" * 9000 + b"\\n"):
                os.write(1, part)
                os.write(2, b"\\r%d%%" % line)
        os.write(2, b"\\n")
    """)
    job = begin("-n", "4", "--", "script.py")
    out, errors = job.communicate(timeout=60)
    assert job.returncode == 0
    found = {}
    for line in out.splitlines():
        number, text = re.fullmatch(r"\[(\d)\] (.*)", line).groups()
        found.setdefault(number, []).append(text)
    assert found == {str(n): [f"{i}: \u00e4{'x' * 9000}" for i in range(200)] for n in range(4)}
    shown = [line for line in errors.splitlines() if not line.startswith("cluster.py")]
    assert sorted(shown) == [f"[{n}] 199%" for n in range(4)]


FAMILY = """
    from digen_jax.rewards import alone
    from digen_jax.rewards.pool import RewardPool
    import judge
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pool = RewardPool(alone("judge:own", judge.own), 1)
    (found,) = pool.score([[]], ["x"], [{}]).columns[0]
    print("ready", os.getpid(), int(found), flush=True)
    time.sleep(300)
"""


def family(job: subprocess.Popen, count: int) -> list[int]:
    """The numbers of all processes of `count` members that have said that they are ready."""
    lines = [job.stdout.readline() for _ in range(count)]
    return [int(one) for line in lines for one in line.partition("ready")[2].split()]


def test_a_job_works_on_without_a_reader_of_its_output(write):
    write("""
        print("ready", flush=True)
        until("closed")
        print("x" * 10**6, flush=True)
        begun("done")
    """)
    job = begin("-n", "2", "--", "script.py")
    assert "ready" in job.stdout.readline()
    job.stdout.close()
    job.stderr.close()
    pathlib.Path("closed").touch()
    assert job.wait(60) == 0
    assert all(pathlib.Path(f"done{number}").exists() for number in range(2))


@pytest.mark.slow
@pytest.mark.parametrize("how", ["-9", "twice"])
def test_nothing_is_left_behind(write, tmp_path, how):
    """Of processes that ignore SIGTERM, and of the rewards' processes that they have started."""
    (tmp_path / "judge.py").write_text(
        "import os\n\n\ndef own(*_):\n    return [float(os.getpid())]\n"
    )
    write(FAMILY)
    job = begin("-n", "2", "--restarts=3", "--", "script.py")
    processes = family(job, 2)
    assert len(set(processes)) == 4 and all(map(is_alive, processes))
    if how == "-9":
        job.kill()
    else:
        job.send_signal(signal.SIGTERM)
        assert "passed on to 2 processes" in job.stderr.readline()
        time.sleep(0.5)
        assert job.poll() is None and all(map(is_alive, processes))
        job.send_signal(signal.SIGTERM)
    signals = {"-9": -signal.SIGKILL, "twice": 128 + signal.SIGKILL}
    assert job.wait(30) == signals[how]
    assert all(map(ends, processes))
