import asyncio
import io

import numpy as np
import pytest
from PIL import Image

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardHung, RewardProcessDied, RewardTimeout
from digen_jax.rewards.service import server
from digen_jax.rewards.service.server import Answers
from digen_jax.rewards.service.wire import Limits, decode_answer, encode_request
from tests.rewards.service.helpers import (
    HeldPool,
    ScoringPool,
    means,
    post,
    random_images,
    run,
    start,
    until,
)


def scores_of(response, count):
    assert response.status_code == 200
    return decode_answer(response.content, count, ["mean"])["mean"]


def png(image):
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def test_scores_are_the_rewards_for_images_clips_and_files():
    images, clips = random_images(2), random_images(6).reshape(2, 3, 4, 6, 3)

    async def test(client, service):
        for given in (images, clips):
            response = await post(client, given)
            np.testing.assert_array_equal(scores_of(response, 2), means(given))
            assert list(decode_answer(response.content, 2)) == ["mean", "first"]
        files = [("image", ("x.png", png(one))) for one in images]
        fields = ("request", (None, '{"prompts": ["a", "b"]}', "application/json"))
        response = await client.post("/v1/score", files=[fields, *files])
        np.testing.assert_array_equal(scores_of(response, 2), means(images))

    run(test)


def test_health_and_description():
    async def test(client, service):
        assert (await client.get("/health")).status_code == 503
        refused = await post(client)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        service.ready = True
        healthy = await client.get("/health")
        assert healthy.status_code == 200 and healthy.json()["ok"] is True
        assert "connection" not in healthy.headers
        found = (await client.get("/rewards")).json()
        assert found["rewards"] == ["mean"] and found["version"] == 1
        assert found["limits"]["images"] == Limits().images
        service.stopping = True
        assert (await client.get("/health")).json()["ok"] is False
        assert (await post(client)).status_code == 503

    run(test, ready=False)


def test_a_server_is_unhealthy_after_failures_in_a_row():
    async def test(client, service):
        for _ in range(3):
            assert (await client.get("/health")).status_code == 200
            response = await post(client, prompts=["a", "fail"])
            assert response.status_code == 500
            assert response.json()["error"] == "'no (a path) here'"
        assert (await client.get("/health")).json()["alive"] is False
        assert (await post(client)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run(test)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RewardTimeout("took more than 3 seconds and was killed"), 504),
        (RewardHung("took more than 3 seconds in a thread"), 504),
        (Stopped("judge http://a:1 cannot be reached"), 500),
        (RewardProcessDied("died in its process (SIGKILL)"), 500),
        (RewardError("reward 'x' returned None\n  /folder/x.py, line 3"), 500),
        (OSError(2, "none", "/folder/x"), 500),
        (ConfigError("the record has no `include`"), 422),
    ],
)
def test_failures_have_a_status_and_a_message_without_paths(error, status):
    async def test(client, service):
        response = await post(client, prompts=["a", "fail"])
        assert response.status_code == status
        message = response.json()["error"]
        assert message and "folder" not in message and "http" not in message
        assert service.failures == (status != 422)
        # Only a thread of the server that hangs cannot be used again.
        assert ((await post(client)).status_code == 504) == isinstance(error, RewardHung)

    run(test, ScoringPool(error))


def test_a_call_that_does_not_end_is_abandoned(monkeypatch):
    monkeypatch.setattr(server, "GRACE", 0.05)

    async def test(client, service):
        assert (await post(client)).status_code == 504

    run(test, HeldPool(), score=0.05)


def test_waiting_requests_are_scored_together_by_size():
    pool = HeldPool()
    images = [random_images(2, seed=i) for i in range(4)]
    images.insert(2, random_images(3, 8, 8))

    async def test(client, service):
        tasks = [start(post(client, images[0]))]
        await until(lambda: pool.waiting)
        tasks += [start(post(client, one)) for one in images[1:]]
        await until(lambda: service.batcher.queued == 9)
        responses = await pool.release_until_done(tasks)
        # The batch of 5 has room for two requests of 2, but not for the third.
        assert sorted(pool.calls) == [2, 2, 3, 4] and pool.calls[0] == 2
        for one, response in zip(images, responses, strict=True):
            np.testing.assert_array_equal(scores_of(response, len(one)), means(one))

    run(test, pool, batch=5)


def test_requests_of_a_groupwise_reward_are_scored_separately():
    pool, images = HeldPool(), [random_images(2, seed=i) for i in range(3)]

    async def test(client, service):
        assert (await client.get("/rewards")).json()["groupwise"] is True
        tasks = [start(post(client, one)) for one in images]
        await until(lambda: service.batcher.queued == 4)
        await pool.release_until_done(tasks)
        assert pool.calls == [2, 2, 2]

    run(test, pool, groupwise=True)


def test_a_batch_that_fails_is_scored_request_by_request():
    pool = HeldPool()

    async def test(client, service):
        tasks = [start(post(client))]
        await until(lambda: pool.waiting)
        prompts = [["a", "b"], ["c", "fail"], ["d", "e"]]
        tasks += [start(post(client, prompts=one)) for one in prompts]
        await until(lambda: service.batcher.queued == 6)
        responses = await pool.release_until_done(tasks)
        assert pool.calls == [2, 6, 2, 2, 2]
        assert [response.status_code for response in responses] == [200, 200, 500, 200]

    run(test, pool)


def test_several_calls_run_at_once():
    pool = HeldPool()

    async def test(client, service):
        tasks = [start(post(client, random_images(2, 4, width))) for width in (2, 3, 4, 5)]
        await until(lambda: service.batcher.queued == 2)
        assert len(pool.waiting) == len(service.batcher.calls) == 3
        await pool.release_until_done(tasks)

    run(test, pool, at_once=3)


