import multiprocessing
import os
import sys
import threading

import numpy as np
import pytest

from digen_jax import rewards
from digen_jax.rewards.pool import RewardPool
from digen_jax.settings import ConfigError

IMAGES = np.arange(3 * 4 * 4 * 3, dtype=np.float32).reshape(3, 4, 4, 3) / 144
PROMPTS = ["one", "two", "three"]
METADATA = [{"prompt": prompt} for prompt in PROMPTS]

REWARDS = """
import os, sys, time
import numpy as np

def mean(images, prompts, metadata):
    assert prompts == [record["prompt"] for record in metadata]
    return images.mean((1, 2, 3), dtype=np.float64)

def darkness(images, prompts, metadata):
    return 1 - images.mean((1, 2, 3), dtype=np.float64)

def where(images, prompts, metadata):
    return [os.getpid(), "jax" in sys.modules, os.environ["JAX_PLATFORMS"] == "cpu"]

def meets(images, prompts, metadata):
    open(os.path.join(prompts[0], str(os.getpid())), "w").close()
    deadline = time.monotonic() + 60
    while len(os.listdir(prompts[0])) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return np.full(len(images), len(os.listdir(prompts[0])))

def nan(images, prompts, metadata):
    return [0.0, float("nan"), 1.0]

def short(images, prompts, metadata):
    return [0.0]

def bug(images, prompts, metadata):
    raise KeyError("a bug of the user's")

def dies(images, prompts, metadata):
    os._exit(3)
"""


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

    def open_pool(reward, processes=1):
        reward = getattr(mine, reward) if isinstance(reward, str) else reward
        opened.append(RewardPool(reward, "mine:f", processes))
        return opened[-1]

    yield open_pool
    for one in opened:
        one.close()


@pytest.mark.parametrize("processes", [0, 1])
def test_scores_are_the_rewards(pool, processes):
    scores = pool("mean", processes).score(IMAGES, PROMPTS, METADATA)
    assert scores.dtype == np.float32
    np.testing.assert_allclose(scores, [IMAGES[i].mean() for i in range(3)], rtol=1e-6)


@pytest.mark.parametrize("processes", [0, 1])
def test_several_rewards_have_a_column_each_and_their_own_names(mine, processes):
    names = "pooled_rewards:mean, pooled_rewards:darkness"
    scorer = RewardPool(rewards.resolve(names), names, processes)
    scores = scorer.score(IMAGES, PROMPTS, METADATA)
    assert scores.dtype == np.float32 and scores.shape == (3, 2)
    means = [IMAGES[i].mean() for i in range(3)]
    np.testing.assert_allclose(scores, np.stack([means, 1 - np.array(means)], axis=1), rtol=1e-6)
    scorer.close()
    for wrong in ("nan", "short"):
        names = f"pooled_rewards:mean,pooled_rewards:{wrong}"
        scorer = RewardPool(rewards.resolve(names), names, processes)
        with pytest.raises(ConfigError, match=f"reward 'pooled_rewards:{wrong}' returned"):
            scorer.score(IMAGES, PROMPTS, METADATA)
        scorer.close()


def test_a_process_is_another_one_without_jax_and_without_an_accelerator(pool):
    process, has_jax, on_cpu = pool("where").score(IMAGES, PROMPTS, METADATA)
    assert process != np.float32(os.getpid())
    assert (has_jax, on_cpu) == (0, 1)


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    ("reward", "error", "sentence"),
    [
        ("nan", ConfigError, r"'mine:f' returned nan for image 1 \('two'\)"),
        ("short", ConfigError, r"'mine:f' returned shape \(1,\) for 3 images"),
        ("bug", KeyError, "a bug of the user's"),
    ],
)
def test_a_wrong_reward_is_named_and_the_users_errors_pass(
    pool, processes, reward, error, sentence
):
    with pytest.raises(error, match=sentence):
        pool(reward, processes).score(IMAGES, PROMPTS, METADATA)


def test_a_process_that_dies_is_said_to_have_died(pool):
    scorer = pool("dies")
    for _ in range(2):
        with pytest.raises(ConfigError, match="the process of reward 'mine:f' has died"):
            scorer.score(IMAGES, PROMPTS, METADATA)


def test_asking_does_not_wait_and_two_processes_score_side_by_side(pool, tmp_path):
    scorer, where = pool("meets", 2), [str(tmp_path)] * 3
    asked = [scorer.submit(IMAGES, where, METADATA) for _ in range(2)]
    assert not asked[0].done()
    for future in asked:
        np.testing.assert_array_equal(future.result().scores, 2)


@pytest.mark.parametrize("processes", [0, 1])
def test_a_function_that_no_file_holds_scores_in_a_thread_and_says_so(pool, capsys, processes):
    threads = []

    def reward(images, prompts, metadata):
        threads.append((threading.current_thread(), multiprocessing.parent_process()))
        return np.zeros(len(images))

    pool(reward, processes).score(IMAGES, PROMPTS, METADATA)
    ((thread, parent),) = threads
    assert thread is not threading.main_thread() and parent is None
    assert ("'mine:f' is in no file" in capsys.readouterr().err) == bool(processes)
