import contextlib
import math
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.images import share
from digen_jax.process.shutdown import Interrupt, Stopped
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.dry_run import Watched
from digen_jax.rewards.errors import RewardFailed
from digen_jax.rewards.pool import RewardPool
from tests.pipelines import ROOT
from tests.scripts import ends

IMAGES = np.arange(3 * 4 * 4 * 3, dtype=np.uint8).reshape(3, 4, 4, 3)
PROMPTS = ["one", "two", "three"]
METADATA = [{"prompt": prompt} for prompt in PROMPTS]

REWARDS = """
import asyncio, concurrent.futures, multiprocessing, os, signal, subprocess, sys, threading, time
import numpy as np

def mean(images, prompts, metadata):
    assert prompts == [record["prompt"] for record in metadata]
    return images.mean((1, 2, 3), dtype=np.float64)

def scaled(images, prompts, metadata, scale=1.0):
    assert images.dtype == np.uint8 and images.ndim == 5
    return scale * images.mean((1, 2, 3, 4))

def where(images, prompts, metadata):
    return [os.getpid(), "jax" in sys.modules, os.environ["JAX_PLATFORMS"] == "cpu"]

def meets(images, prompts, metadata):
    open(os.path.join(prompts[0], str(os.getpid())), "w").close()
    deadline = time.monotonic() + 60
    while len(os.listdir(prompts[0])) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return np.full(len(images), len(os.listdir(prompts[0])))

def spoils(images, prompts, metadata):
    found = mean(images, prompts, metadata)
    images[:] = 0
    prompts.reverse()
    for record in metadata:
        record.clear()
    return found

def nan(images, prompts, metadata):
    return [0.0, float("nan"), 1.0]

def short(images, prompts, metadata):
    return [0.0]

def bug(images, prompts, metadata):
    raise KeyError("a bug of the user's")

def raises(images, prompts, metadata):
    raise eval(prompts[0])

def dies(images, prompts, metadata):
    os._exit(3)

def made(sign):
    return lambda images, prompts, metadata: [sign * os.getpid()] * len(images)

closure = made(-1)

def fails(images, prompts, metadata):
    # As often as a prompt says, in the way that another one says; the folder remembers the processes.
    folder, way, times = prompts
    open(os.path.join(folder, str(os.getpid())), "w").close()
    if len(os.listdir(folder)) > int(times):
        return images.mean((1, 2, 3), dtype=np.float64)
    if way == "hangs":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        os.rename(os.path.join(folder, str(os.getpid())), os.path.join(folder, str(child.pid)))
        time.sleep(600)
    os.kill(os.getpid(), getattr(signal, way))

def fails_at_first(images, prompts, metadata):
    asked.append(len(asked))
    if len(asked) <= int(prompts[2]):
        raise KeyError("a bug that passes")
    return images.mean((1, 2, 3), dtype=np.float64)

def hangs(images, prompts, metadata):
    release.wait(60)
    return [0.0] * len(images)

def handled(image):
    # Whether signals are handled as in any other child, and what the pool is to compute.
    plain = signal.default_int_handler, signal.SIG_DFL
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    return signal.set_wakeup_fd(-1) == -1 and handlers == plain, image.mean(dtype=np.float64)

def forks(images, prompts, metadata):
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as workers:  # whose exit terminates the children, and then waits for them
        found = workers.map(handled, list(images))
    idle = context.Process(target=time.sleep, args=(600,))
    idle.start()
    idle.terminate()
    idle.join(60)
    assert idle.exitcode == -signal.SIGTERM and all(plain for plain, _ in found)
    return [mean for _, mean in found]

def dies_with_a_child(images, prompts, metadata):
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,)).start()
    os._exit(3)

def sleeps(images, prompts, metadata):
    open(os.path.join(prompts[0], str(os.getpid())), "w").close()
    time.sleep(600)

def kilobytes(*processes):
    # In memory without files. A page that several processes share is divided by their number.
    files = [open(f"/proc/{process}/smaps_rollup") for process in processes]
    lines = [line.split() for file in files for line in file]
    return sum(int(line[1]) for line in lines if line[0] in ("Pss_Anon:", "Pss_Shmem:"))

def resident(images, prompts, metadata):
    images.max()
    return [kilobytes(os.getpid(), os.getppid())] * len(images)

asked, release = [], threading.Event()
"""
# Scores clips, in a process that a test kills.
DRIVER = """
import sys
import numpy as np
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.pool import RewardPool

module, asked = sys.argv[1:]
sys.path.insert(0, module)
pool = RewardPool(resolve([RewardSettings("pooled_rewards:sleeps")]), 1)
pool.score(np.zeros((1, 9, 256, 256, 3), np.uint8), [asked], [{}])
"""
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """The user's module, importable here and where sys.path is the same."""
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "pooled_rewards.py").write_text(REWARDS)
    sys.path.insert(0, str(folder))
    import pooled_rewards

    yield pooled_rewards
    sys.path.remove(str(folder))
    del sys.modules["pooled_rewards"]


