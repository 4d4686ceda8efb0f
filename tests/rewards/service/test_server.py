import asyncio
import io
import types

import httpx
import numpy as np
import pytest
from PIL import Image

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardHung, RewardProcessDied, RewardTimeout
from digen_jax.rewards.service import scoring
from digen_jax.rewards.service.answers import Answers
from digen_jax.rewards.service.limits import Limits, Refused
from digen_jax.rewards.service.scoring import by_name, reason
from digen_jax.rewards.service.server import Refusal
from digen_jax.rewards.service.wire import decode_answer, encode_request
from tests.rewards.service.helpers import (
    Held,
    Pool,
    means,
    pictures,
    post,
    sentence,
    serving,
    soon,
)


def run(test, *arguments, **limits):
    async def whole():
        async with serving(*arguments, **limits) as (client, service):
            await asyncio.wait_for(test(client, service), 30)

    asyncio.run(whole())


def test_scores_are_the_rewards_for_images_and_clips():
    clips = pictures(6).reshape(2, 3, 4, 6, 3)

    async def test(client, service):
        for images in (pictures(3), clips):
            response = await post(client, images)
            assert response.status_code == 200
            scores, _ = decode_answer(response.content, len(images), ["mean"])
            np.testing.assert_allclose(scores["mean"], means(images), rtol=1e-6)

    run(test)


def test_files_of_pictures_are_scored():
    def file(image):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return file.getvalue()

    images = pictures(2)

    async def test(client, service):
        parts = {"request": (None, '{"prompts": ["a", "b"]}', "application/json")}
        files = [*parts.items(), *(("image", ("x.png", file(one))) for one in images)]
        response = await client.post("/v1/score", files=files)  # httpx's own multipart
        scores, _ = decode_answer(response.content, 2)
        np.testing.assert_allclose(scores["mean"], means(images), rtol=1e-6)

    run(test)