@pytest.mark.parametrize("limits", [dict(queue=5, images=4), dict(memory=100_000)])
def test_a_full_queue_or_memory_answers_503_with_a_pause(limits):
    pool = HeldPool()
    images = random_images(2, 50, 100)  # 30 kB

    async def test(client, service):
        tasks = [start(post(client, images)) for _ in range(3)]
        await until(lambda: service.batcher.queued == 4)
        assert service.held == 3 * images.nbytes
        refused = await post(client, images)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        responses = await pool.release_until_done(tasks)
        assert all(one.status_code == 200 for one in responses) and service.held == 0

    run(test, pool, **limits)


async def slowly(body, pause):
    for i in range(0, len(body), 100):
        yield body[i : i + 100]
        await asyncio.sleep(pause)


@pytest.mark.parametrize(
    ("pause", "status", "limits"),
    [(None, 413, dict(body=2000)), (0, 413, dict(body=2000)), (0.05, 408, dict(upload=0.1))],
    ids=["long", "long, no length", "slow"],
)
def test_a_body_that_is_too_long_or_slow_is_refused(pause, status, limits):
    async def test(client, service):
        kind, body = encode_request(random_images(4, 16, 16), ["a"] * 4, [{}] * 4)
        content = body if pause is None else slowly(body, pause)
        response = await client.post(
            "/v1/score", content=content, headers={"Content-Type": kind, "Connection": "keep-alive"}
        )
        assert response.status_code == status and response.json()["error"]
        assert response.headers["connection"] == "close" and service.held == 0
        assert (await post(client, random_images(1))).status_code == 200

    run(test, **limits)


def test_invalid_headers_and_content_are_refused():
    async def test(client, service):
        for headers, status in (
            ({"Content_Type": "application/json"}, 415),
            ({"Content_Type": "multipart/form-data"}, 400),
            ({"Content_Encoding": "gzip"}, 415),
            ({"Content_Length": "1000000000000"}, 413),
            ({"Origin": "http://evil.example"}, 403),
        ):
            response = await post(client, **headers)
            assert response.status_code == status and response.json()["error"]
        response = await post(client, random_images(3), ["a", "b"])
        assert response.status_code == 422 and "3 images for 2 prompts" in response.json()["error"]
        assert "connection" not in response.headers  # the body was read
        kind, body = encode_request(random_images(), ["a"] * 2, [{}] * 2)
        response = await client.post("/v1/score", content=body[:90], headers={"Content-Type": kind})
        assert response.status_code == 400

    run(test)


def test_a_token_is_required_if_one_is_set():
    async def test(client, service):
        for invalid in ({}, {"Authorization": "Bearer no"}, {"Authorization": "Bearer sécret"}):
            encoded = {name: text.encode() for name, text in invalid.items()}
            response = await post(client, **encoded)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert (await client.get("/rewards", headers=encoded)).status_code == 401
        valid = {"Authorization": "Bearer secret"}
        assert (await post(client, **valid)).status_code == 200
        assert (await client.get("/rewards", headers=valid)).status_code == 200
        assert (await client.get("/health")).status_code == 200

    run(test, token="secret")


def test_a_repeated_id_is_scored_once():
    pool = HeldPool()

    async def test(client, service):
        tasks = [start(post(client, id="x")) for _ in range(2)]
        await until(lambda: service.held == 2 * random_images().nbytes and pool.waiting)
        await asyncio.sleep(0.02)
        assert len(pool.waiting) == 1 and service.batcher.queued == 0
        answers = [response.content for response in await pool.release_until_done(tasks)]
        answers.append((await post(client, id="x")).content)
        assert len(set(answers)) == 1 and pool.calls == [2]
        assert (await post(client, random_images(seed=1), id="x")).status_code == 422
        failed = start(post(client, prompts=["a", "fail"], id="y"))
        (response,) = await pool.release_until_done([failed])
        assert response.status_code == 500 and len(service.answers) == 1  # is not remembered

    run(test, pool)


def test_a_request_is_scored_after_its_client_disconnected():
    pool = HeldPool()

    async def test(client, service):
        first = start(post(client, id="x"))
        await until(lambda: pool.waiting)
        first.cancel()
        await asyncio.sleep(0.01)
        again = start(post(client, id="x"))
        await asyncio.sleep(0.01)
        pool.release()
        assert (await again).status_code == 200 and pool.calls == [2]

    run(test, pool)


def test_answers_are_dropped_by_time_and_number():
    now, computed = [0.0], []
    answers = Answers(10.0, 3, lambda: now[0])

    async def ask(id):
        async def answer():
            computed.append(id)
            return id

        return await answers.once(id, b"", answer)

    async def test():
        for id in "abcda":  # d drops a
            await ask(id)
        assert computed == list("abcda") and len(answers) == 3
        assert await ask("c") == ("c", True)
        now[0] = 10.0
        assert await ask("c") == ("c", False) and len(answers) == 1
        for _ in range(2):
            assert await ask(None) == (None, False)
        assert len(answers) == 1

    asyncio.run(test())


def test_an_internal_error_is_a_500_without_its_text(monkeypatch, capsys):
    async def test(client, service):
        monkeypatch.setattr(service, "_authorize", lambda request: 1 / 0)
        response = await post(client)
        assert response.status_code == 500 and "division" not in response.text
        monkeypatch.undo()
        assert (await post(client, prompts=["a", "nan"])).status_code == 500  # no valid answer

    run(test)
    assert "ZeroDivisionError" in capsys.readouterr().err
