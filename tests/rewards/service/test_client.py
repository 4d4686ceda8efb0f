import datetime
import json
import random
import threading
import time

import httpx
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.service import installed
from digen_jax.rewards.service.client import RemoteReward
from digen_jax.rewards.service.http import retry_after
from digen_jax.rewards.service.limits import Limits
from digen_jax.rewards.service.served import _client, served
from digen_jax.rewards.service.servers import Servers
from digen_jax.rewards.service.wire import decode_request, encode_answer
from tests.rewards.service.helpers import means, pictures

A, B = "http://a:1", "http://b:1"
FAST = dict(alone=(0.02, 0.1), waits=(0.001, 0.01))


class Answering:
    """Stands for servers: answers rightly after what a script says, one entry a request."""

    def __init__(self, script=()):
        self.script, self.asked = list(script), []
        self.lock = threading.Lock()

    def __call__(self, request):
        asked = decode_request(request.headers["content-type"], request.read(), Limits())
        with self.lock:
            self.asked.append((f"http://{request.url.netloc.decode()}", asked))
            now = self.script.pop(0) if self.script else None
        if callable(now):
            now = now(request)
        if now is not None:
            return now
        return httpx.Response(200, content=encode_answer({"mean": means(asked.images)}, 0.1))


def remote(answering, servers=(A,), **options):
    options = FAST | {"names": ["mean"], "transport": httpx.MockTransport(answering)} | options
    return RemoteReward(servers, **options)


def score(reward, images=None, prompts=None):
    images = pictures(3) if images is None else images
    prompts = prompts or [f"prompt {i}" for i in range(len(images))]
    return reward(images, prompts, [{"prompt": prompt} for prompt in prompts])


def raises(error):
    def fail(request):
        raise error

    return fail


def answer(text):
    return httpx.Response(200, content=text)