@pytest.fixture
def pool(mine):
    opened = []

    def open_pool(reward, processes=1, **options):
        reward = getattr(mine, reward) if isinstance(reward, str) else reward
        opened.append(RewardPool(rewards.alone("mine:f", reward), processes, **options))
        return opened[-1]

    yield open_pool
    for one in opened:
        one.close()


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_reward_may_fork_and_terminate_children(pool, monkeypatch, processes):
    ended = []
    monkeypatch.setattr("digen_jax.process.shutdown.exit_now", ended.append)
    with Interrupt() as interrupt:
        limited = pool("forks", processes, limit=lambda expected: 120.0)
        scores = limited.score(IMAGES, PROMPTS, METADATA).columns[:, 0]
        assert not interrupt.requested and not ended
    np.testing.assert_allclose(scores, IMAGES.mean((1, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("processes", [0, 1])
def test_several_rewards_have_a_column_each(mine, processes):
    """Of clips, with a setting, and by functions that cannot be pickled."""
    scaled = RewardSettings("pooled_rewards:scaled", settings=dict(scale=3.0))
    names = ("pooled_rewards:scaled", "pooled_rewards:closure")
    scorer = RewardPool(named(scaled, names[1]), processes)
    clips = np.stack([IMAGES, IMAGES], axis=1)
    scores = scorer.score(clips, PROMPTS, METADATA).columns
    assert scores.dtype == np.float32 and scores.shape == (3, 2)
    np.testing.assert_allclose(scores[:, 0], 3 * IMAGES.mean((1, 2, 3)), rtol=1e-6)
    assert ((scores[:, 1] == -np.float32(os.getpid())) == (not processes)).all()
    metadata = [one | {"rewards": [names[i % 2]]} for i, one in enumerate(METADATA)]
    mixed = scorer.score(clips, PROMPTS, metadata).columns
    expected = np.where([[True, False], [False, True], [True, False]], scores, np.nan)
    np.testing.assert_array_equal(mixed, expected)
    scorer.close()


def named(*asked):
    return resolve(
        [one if isinstance(one, RewardSettings) else RewardSettings(one) for one in asked]
    )


@pytest.mark.parametrize("processes", [None, 0, 1])
def test_a_reward_may_write_into_its_arguments(mine, processes):
    """None: as evaluate.py scores, without a pool."""
    found = named("pooled_rewards:spoils", "pooled_rewards:mean")
    scorer = found if processes is None else RewardPool(found, processes)
    images, prompts, metadata = IMAGES.copy(), [*PROMPTS], [dict(one) for one in METADATA]
    means = IMAGES.mean((1, 2, 3), dtype=np.float64).astype(np.float32)
    for given in (images, images.view(Watched)):
        scores = scorer.score(given, prompts, metadata).columns
        np.testing.assert_array_equal(scores, np.stack([means, means], axis=1))
    np.testing.assert_array_equal(images, IMAGES)
    assert (prompts, metadata) == (PROMPTS, METADATA)
    if processes is not None:
        scorer.close()


@linux
def test_a_clip_of_two_rewards_is_in_memory_once(mine):
    again = RewardSettings("pooled_rewards:resident", label="again")
    scorer = RewardPool(named("pooled_rewards:resident", again), 1)

    def resident(clips):
        return scorer.score(clips, ["a"], [{"prompt": "a"}]).columns[0] * 1024

    process, files = scorer._scorers[0]._process.pid, shared_files()
    before = resident(np.zeros((1, 1, 8, 8, 3), np.uint8))
    clips = share(np.full((1, 81, 480, 832, 3), 7, np.uint8))
    for _ in range(2):
        added = resident(clips) - before
        assert (added > clips.nbytes - 2e6).all() and (added < 110e6).all()
    del clips
    deadline = time.monotonic() + 30
    while shared_files() > files or shared_files(process):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert mine.kilobytes(os.getpid(), process) * 1024 - before[1] < 10e6
    scorer.close()


@linux
def test_a_killed_driver_leaves_no_processes_and_no_files(mine, tmp_path):
    asked, files = tmp_path / "asked", tmp_path / "files"
    asked.mkdir()
    files.mkdir()
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, os.path.dirname(mine.__file__), str(asked)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(files)},
    )
    try:
        while not (started := list(asked.iterdir())):
            assert driver.poll() is None
            time.sleep(0.05)
    finally:
        driver.kill()
        driver.wait()
    assert ends(int(started[0].name))
    left = [path for folder in ("/dev/shm", files) for path in Path(folder).iterdir()]
    assert not [path for path in left if path.stat().st_size >= 9 * 256 * 256 * 3]


@pytest.mark.parametrize("processes", [0, 1])
def test_each_reward_has_its_own_time_limit(mine, monkeypatch, processes):
    monkeypatch.setattr("digen_jax.rewards.pool.mark_hung", lambda what: None)
    slow = RewardSettings("pooled_rewards:hangs", limit=0.5)
    scorer = RewardPool(named("pooled_rewards:mean", slow), processes, limit=lambda expected: 60.0)
    with pytest.raises(Stopped, match=r"'pooled_rewards:hangs' .* 0.5 .*config.rewards\[1\].limit"):
        scorer.score(IMAGES, PROMPTS, METADATA)
    mine.release.set()
    scorer.close()
    mine.release.clear()


def test_a_process_has_no_jax_and_only_those_of_a_server_have_the_accelerators(pool, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    for accelerator in (False, True):
        scorer = pool("where", accelerator=accelerator)
        process, has_jax, on_cpu = scorer.score(IMAGES, PROMPTS, METADATA).columns[:, 0]
        assert process != np.float32(os.getpid())
        assert (has_jax, on_cpu) == (0, not accelerator)


FAILING = [
    ("nan", "", ConfigError, "nan for image 1"),
    ("short", "", ConfigError, r"shape \(1,\) for 3 images"),
    ("bug", "", RewardFailed, r"KeyError: .a bug of the user's.\n  .*, in bug: raise"),
    ("raises", "asyncio.CancelledError()", RewardFailed, "CancelledError"),
    ("raises", "concurrent.futures.CancelledError()", RewardFailed, "CancelledError"),
    ("raises", "GeneratorExit()", RewardFailed, "GeneratorExit"),
    ("raises", "KeyboardInterrupt()", RewardFailed, "KeyboardInterrupt"),
    ("raises", "BaseException()", RewardFailed, "BaseException"),
]


@pytest.mark.parametrize("processes", [0, 1])
def test_any_error_of_a_reward_names_it_and_its_line(mine, processes):
    names = dict.fromkeys(f"pooled_rewards:{reward}" for reward, *_ in FAILING)
    scorer = RewardPool(named(*names, "pooled_rewards:dies"), processes)

    def score(reward, prompt):
        metadata = [one | {"rewards": [f"pooled_rewards:{reward}"]} for one in METADATA]
        scorer.score(IMAGES, [prompt, "", ""], metadata)

    for reward, prompt, error, message in FAILING:
        with pytest.raises(error, match=f"'pooled_rewards:{reward}' .*{message}"):
            score(reward, prompt)
    if not processes:  # where it may not end the process
        with pytest.raises(RewardFailed):
            score("dies", "")
    scorer.close()


@pytest.mark.parametrize("reward", ["dies", "dies_with_a_child"])
def test_a_process_that_dies_is_reported(pool, reward):
    scorer = pool(reward)
    for _ in range(2):
        with pytest.raises(Stopped, match=r"reward 'mine:f' died in its process \(exit code 3\)"):
            scorer.score(IMAGES, PROMPTS, METADATA)


def shared_files(process="self"):
    """The number of open files of shared images; macOS does not show it."""
    links = []
    for path in Path(f"/proc/{process}/fd").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.readlink(path))
    return sum("memfd:images" in link for link in links)


@pytest.mark.parametrize(("way", "retries"), [("hangs", 1), ("SIGKILL", 2)])
def test_a_process_that_hangs_or_dies_is_replaced(pool, tmp_path, capfd, way, retries):
    """A hung process is killed with all processes that it has started."""
    limits = iter([120.0, 3.0, 120.0] if way == "hangs" else [math.inf] * 9)
    before = shared_files()
    scorer = pool("fails", retries=retries, limit=lambda expected: next(limits))
    # Once before, so that the limit is not for the process to start.
    scorer.score(IMAGES, [str(tmp_path), "", "0"], METADATA)
    folder = tmp_path / "asked"
    folder.mkdir()
    prompts = [str(folder), way, str(retries)]
    scores = scorer.score(IMAGES, prompts, METADATA).columns[:, 0]
    np.testing.assert_allclose(scores, IMAGES.mean((1, 2, 3)), rtol=1e-6)
    log = capfd.readouterr().err
    reason = "3 seconds" if way == "hangs" else f"({way})"
    assert log.count(reason) == log.count("it is called again") == retries
    failed = sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime)[:retries]
    assert all(ends(int(path.name)) for path in failed)
    assert "Traceback" not in log
    deadline = time.monotonic() + 30
    while shared_files() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_limit_depends_on_the_measured_time(pool):
    seen = []
    scorer = pool("mean", limit=lambda expected: seen.append(expected) or 60.0)
    seconds = scorer.submit(IMAGES, PROMPTS, METADATA).result().seconds
    scorer.score(IMAGES[:2], PROMPTS[:2], METADATA[:2])
    assert seen == [None, pytest.approx(seconds / 3 * 2)]


