"""Scores of a mesh in another process: they come beside its other work, and fail as the leader's own would."""

import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest

from digen_jax.engine.divergence import DivergedError
from digen_jax.process.ending import Stopped
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.rewards import Scores
from digen_jax.rewards.exchanges import Exchange
from digen_jax.rewards.mistakes import RewardFailed, RewardMistake
from digen_jax.rewards.process import Late
from digen_jax.runtime.image_statistics import look
from digen_jax.runtime.judging import Judged
from digen_jax.runtime.link import LinkError, ScoresOf
from digen_jax.runtime.scores import Kept
from digen_jax.runtime.worker import Gone
from digen_jax.scheduling.commands import Fragment
from tests.remote.mesh_process import Pretends
from tests.remote.rooms import mesh, room  # noqa: F401

FRAGMENT = Fragment(0, 3)
PICTURES = np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3)
SENT = Judged(
    Scores(np.float32([[1], [2]]), {}),
    np.float32([1, 2]),
    0.25,
    (Exchange("judge", -2.5, -0.5, 2, None),),
    look(PICTURES),
    Kept(np.array([0]), PICTURES[:1]),
)


class Scoring(Pretends):
    """Scores when the test says what."""

    def __init__(self):
        super().__init__()
        self.asked: list[Future] = []

    def score(self, fragment):
        assert fragment == FRAGMENT
        if not self.asked:
            raise KeyError(fragment)
        return self.asked[-1]


class Fetches:
    """A link that fetches what it is given; None: it fails."""

    def __init__(self, *given):
        self.given, self.withdrawn = list(given), []

    def fetch(self, key, taker):
        assert (key, taker) == (ScoresOf("rollout 0", FRAGMENT), "trainer")
        found = self.given.pop(0)
        if found == "fails":
            raise LinkError(f"{key} has not come from rollout 0: it is late")
        return found

    def withdraw(self, key):
        self.withdrawn.append(key)


def sampler(room, link):  # noqa: F811
    return RemoteSampler(room.joined(), link)


def test_scores_come_beside_other_work_and_in_no_thread_of_the_stream(room):  # noqa: F811
    work, link = Scoring(), Fetches(SENT)
    work.asked.append(Future())
    with mesh(room, executes=work):
        found, threads = sampler(room, link), []
        scores = found.score(FRAGMENT)
        said = threading.Event()

        def note(_):
            threads.append(threading.current_thread().name)
            said.set()

        scores.add_done_callback(note)
        found.encode(7)
        assert work.steps == [7] and not scores.done()
        work.asked[0].set_result((1.0, 2.0))
        judged = scores.result(30)
        assert said.wait(30)
        assert threads == ["scores rollout 0"]
    assert link.withdrawn == [ScoresOf("rollout 0", FRAGMENT)]
    assert judged.looks.result(0) is SENT.looks and judged.kept is SENT.kept
    # The exchange lies half a second before the answer, on this clock.
    (exchange,) = judged.exchanges
    assert exchange.end - exchange.begin == pytest.approx(2.0)

    assert 0.5 <= time.perf_counter() - exchange.end < 20


@pytest.mark.parametrize(
    "error",
    [
        RewardFailed("reward 'mine' raised ValueError"),
        RewardMistake("reward 'mine' returned None: return one number an image"),
        Late("reward 'mine' took more than 2 seconds and was killed", "fix it, or raise the limit"),
        Stopped("it hangs"),
        DivergedError("an image that the trained model drew holds NaN"),
    ],
)
def test_what_fails_there_is_the_same_error_here_and_costs_no_mesh(room, error):  # noqa: F811
    work, link = Scoring(), Fetches(SENT)
    with mesh(room, executes=work):
        found = sampler(room, link)
        work.asked.append(Future())
        work.asked[-1].set_exception(error)
        here = found.score(FRAGMENT).exception(30)
        assert type(here) is type(error) and str(here) == str(error)
        assert getattr(here, "advice", "") == getattr(error, "advice", "")
        work.asked.append(Future())
        work.asked[-1].set_result((1.0, 2.0))
        assert found.score(FRAGMENT).result(30).values is SENT.values
    assert not link.given


def test_a_mesh_that_cannot_score_for_a_reason_of_its_own_is_lost(room):  # noqa: F811
    """Such as no memory for a reward's process: another mesh may have it."""
    with mesh(room, executes=Scoring()):
        assert isinstance(sampler(room, Fetches()).score(FRAGMENT).exception(30), Gone)
        name, why = room.lost()
        assert name == "rollout 0" and why.startswith("cannot score (rollout 0: KeyError(")
