import datetime
import random
import threading
import time

import httpx
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import take_exchanges
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import retry_after
from digen_jax.rewards.service.client import RemoteReward, Served, _remote
from digen_jax.rewards.service.wire import Limits, decode_request, encode_answer, server_packages
from tests.rewards.service.helpers import means, random_images

A, B = "http://a:1", "http://b:1"
FAST = dict(blocked=(0.02, 0.1), pauses=(0.001, 0.01))


class FakeServers:
    """Servers that follow a script, one entry per request, and then answer correctly."""

    def __init__(self, script=()):
        self.script, self.requests = list(script), []
        self.lock = threading.Lock()

    def __call__(self, request):
        asked = decode_request(request.headers["content-type"], request.read(), Limits())
        with self.lock:
            self.requests.append((f"http://{request.url.netloc.decode()}", asked))
            now = self.script.pop(0) if self.script else None
        if callable(now):
            now = now(request)
        if now is not None:
            return now
        return httpx.Response(200, content=encode_answer({"mean": means(asked.images)}, 0.1))


def remote(fake, servers=(A,), **options):
    options = FAST | {"names": ["mean"], "transport": httpx.MockTransport(fake)} | options
    return RemoteReward(servers, **options)


def score(reward, images=None, prompts=None):
    images = random_images(3) if images is None else images
    prompts = prompts or [f"prompt {i}" for i in range(len(images))]
    return reward(images, prompts, [{"prompt": prompt} for prompt in prompts])


def raises(error):
    def fail(request):
        raise error

    return fail


def answer(text):
    return httpx.Response(200, content=text)