@pytest.mark.parametrize("retries", [1, 2])
def test_a_reward_that_raises_is_called_again(pool, mine, capfd, retries):
    mine.asked.clear()
    scorer, prompts = pool("fails_at_first", 0, retries=retries), ["", "", "2"]
    if retries == 2:
        np.testing.assert_allclose(
            scorer.score(IMAGES, prompts, METADATA).columns[:, 0], IMAGES.mean((1, 2, 3)), rtol=1e-6
        )
    else:
        with pytest.raises(RewardFailed, match=r"(?s)a bug that passes.*2 times"):
            scorer.score(IMAGES, prompts, METADATA)
    assert len(mine.asked) == retries + 1
    assert capfd.readouterr().err.count("it is called again") == retries


def test_closing_kills_the_processes(pool, tmp_path):
    scorer = pool("fails")
    future = scorer.submit(IMAGES, [str(tmp_path), "hangs", "1"], METADATA)
    later = scorer.submit(IMAGES, PROMPTS, METADATA)
    while not (begun := list(tmp_path.iterdir())):
        time.sleep(0.05)
    begin = time.monotonic()
    scorer.close()
    assert time.monotonic() - begin < 200
    assert all(ends(int(path.name)) for path in begun)
    assert isinstance(future.exception(), CancelledError) and later.cancelled()


def test_two_processes_score_in_parallel(pool, tmp_path):
    scorer, where = pool("meets", 2), [str(tmp_path)] * 3
    asked = [scorer.submit(IMAGES, where, METADATA) for _ in range(2)]
    assert not asked[0].done()
    for future in asked:
        np.testing.assert_array_equal(future.result().scores.columns, 2)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_without_a_file_scores_in_a_thread(pool, capsys, processes):
    threads = []

    def reward(images, prompts, metadata):
        threads.append((threading.current_thread(), multiprocessing.parent_process()))
        return np.zeros(len(images))

    pool(reward, processes).score(IMAGES, PROMPTS, METADATA)
    ((thread, parent),) = threads
    assert thread is not threading.main_thread() and parent is None
    assert ("'mine:f'" in capsys.readouterr().err) == bool(processes)