NAN = b'{"scores": {"mean": [1, NaN, 2]}, "seconds": 1}'
AGAIN = {
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


@pytest.mark.parametrize("what", AGAIN)
def test_it_asks_again_with_the_same_id_and_content(what):
    answering = Answering([AGAIN[what]] * 2)
    images = pictures(3)
    scores = score(remote(answering), images)
    np.testing.assert_array_equal(scores["mean"], means(images))
    assert len(answering.asked) == 3
    assert len({(asked.id, asked.digest) for _, asked in answering.asked}) == 1


@pytest.mark.parametrize("what", AGAIN)
def test_it_stops_with_server_prompt_and_reason(what):
    answering = Answering([AGAIN[what]] * 9)
    reasons = {
        "500": "answered 500: the reward raised",
        "NaN": "nan for image 1",
        "503": "503: full",
    }
    reasons |= {"no connection": "cannot be reached", "time-out": "did not answer in time"}
    with pytest.raises(Stopped) as stopped:
        score(remote(answering, retries=2))
    text = str(stopped.value)
    assert text.startswith(f"reward server {A} ") and "after 3 attempts in" in text
    assert reasons.get(what, "") in text and "the same command continues" in text
    assert ("'prompt 1'" if what == "NaN" else "'prompt 0'") in text
    assert len(answering.asked) == 3


@pytest.mark.parametrize("status", [301, 400, 401, 404, 413, 422])
def test_a_refusal_is_not_repeated(status):
    answering = Answering([httpx.Response(status, json={"error": "too\nlarge"})])
    with pytest.raises(RewardError, match=f"{A} refuses 'prompt 0' with {status}: too large"):
        score(remote(answering))
    assert len(answering.asked) == 1


def test_metadata_that_cannot_be_sent_are_a_mistake():
    with pytest.raises(RewardError, match="must be JSON"):
        remote(Answering())(pictures(1), ["a"], [{"x": {1}}])


def test_each_request_has_an_id_of_its_own():
    answering = Answering()
    reward = remote(answering)
    for _ in range(3):
        score(reward)
    assert len({asked.id for _, asked in answering.asked}) == 3


def test_images_are_sent_as_bytes():
    images = pictures(2)
    answering = Answering()
    score(remote(answering), images.astype(np.float32) / 255)
    np.testing.assert_array_equal(answering.asked[0][1].images, images)


def test_a_deadline_ends_the_attempts():
    answering = Answering([AGAIN["500"]] * 10_000)
    begin = time.monotonic()
    with pytest.raises(Stopped, match="the reward raised"):
        score(remote(answering, retries=10_000, deadline=0.2))
    assert 0.15 < time.monotonic() - begin < 60
    answering = Answering([AGAIN["no connection"]] * 10_000)
    begin = time.monotonic()
    with pytest.raises(Stopped, match=f"{A} cannot be reached"):
        score(remote(answering, retries=10_000, deadline=0.2, alone=(60.0, 60.0)))
    assert 0.15 < time.monotonic() - begin < 60 and len(answering.asked) == 1


def test_a_server_that_asks_for_a_pause_gets_it():
    def pause(seconds):
        return httpx.Response(503, headers={"Retry-After": seconds}, json={"error": "full"})

    answering = Answering([pause("1")])
    begin = time.monotonic()
    score(remote(answering))
    assert time.monotonic() - begin >= 1.0
    answering = Answering([pause("60")])
    begin = time.monotonic()
    score(remote(answering, servers=(A, B)))  # the other one has time
    assert time.monotonic() - begin < 60
    assert [server for server, _ in answering.asked] == [A, B]


def test_a_pause_is_a_number_or_a_date():
    then = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    date = then.strftime("%a, %d %b %Y %H:%M:%S GMT")
    assert retry_after(httpx.Headers({"Retry-After": "7"})) == 7
    assert 28 < retry_after(httpx.Headers({"Retry-After": date})) <= 30
    for text in ("soon", "-3", "Wed, 21 Oct 2015 07:28:00 GMT"):
        assert retry_after(httpx.Headers({"Retry-After": text})) == 0
    assert retry_after(httpx.Headers()) == 0


def test_a_dead_server_is_left_alone_and_comes_back():
    dead = [True]

    class OneDead(Answering):
        def __call__(self, request):
            response = super().__call__(request)
            if dead[0] and request.url.host == "a":
                raise httpx.ConnectError("refused")
            return response

    answering = OneDead()
    reward = remote(answering, servers=(A, B), alone=(60.0, 60.0))
    for _ in range(20):
        score(reward)
    assert [server for server, _ in answering.asked].count(A) == 1
    dead[0] = False
    for server in reward._asker.servers._servers:
        server.free_at = 0.0
    for _ in range(4):
        score(reward)
    assert [server for server, _ in answering.asked[-4:]].count(A) >= 2


def test_threads_share_servers_and_each_gets_its_own_scores():
    rng, lock = random.Random(0), threading.Lock()
    failures = [AGAIN[what] for what in ("500", "end", "malformed", "NaN", "time-out")]

    class Unsteady(Answering):
        def __call__(self, request):
            time.sleep(0.002)
            with lock:
                now = rng.choice(failures) if rng.random() < 0.2 else None
                self.script.insert(0, now)
            return super().__call__(request)

    exchanges = []
    reward = remote(
        Unsteady(), servers=(A, B), retries=50, alone=(0.002, 0.01), listen=exchanges.append
    )
    wrong = []

    def work(seed):
        for i in range(5):
            images = pictures(2, seed=100 * seed + i)
            if not np.array_equal(score(reward, images)["mean"], means(images)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and sum(one.failure is None for one in exchanges) == 60
    assert {one.server for one in exchanges} == {A, B}
    assert all(one.begin < one.end and one.images == 2 for one in exchanges)
    assert all(server.outstanding == 0 for server in reward._asker.servers)


def test_threads_stop_together_where_no_server_works():
    answering = Answering([AGAIN["no connection"]] * 1000)
    reward = remote(answering, retries=3, alone=(0.05, 0.1), deadline=60.0)
    stopped = []

    def work():
        with pytest.raises(Stopped, match=f"{A} cannot be reached"):
            score(reward)
        stopped.append(time.monotonic() - begin)

    begin = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # after 0.05 + 0.1 + 0.1 s a fourth failure is one too many for all that then ask
    assert len(stopped) == 8 and min(stopped) < 1.5 and max(stopped) < 4


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_the_server_with_the_fewest_requests_is_asked():
    servers = Servers([A, B], clock=Clock())
    first, second = servers.take(1.0), servers.take(1.0)
    assert {first.url, second.url} == {A, B}
    servers.succeeded(second)
    assert servers.take(1.0) is second
    servers.succeeded(first)
    assert servers.take(1.0) is first


def test_a_server_is_left_alone_twice_as_long_after_each_failure():
    clock = Clock()
    servers = Servers([A], 1.0, 5.0, clock)
    for alone in (1, 2, 4, 5, 5):
        server = servers.take(clock.now)
        assert servers.failed(server, clock.now) == alone
        clock.now += alone - 0.01
        assert servers.take(clock.now) is None
        clock.now += 0.01
    server = servers.take(clock.now)
    assert servers.take(clock.now) is None  # a single request until one succeeds
    servers.succeeded(server)
    assert servers.take(clock.now) is servers.take(clock.now)


def test_requests_that_fail_together_are_one_failure():
    clock = Clock()
    servers = Servers([A], 1.0, 60.0, clock)
    taken = [servers.take(0.0) for _ in range(10)]
    clock.now = 3.0
    assert [servers.failed(server, 0.0) for server in taken] == [1.0] * 10
    assert taken[0].failures == 1


def told(version=1, images=128, pixels=2**25):
    return {"version": version, "rewards": ["mean"], "limits": dict(images=images, pixels=pixels)}


def checking(responses, **options):
    def transport(request):
        if request.url.path != "/rewards":
            return Answering.__call__(answering, request)
        response = responses[f"http://{request.url.netloc.decode()}"]
        return response(request) if callable(response) else response

    answering = Answering()
    transport = httpx.MockTransport(transport)
    reward = RemoteReward(list(responses), ["mean"], transport=transport, **options)
    return reward, answering


def test_check_takes_the_smallest_limits():
    reward, answering = checking(
        {A: httpx.Response(200, json=told(images=2)), B: httpx.Response(200, json=told(pixels=24))}
    )
    assert set(reward.check()) == {A, B}
    images = pictures(5, 2, 6)
    np.testing.assert_array_equal(score(reward, images)["mean"], means(images))
    assert [len(asked.prompts) for _, asked in answering.asked] == [2, 2, 1]
    images = pictures(2, 4, 6)  # 24 pixels each
    np.testing.assert_array_equal(score(reward, images)["mean"], means(images))
    assert [len(asked.prompts) for _, asked in answering.asked[3:]] == [1, 1]


def test_check_needs_one_server(capsys):
    down = raises(httpx.ConnectError("refused"))
    reward, _ = checking({A: down, B: httpx.Response(200, json=told())})
    assert set(reward.check()) == {B}
    assert f"reward server {A}: cannot be reached (refused)" in capsys.readouterr().err
    reward, _ = checking({A: down})
    with pytest.raises(ConfigError, match=f"no reward server answers at {A}: start one"):
        reward.check()


def test_check_waits_for_a_server_where_prompts_wait():
    script = [AGAIN["no connection"]] * 4 + [AGAIN["503"]]

    def late(request):
        now = script.pop(0) if script else httpx.Response(200, json=told(images=2))
        return now(request) if callable(now) else now

    reward, answering = checking({A: late}, **FAST)
    assert set(reward.check(["a", "b", "c"])) == {A} and not script
    images = pictures(3)
    np.testing.assert_array_equal(score(reward, images)["mean"], means(images))
    assert [len(asked.prompts) for _, asked in answering.asked] == [2, 1]  # the limits are known
    reward, _ = checking({A: AGAIN["no connection"]}, **FAST, retries=2)
    with pytest.raises(Stopped, match=rf"{A} cannot be reached .*\(prompt 'a'\), after 3 attempts"):
        reward.check(["a"])


@pytest.mark.parametrize(
    ("response", "what"),
    [
        (
            httpx.Response(401, json={"error": "the request needs a token"}),
            "401: the request needs",
        ),
        (httpx.Response(200, content=b"<html>"), "is no reward server"),
        (httpx.Response(200, json=[]), "is no reward server"),
        (httpx.Response(200, json=told(images="x")), "is no reward server"),
        (httpx.Response(200, json=told(version=2)), "has version 2 of the format, this code 1"),
    ],
)
def test_check_refuses_what_is_no_server_of_ours(response, what):
    with pytest.raises(ConfigError, match=what):
        checking({A: response})[0].check()


@pytest.mark.parametrize(
    "address",
    ["localhost:8100", "ftp://x", "http://", "http://x/y", "http://me:pw@x", "http://x:99999"],
)
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="is no address of a reward server"):
        RemoteReward([address])


def test_wrong_numbers_are_refused():
    for options in ({"servers": []}, {"servers": [A, A]}):
        with pytest.raises(ConfigError, match="one or more addresses, each once"):
            RemoteReward(**options)
    with pytest.raises(ConfigError, match="retries must be 0 or more"):
        RemoteReward([A], retries=-1)


def test_the_token_is_sent():
    seen = []

    def look(request):
        seen.append(request.headers["authorization"])

    score(remote(Answering([look]), token="secret"))
    assert seen == ["Bearer secret"]


def test_a_configs_reward_asks_with_its_settings(monkeypatch):
    """`test_serving` asks a real server."""
    monkeypatch.setenv("DIGEN_REWARD_TOKEN", "secret")
    asked = served(servers=f"{A}/v1", attempt=3.0, deadline=4.0, retries=0)
    client = _client(asked)
    told = []

    def unreachable(request):
        told.append((str(request.url), request.headers["authorization"]))
        raise httpx.ConnectError("refused")

    client._asker._http._transport = httpx.MockTransport(unreachable)
    with pytest.raises(
        Stopped, match=rf"{A} cannot be reached .*\(prompt 'a'\), after one attempt"
    ):
        asked(pictures(1), ["a"], [{}])
    assert told == [(f"{A}/rewards", "Bearer secret")] * 2
    client.close()


def test_a_missing_package_is_a_sentence():
    sentence = (
        r"a reward server needs the package fastapi.*: pip install -r requirements-reward.txt"
    )
    with pytest.raises(ConfigError, match=sentence), installed("a reward server"):
        raise ModuleNotFoundError(name="fastapi.responses")
    with pytest.raises(ModuleNotFoundError), installed("a reward server"):
        raise ModuleNotFoundError(name="my_module")


def test_a_server_is_not_told_of_every_time(capsys):
    reward = remote(Answering([AGAIN["500"]] * 5))
    score(reward)
    assert capsys.readouterr().err.splitlines() == [
        f"reward server {A} answered 500: the reward raised"
    ]
    assert json.loads(AGAIN["500"].content)["error"] == "the reward raised"