def test_health_and_rewards():
    async def test(client, service):
        assert (await client.get("/health")).status_code == 503
        refused = await post(client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        service.tried = True
        healthy = await client.get("/health")
        assert healthy.status_code == 200 and healthy.json()["ok"] is True
        told = (await client.get("/rewards")).json()
        assert told["rewards"] == ["mean"] and told["version"] == 1
        assert told["limits"]["images"] == Limits().images
        service.stopping = True
        assert (await client.get("/health")).json()["ok"] is False
        assert (await post(client)).status_code == 503

    run(test, None, False)


def test_a_server_whose_reward_fails_in_a_row_is_not_well():
    async def test(client, service):
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
            response = await post(client, prompts=["a", "fail"])
            assert response.status_code == 500
            assert sentence(response) == "'no (a path) here'"
        assert (await client.get("/health")).json()["alive"] is False
        assert (await post(client)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run(test)


def test_a_score_that_is_not_finite_is_an_error():
    async def test(client, service):
        response = await post(client, prompts=["a", "nan"])
        assert response.status_code == 500
        assert sentence(response) == "reward 'mean' has not one finite score for each of 2 images"

    run(test)


@pytest.mark.parametrize(
    ("error", "status", "what"),
    [
        (
            RewardTimeout("took more than 3 seconds and was killed"),
            504,
            "took more than 600 seconds",
        ),
        (
            RewardHung("reward 'x' took more than 3 seconds in a thread"),
            504,
            "took more than 600 seconds",
        ),
        (Stopped("judge http://a:1 cannot be reached"), 500, "judge (a path) cannot be reached"),
        (
            RewardProcessDied("died in its process (SIGKILL)"),
            500,
            "reward 'mean' died in its process",
        ),
        (
            RewardError("reward 'x' returned None\n  /folder/x.py, line 3"),
            500,
            "'x' returned None",
        ),
        (OSError(2, "none", "/folder/x"), 500, "[Errno 2] none: (a path)"),
        (ConfigError("the record has no `include`"), 422, "the record has no `include`"),
    ],
)
def test_failures_have_a_status_and_a_short_reason(error, status, what):
    class Failing(Pool):
        def submit(self, *batch):
            future = super().submit(*batch)
            future = type(future)()
            future.set_exception(error)
            return future

    async def test(client, service):
        response = await post(client)
        assert response.status_code == status
        assert what in sentence(response) and "folder" not in sentence(response)
        assert service.scorer.failures == (status != 422)
        # only what hangs in a thread of the server cannot be asked again
        again = await post(client)
        assert ("must be started again" in sentence(again)) == isinstance(error, RewardHung)

    run(test, Failing())


def test_a_call_that_does_not_end_is_given_up(monkeypatch):
    monkeypatch.setattr(scoring, "GRACE", 0.05)

    async def test(client, service):
        response = await post(client)
        assert (response.status_code, sentence(response)) == (
            504,
            "reward 'mean' took more than 0.05 seconds",
        )

    run(test, Held(), score=0.05)


def test_requests_that_wait_are_scored_together_by_size():
    pool = Held()
    images = [pictures(2, seed=i) for i in range(4)]
    images.insert(2, pictures(3, 8, 8))

    async def test(client, service):
        first = asyncio.ensure_future(post(client, images[0]))
        await soon(lambda: pool.waiting)
        others = [asyncio.ensure_future(post(client, one)) for one in images[1:]]
        await soon(lambda: service.batcher.queued == 9)
        while not all(one.done() for one in (first, *others)):
            pool.go_on()
            await asyncio.sleep(0.001)
        # the batch of 5 has room for two requests of 2, not for the third
        assert sorted(pool.calls) == [2, 2, 3, 4] and pool.calls[0] == 2
        for one, response in zip(images, await asyncio.gather(first, *others), strict=True):
            scores, _ = decode_answer(response.content, len(one))
            np.testing.assert_allclose(scores["mean"], means(one), rtol=1e-6)

    run(test, pool, batch=5)


def test_a_batch_that_fails_is_scored_one_by_one():
    pool = Held()

    async def test(client, service):
        first = asyncio.ensure_future(post(client))
        await soon(lambda: pool.waiting)
        prompts = [["a", "b"], ["c", "fail"], ["d", "nan"]]
        others = [asyncio.ensure_future(post(client, prompts=one)) for one in prompts]
        await soon(lambda: service.batcher.queued == 6)
        while not all(one.done() for one in (first, *others)):
            pool.go_on()
            await asyncio.sleep(0.001)
        assert pool.calls == [2, 6, 2, 2, 2]
        statuses = [response.status_code for response in await asyncio.gather(*others)]
        assert statuses == [200, 500, 500]

    run(test, pool)


def test_several_calls_run_at_once():
    pool = Held()

    async def test(client, service):
        tasks = [asyncio.ensure_future(post(client, pictures(2, 4, w))) for w in (2, 3, 4, 5)]
        await soon(lambda: service.batcher.queued == 2)
        assert len(pool.waiting) == service.batcher.busy == 3
        while not all(task.done() for task in tasks):
            pool.go_on()
            await asyncio.sleep(0.001)

    run(test, pool, True, 3)


def test_a_full_queue_answers_503_with_a_pause():
    pool = Held()

    async def test(client, service):
        tasks = [asyncio.ensure_future(post(client)) for _ in range(3)]
        await soon(lambda: service.batcher.queued == 4)
        refused = await post(client)
        assert (refused.status_code, sentence(refused)) == (503, "4 images wait already")
        assert int(refused.headers["retry-after"]) >= 1
        while not all(task.done() for task in tasks):
            pool.go_on()
            await asyncio.sleep(0.001)
        assert all(task.result().status_code == 200 for task in tasks)
        assert service.held == 0

    run(test, pool, queue=5, images=4)


def test_a_queue_tells_when_it_will_be_half_empty():
    async def test(client, service):
        batcher = service.batcher
        batcher.scored, batcher._seconds, batcher.queued = 10, 20.0, 30
        assert batcher.after() == 15  # 30 images of 2 s by 2 calls at once: 30 s
        batcher.queued = 1000
        assert batcher.after() == 60

    run(test, None, True, 2)


def test_memory_is_for_all_requests_together():
    pool = Held()
    image = pictures(1, 100, 100)  # 30 kB

    async def test(client, service):
        tasks = [asyncio.ensure_future(post(client, image)) for _ in range(3)]
        await soon(lambda: service.batcher.queued == 2)
        assert service.held == 3 * image.nbytes
        refused = await post(client, image)
        assert (refused.status_code, sentence(refused)) == (503, "the server has no memory left")
        while not all(task.done() for task in tasks):
            pool.go_on()
            await asyncio.sleep(0.001)
        assert service.held == 0 and (await asyncio.gather(*tasks))[2].status_code == 200

    run(test, pool, memory=100_000)


async def slowly(body, pause, size=100):
    for i in range(0, len(body), size):
        yield body[i : i + size]
        await asyncio.sleep(pause)


@pytest.mark.parametrize("with_length", [False, True])
def test_a_body_that_is_too_long_is_refused(with_length):
    async def test(client, service):
        kind, body = encode_request(pictures(4, 16, 16), ["a"] * 4, [{}] * 4)
        headers = {"Content-Type": kind}
        content = body if with_length else slowly(body, 0)
        response = await client.post("/v1/score", content=content, headers=headers)
        assert (response.status_code, sentence(response)) == (
            413,
            "the body has more than 2000 bytes",
        )
        assert response.headers["connection"] == "close" and service.held == 0
        assert (await post(client, pictures(1))).status_code == 200

    run(test, body=2000)


def test_a_slow_body_is_refused():
    async def test(client, service):
        kind, body = encode_request(pictures(), ["a"] * 2, [{}] * 2)
        content, headers = slowly(body, 0.05), {"Content-Type": kind}
        response = await client.post("/v1/score", content=content, headers=headers)
        assert (response.status_code, sentence(response)) == (
            408,
            "the body has not come in 0.1 seconds",
        )
        assert service.held == 0 and (await post(client)).status_code == 200

    run(test, upload=0.1)


@pytest.mark.parametrize(
    ("headers", "status", "what"),
    [
        ({"Content_Type": "application/json"}, 415, "must be multipart/form-data"),
        ({"Content_Type": "multipart/form-data"}, 400, "a boundary"),
        ({"Content_Encoding": "gzip"}, 415, "must not be compressed"),
        ({"Content_Length": "1000000000000"}, 413, "the body has more than"),
        ({"Origin": "http://evil.example"}, 403, "web pages"),
    ],
)
def test_wrong_headers_are_refused(headers, status, what):
    async def test(client, service):
        response = await post(client, **headers)
        assert response.status_code == status and what in sentence(response)

    run(test)


def test_wrong_content_is_refused_with_its_sentence():
    async def test(client, service):
        response = await post(client, pictures(3), ["a", "b"])
        assert (response.status_code, sentence(response)) == (
            422,
            "there are 3 images for 2 prompts",
        )
        assert "connection" not in response.headers
        kind, body = encode_request(pictures(), ["a"] * 2, [{}] * 2)
        response = await client.post("/v1/score", content=body[:90], headers={"Content-Type": kind})
        assert response.status_code == 400

    run(test)


def test_other_paths_and_methods_are_refused():
    async def test(client, service):
        for method, path, status in [
            ("GET", "/", 404),
            ("GET", "/v1/score", 405),
            ("POST", "/health", 405),
            ("GET", "/openapi.json", 404),
            ("GET", "/docs", 404),
            ("GET", "/../../etc/passwd", 404),
        ]:
            response = await client.request(method, path)
            assert response.status_code == status and "/v1/score to POST" in sentence(response)

    run(test)


def test_a_token_is_needed_where_one_is_set():
    async def test(client, service):
        for wrong in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer sécret"}):
            encoded = {name: text.encode() for name, text in wrong.items()}
            response = await post(client, **encoded)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/rewards", headers=encoded)).status_code == 401
        right = {"Authorization": "Bearer secret"}
        assert (await post(client, **right)).status_code == 200
        assert (await client.get("/rewards", headers=right)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run(test, None, True, 1, "secret")


def test_a_repeated_id_is_scored_once():
    pool = Held()

    async def test(client, service):
        twice = [asyncio.ensure_future(post(client, id="x")) for _ in range(2)]
        await soon(lambda: pool.waiting)
        await asyncio.sleep(0.02)
        assert len(pool.waiting) == 1 and service.batcher.queued == 0
        pool.go_on()
        answers = [response.content for response in await asyncio.gather(*twice)]
        answers.append((await post(client, id="x")).content)
        assert len(set(answers)) == 1 and pool.calls == [2]
        assert (service.asked, service.repeated) == (3, 2)
        other = await post(client, pictures(seed=1), id="x")
        assert other.status_code == 422 and "another content" in sentence(other)

    run(test, pool)


def test_a_request_whose_sender_went_away_is_scored_for_its_repetition():
    pool = Held()

    async def test(client, service):
        first = asyncio.ensure_future(post(client, id="x"))
        await soon(lambda: pool.waiting)
        first.cancel()
        await asyncio.sleep(0.01)
        again = asyncio.ensure_future(post(client, id="x"))
        await asyncio.sleep(0.01)
        pool.go_on()
        assert (await again).status_code == 200 and pool.calls == [2]

    run(test, pool)


def test_a_failure_is_not_remembered():
    pool = Pool()

    async def test(client, service):
        for _ in range(2):
            assert (await post(client, prompts=["a", "fail"], id="x")).status_code == 500
        assert pool.calls == [2, 2] and len(service.answers) == 0

    run(test, pool)


def test_answers_are_forgotten_by_time_and_number():
    now = [0.0]
    answers = Answers(10.0, 3, lambda: now[0])
    made = []

    async def ask(id):
        async def make():
            made.append(id)
            return id

        return await answers.once(id, b"", make)

    async def test():
        for id in "abcda":  # d drops a
            await ask(id)
        assert made == list("abcda") and len(answers) == 3
        assert await ask("c") == ("c", True)
        now[0] = 10.0
        assert await ask("c") == ("c", False) and len(answers) == 1
        for _ in range(2):
            assert await answers.once(None, b"", lambda: asyncio.sleep(0, "x")) == ("x", False)
        assert len(answers) == 1

    asyncio.run(test())


def test_a_refusal_is_sent_before_the_rest_of_the_body_is_read():
    sent, left = [], [b"x"] * 3

    async def receive():
        assert sent[1]["body"].startswith(b'{"error"')
        return {"body": left.pop(), "more_body": bool(left)}

    async def send(message):
        sent.append(message)

    asyncio.run(Refusal(413, "too long")({}, receive, send))
    assert left == [] and [m.get("more_body") for m in sent] == [None, True, False]


def test_scores_by_name():
    two = np.float32([[1, 2], [3, 4]])
    found = by_name(two, ("a", "b"), 2)
    np.testing.assert_array_equal([found["a"], found["b"]], two.T)
    np.testing.assert_array_equal(by_name(two[0], ("a",), 2)["a"], two[0])
    both = by_name(types.SimpleNamespace(columns=two, shown={"c": two[0]}), ("a", "b"), 2)
    assert list(both) == ["a", "b", "c"] and both["b"].tolist() == [2, 4]
    assert list(by_name({"x": [1, 2]}, ("a",), 2)) == ["x"]
    for wrong in ({"x": [1]}, {"x": [[1], [2]]}, {"x": [1, np.inf]}):
        with pytest.raises(RewardError, match="reward 'x' has not one finite score"):
            by_name(wrong, ("a",), 2)


def test_a_reason_has_no_paths():
    assert (
        reason(ValueError("in C:\\x\\y.py and ~/a/b: no\nsecond")) == "in (a path) and (a path) no"
    )
    assert reason(ValueError()) == "ValueError" and len(reason(ValueError("x" * 999))) == 200


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"body": 0}, "--body must be 1 or more"),
        ({"score": float("nan")}, "--score must be"),
        ({"memory": 1000}, "--memory=1000 must hold one request"),
        ({"queue": 7}, "--queue=7 must be at least --images=128"),
    ],
)
def test_impossible_limits_are_refused(fields, what):
    Limits().check()
    with pytest.raises(ValueError, match=what):
        Limits(**fields).check()


def test_a_bug_is_a_500_without_its_text(monkeypatch, capsys):
    async def test(client, service):
        monkeypatch.setattr(service, "check", lambda request: 1 / 0)
        transport = httpx.ASGITransport(client._transport.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as other:
            response = await post(other)
        assert (response.status_code, sentence(response)) == (500, "the server has failed")

    run(test)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_a_refused_request_tells_its_status():
    error = Refused(503, "x", 2.0)
    assert (error.status, error.after, str(error)) == (503, 2, "x")