NAN = b'{"scores": {"mean": [1, NaN, 2]}, "seconds": 1}'
FAILURES = {
    "408": httpx.Response(408, json={"error": "slow"}),
    "429": httpx.Response(429),
    "500": httpx.Response(500, json={"error": "the reward raised"}),
    "503": httpx.Response(503, json={"error": "full"}, headers={"Retry-After": "0"}),
    "504": httpx.Response(504, content=b"<html>"),
    "no connection": raises(httpx.ConnectError("refused")),
    "end": raises(httpx.RemoteProtocolError("closed")),
    "reset": raises(httpx.ReadError("reset")),
    "time-out": raises(httpx.ReadTimeout("late")),
    "no connection free": raises(httpx.PoolTimeout("late")),
    "malformed": answer(b"{"),
    "NaN": answer(NAN),
    "short": answer(b'{"scores": {"mean": [1, 2]}, "seconds": 1}'),
    "another reward's": answer(b'{"scores": {"other": [1, 2, 3]}, "seconds": 1}'),
    "endless": answer(b" " * 100_000),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failure_is_retried_with_the_same_id_and_content_until_there_are_too_many(what):
    fake, images = FakeServers([FAILURES[what]] * 2), random_images(3)
    np.testing.assert_array_equal(score(remote(fake), images)["mean"], means(images))
    assert len(fake.requests) == 3
    assert len({(request.id, request.digest) for _, request in fake.requests}) == 1
    fake = FakeServers([FAILURES[what]] * 9)
    with pytest.raises(Stopped) as stopped:
        score(remote(fake, retries=2))
    text, prompt = str(stopped.value), "prompt 1" if what == "NaN" else "prompt 0"
    reasons = {"500": "500: the reward raised", "NaN": "nan for image 1", "503": "503: full"}
    assert A in text and "3 attempts" in text and repr(prompt) in text
    assert reasons.get(what, "") in text
    assert len(fake.requests) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not_retried(status):
    fake = FakeServers([httpx.Response(status, json={"error": "too\nlarge"})])
    with pytest.raises(RewardError, match=f"{A} .*'prompt 0' .*{status}: too large"):
        score(remote(fake))
    assert len(fake.requests) == 1


def test_invalid_metadata_is_an_error_of_the_reward():
    with pytest.raises(RewardError, match="JSON"):
        remote(FakeServers())(random_images(1), ["a"], [{"x": {1}}])


def test_requests_have_ids_a_token_and_images_as_bytes():
    tokens = []
    fake = FakeServers([lambda request: tokens.append(request.headers["authorization"])])
    reward, images = remote(fake, token="secret"), random_images(2)
    for _ in range(3):
        score(reward, images.astype(np.float32) / 255)
    assert tokens == ["Bearer secret"]
    assert len({request.id for _, request in fake.requests}) == 3
    np.testing.assert_array_equal(fake.requests[0][1].images, images)


@pytest.mark.parametrize(
    ("failure", "blocked"), [("500", (0.02, 0.1)), ("no connection", (60.0, 60.0))]
)
def test_a_deadline_ends_the_attempts(failure, blocked):
    fake = FakeServers([FAILURES[failure]] * 10_000)
    start = time.monotonic()
    with pytest.raises(Stopped, match=A):
        score(remote(fake, retries=10_000, deadline=0.2, blocked=blocked))
    assert 0.15 < time.monotonic() - start < 60
    assert len(fake.requests) == 1 or failure == "500"


def test_a_retry_after_is_respected():
    def pause(seconds):
        return httpx.Response(503, headers={"Retry-After": seconds}, json={"error": "full"})

    start = time.monotonic()
    score(remote(FakeServers([pause("1")])))
    assert time.monotonic() - start >= 1.0
    fake, start = FakeServers([pause("60")]), time.monotonic()
    score(remote(fake, servers=(A, B)))  # the other one is free
    assert time.monotonic() - start < 60 and [server for server, _ in fake.requests] == [A, B]


def test_a_retry_after_is_a_number_or_a_date():
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    date = then.strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert retry_after(httpx.Headers({"Retry-After": "7"})) == 7
    assert 28 < retry_after(httpx.Headers({"Retry-After": date})) <= 30
    for text in ("soon", "-3", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert retry_after(httpx.Headers({"Retry-After": text})) == 0
    assert retry_after(httpx.Headers()) == 0


def test_a_dead_server_is_not_used_until_it_is_back():
    dead = [True]

    class OneDead(FakeServers):
        def __call__(self, request):
            response = super().__call__(request)
            if dead[0] and request.url.host == "a":
                raise httpx.ConnectError("refused")
            return response

    fake = OneDead()
    reward = remote(fake, servers=(A, B), blocked=(60.0, 60.0))
    for _ in range(20):
        score(reward)
    assert [server for server, _ in fake.requests].count(A) == 1
    dead[0] = False
    for server in reward._client.servers:
        server.blocked_until = 0.0
    for _ in range(4):
        score(reward)
    assert [server for server, _ in fake.requests[-4:]].count(A) >= 2


def in_threads(work, count):
    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_share_servers_and_each_gets_its_own_scores():
    rng, lock = random.Random(0), threading.Lock()
    failures = [FAILURES[what] for what in ("500", "end", "malformed", "NaN", "time-out")]

    class Unsteady(FakeServers):
        def __call__(self, request):
            time.sleep(0.002)
            with lock:
                self.script.insert(0, rng.choice(failures) if rng.random() < 0.2 else None)
            return super().__call__(request)

    wrong = []
    reward = remote(Unsteady(), servers=(A, B), retries=50, blocked=(0.002, 0.01))
    take_exchanges()

    def work(seed):
        for i in range(5):
            images = random_images(2, seed=100 * seed + i)
            if not np.array_equal(score(reward, images)["mean"], means(images)):
                wrong.append(seed)

    in_threads(work, 12)
    exchanges = take_exchanges()
    assert wrong == [] and sum(one.failure is None for one in exchanges) == 60
    assert {one.server for one in exchanges} == {"reward server a:1", "reward server b:1"}
    assert all(one.begin < one.end and one.images == 2 for one in exchanges)
    assert all(server.in_flight == 0 for server in reward._client.servers)


def description(version=1, images=128, pixels=2**25, **others):
    limits = dict(images=images, pixels=pixels)
    found = dict(version=version, rewards=["mean"], limits=limits) | others
    return httpx.Response(200, json=found)


def described(responses, **options):
    """(reward, its fake servers), whose servers answer GET /rewards like this."""
    fake = FakeServers()

    def transport(request):
        if request.url.path != "/rewards":
            return fake(request)
        response = responses[f"http://{request.url.netloc.decode()}"]
        return response(request) if callable(response) else response

    return remote(transport, list(responses), **options), fake


def test_a_check_adopts_the_smallest_limits():
    reward, fake = described({A: description(images=2), B: description(pixels=24)})
    assert set(reward.check()) == {A, B}
    for images, sizes in (
        (random_images(5, 2, 6), [2, 2, 1]),
        (random_images(2, 4, 6), [1, 1]),  # of 24 pixels each
    ):
        fake.requests.clear()
        np.testing.assert_array_equal(score(reward, images)["mean"], means(images))
        assert [len(request.prompts) for _, request in fake.requests] == sizes
    fake.requests.clear()
    with pytest.raises(RewardError, match=r"--pixels.*'every'"):
        score(reward, np.zeros((2, 9, 4, 4, 3), np.uint8))
    assert not fake.requests


def test_a_check_needs_one_server(capsys):
    reward, _ = described({A: FAILURES["no connection"], B: description()})
    assert set(reward.check()) == {B}
    assert A in capsys.readouterr().err
    reward, _ = described({A: FAILURES["no connection"]})
    with pytest.raises(ConfigError, match=A):
        reward.check()


def test_a_check_waits_for_a_server_while_prompts_wait():
    script = [FAILURES["no connection"]] * 4 + [FAILURES["503"]]

    def late(request):
        now = script.pop(0) if script else description(images=2)
        return now(request) if callable(now) else now

    reward, fake = described({A: late})
    assert set(reward.check(["a", "b", "c"])) == {A} and not script
    score(reward)
    assert [len(request.prompts) for _, request in fake.requests] == [2, 1]
    reward, _ = described({A: FAILURES["no connection"]}, retries=2)
    with pytest.raises(Stopped, match=f"{A} .*'a'.* 3 attempts"):
        reward.check(["a"])


@pytest.mark.parametrize(
    "response",
    [
        httpx.Response(401, json={"error": "the request needs a token"}),
        httpx.Response(200, content=b"<html>"),
        httpx.Response(200, json=[]),
        description(images="x"),
        description(version=2),
    ],
)
def test_a_check_refuses_other_servers(response):
    with pytest.raises(ConfigError, match=A):
        described({A: response})[0].check()


@pytest.mark.parametrize(
    "servers",
    [
        *[["localhost:8100"], ["ftp://x"], ["http://"], ["http://x/y"], ["http://me:pw@x"]],
        *[["http://x:99999"], [], [A, A]],
    ],
)
def test_invalid_addresses_are_refused(servers):
    with pytest.raises(ConfigError, match="address"):
        RemoteReward(servers)


def test_the_reward_served_uses_its_settings(monkeypatch):
    """`test_serving` uses a real server."""
    monkeypatch.setenv("DIGEN_REWARD_TOKEN", "secret")
    reward = Served(servers=f"{A}/v1", attempt=3.0, deadline=4.0, retries=0)
    client, sent = _remote(reward), []

    def unreachable(request):
        sent.append((str(request.url), request.headers["authorization"]))
        raise httpx.ConnectError("refused")

    client._client._http._transport = httpx.MockTransport(unreachable)
    with pytest.raises(Stopped, match=f"{A} .*'a'.* 1 attempt "):
        reward(random_images(1), ["a"], [{}])
    assert sent == [(f"{A}/rewards", "Bearer secret")] * 2
    client.close()


def test_a_group_is_one_request():
    reward, fake = described({A: description(images=3, groupwise=True)})
    reward.check()
    score(reward, random_images(3))
    assert [len(request.prompts) for _, request in fake.requests] == [3]
    with pytest.raises(RewardError, match="4 images"):
        score(reward, random_images(4))
    for served in (Served(servers=A), Served(servers=A, groupwise=True)):
        client = _remote(served)
        client.checked, client.groupwise = True, not served.groupwise
        with pytest.raises(ConfigError, match=f"'groupwise' to {not served.groupwise}"):
            served(random_images(1), ["a"], [{}])
        client.close()


def test_a_clip_is_thinned_before_it_is_sent():
    reward, fake = Served(servers=A, every=4), FakeServers()
    client = _remote(reward)
    client.checked, client._client._http._transport = True, httpx.MockTransport(fake)
    clips = np.random.default_rng(0).integers(0, 256, (2, 9, 8, 8, 3), np.uint8)
    reward(clips, ["a", "b"], [{}, {}])
    np.testing.assert_array_equal(fake.requests[0][1].images, clips[:, ::4])
    client.close()
    with pytest.raises(ConfigError, match="every"):
        Served(servers=A, every=0)


def test_a_missing_package_is_named():
    with pytest.raises(ConfigError, match="starlette"), server_packages():
        raise ModuleNotFoundError(name="starlette.responses")
    with pytest.raises(ModuleNotFoundError), server_packages():
        raise ModuleNotFoundError(name="my_module")
