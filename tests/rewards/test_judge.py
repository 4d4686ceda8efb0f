"""The judge with a fake OpenAI-compatible server; `test_transformers_serve` has a real one."""

import base64
import io
import json
import math
import re
import threading

import httpx
import numpy as np
import pytest
from PIL import Image

from digen_jax.config.load import needs_of
from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.judge import Client, Judge, choose_model
from tests.rewards.service.helpers import random_images

A, B = "http://a:1", "http://b:1"
FAST = dict(blocked=(0.02, 0.1), pauses=(0.001, 0.01))


def reply(text, **more):
    choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop"} | more
    return httpx.Response(200, json={"choices": [choice]})


def tokens(**chances):
    """An answer whose first token has these probabilities; "_" stands for a space."""
    top = [{"token": t.replace("_", " "), "logprob": math.log(p)} for t, p in chances.items()]
    return reply("Yes", logprobs={"content": [{"token": "Yes", "top_logprobs": top}]})


class FakeServers:
    """Servers with models, which answer by a script or a function."""

    def __init__(self, answers, models=("m",)):
        self.answers, self.models, self.requests, self.tokens = answers, models, [], []
        self.lock = threading.Lock()

    def __call__(self, sent):
        self.tokens.append(sent.headers.get("authorization"))
        if sent.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": one} for one in self.models]})
        assert (sent.method, sent.url.path) == ("POST", "/v1/chat/completions")
        request = json.loads(sent.read())
        with self.lock:
            self.requests.append(request)
            if isinstance(self.answers, list):
                return self.answers.pop(0)
        return self.answers(request)


def ask(server, images, prompts, metadata=None, **settings):
    client = Client(
        Judge(**{"servers": (A,)} | settings), transport=httpx.MockTransport(server), **FAST
    )
    return client.score(images, prompts, metadata or [{} for _ in prompts])


def text_of(request):
    return request["messages"][-1]["content"][1]["text"]


def image_of(request):
    return shown(request["messages"][-1]["content"][0])


def shown(part):
    kind, data = part["image_url"]["url"].split(";base64,")
    with Image.open(io.BytesIO(base64.b64decode(data))) as opened:
        assert kind == f"data:image/{opened.format.lower()}"
        return np.asarray(opened)


def brightness(request):
    return reply(f"Score: {image_of(request).mean() / 25.5:.6f}")


def test_each_image_gets_its_own_score():
    smooth = np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None, None], (1, 64, 3))
    server = FakeServers([reply("Score: 5")])
    ask(server, smooth[None], ["a"], template="rating", format="jpeg")
    assert np.abs(image_of(server.requests[0]).astype(int) - smooth).max() < 8
    images = random_images(5)
    server = FakeServers(brightness)
    scores = ask(server, images, [f"prompt {i}" for i in range(5)], template="rating")
    np.testing.assert_allclose(scores, images.mean((1, 2, 3)) / 255, atol=1e-6)
    assert scores.dtype == np.float32 and len(server.requests) == 5
    for request in server.requests:
        which = int(re.search(r"prompt (\d)", text_of(request))[1])
        np.testing.assert_array_equal(image_of(request), images[which])  # PNG is exact
        assert (request["model"], request["temperature"], request["seed"]) == ("m", 0.0, 0)
        assert request["max_tokens"] == 64 and "logprobs" not in request


def test_every_fourth_frame_of_a_clip_is_sent():
    clips = np.random.default_rng(0).integers(0, 256, (2, 6, 4, 4, 3), dtype=np.uint8)
    server = FakeServers(brightness)
    scores = ask(server, clips, ["a", "b"], template="rating")
    expected = clips[:, [0, 4]].mean((1, 2, 3, 4)) / 255
    np.testing.assert_allclose(scores, expected, atol=1e-6)
    assert len(server.requests) == 4


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        ("rating", "score: 7.5", 0.75),
        ("rating", "Score: 3 for colours.\nScore : 9", 0.9),  # the last one counts
        # the example in UnifiedReward's point_score_ACS_image_generation.py
        (
            "unified_reward_2",
            "Alignment Score (1-5): 2.694700002670288\nCoherence Score (1-5): 2.371500015258789\n"
            "Style Score (1-5): 2.802500009536743\n",
            ((2.694700002670288 + 2.371500015258789 + 2.802500009536743) / 3 - 1) / 4,
        ),
        ("rating", "**Score:** 8", 0.8),
        ("rating", "Score: **8**", 0.8),
        ("rating", "**Score**: 8/10", 0.8),
        ("rating", "Score: 3 for colours.\n### __Score__: `9`", 0.9),
        ("rating", "_Score:_ *7,5*", 0.75),
        ("rating", "\\*\\*Score:\\*\\* 8", 0.8),
        ("rating", "Score：８．５", 0.85),
        ("rating", "Score : 7,25, as it is sharp", 0.725),
        (
            "unified_reward_2",
            "- **Alignment Score (1–5):** 3,5\n- **Coherence Score**（1-5）： **2**\nStyle Score: 2",
            0.375,
        ),
        ("unified_reward", "cat (object): 1\nred (color): 0\nFinal Score: 2", 0.25),
    ],
)
def test_numbers_become_scores(template, answer, expected):
    scores = ask(FakeServers([reply(answer)]), random_images(1), ["a cat"], template=template)
    np.testing.assert_allclose(scores, [expected], rtol=1e-6)


def test_a_custom_text_has_the_fields_of_a_record():
    server = FakeServers([reply("about 30 of 40 points")])
    scores = ask(
        server,
        random_images(1),
        ["a {style} dog"],
        [{"style": "gothic", "prompt": "unused"}],
        template='{style}? {prompt} {"points": 40}',
        pattern=r"(\d+) of",
        scale=(20, 40),
        system="Be strict.",
        max_tokens=9,
    )
    assert scores == [0.5]
    (request,) = server.requests
    assert text_of(request) == 'gothic? a {style} dog {"points": 40}'
    assert request["messages"][0] == {"role": "system", "content": "Be strict."}
    assert request["max_tokens"] == 9


def test_source_images_are_shown_in_their_place(tmp_path):
    first, second, result = random_images(3)
    paths = [str(tmp_path / f"{name}.png") for name in ("first", "second")]
    for path, image in zip(paths, (first, second), strict=True):
        Image.fromarray(image).save(path)
    for image, sources in ((paths, [first, second]), (paths[1], [second])):
        server = FakeServers([reply("Score: 9")])
        scores = ask(server, result[None], ["a {x} hat"], [{"image": image}], template="edit")
        assert scores == np.float32(0.9)
        before, *images, between, after, end = server.requests[0]["messages"][-1]["content"]
        for part, expected in zip([*images, after], [*sources, result], strict=True):
            np.testing.assert_array_equal(shown(part), expected)
        texts = [part["text"] for part in (before, between, end)]
        assert "a {x} hat" in texts[1] and not any("{" in text for text in (texts[0], texts[2]))
    (needs,) = needs_of([RewardSettings("judge", settings={"template": "edit"})]).values()
    assert needs({"prompt": "a", "image": paths}) is None
    assert "has no image to edit" in needs({"prompt": "a"})
    with pytest.raises(ConfigError, match="there is no image at gone"):
        ask(FakeServers([]), result[None], ["a"], [{"image": "gone.png"}], template="edit")


def test_a_custom_pattern_reads_the_answer_itself_if_necessary():
    for answer, pattern, expected in (
        ("**9** of *10*", r"\*\*(\d+)\*\*", 9),  # a pattern of the answer as it is
        ("[7,8]", r"\[(\d+),", 7),
        ("about 1,250 points", r"about ([\d.]+)", 1250),
    ):
        settings = dict(template="{prompt}", pattern=pattern, scale=(0, 2000))
        scores = ask(FakeServers([reply(answer)]), random_images(1), ["a"], **settings)
        np.testing.assert_allclose(scores, [expected / 2000], rtol=1e-6)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (tokens(Yes=0.6, No=0.3), 0.6),
        (tokens(Yes=0.4, yes=0.1, _Yes=0.05, YES=0.05, No=0.2, yesterday=0.1), 0.6),
        (tokens(**{"▁yes": 0.25, "No": 0.5}), 0.25),
        (tokens(No=0.9, Maybe=0.05), 0.0),
    ],
)
def test_the_probability_of_yes(answer, expected):
    server = FakeServers([answer])
    scores = ask(server, random_images(1), ["a red star"])
    np.testing.assert_allclose(scores, [expected], rtol=1e-6)
    (request,) = server.requests
    assert request["logprobs"] is True and request["top_logprobs"] == 20
    assert request["max_tokens"] == 1
    assert text_of(request) == 'Does this figure show "a red star"? Please answer yes or no.'


def test_missing_logprobs_are_an_error():
    first = {"token": "Yes", "logprob": -0.1, "top_logprobs": []}
    for logprobs in (None, {"content": []}, {"content": [first]}):
        server = FakeServers([reply("Yes", logprobs=logprobs)] * 9)
        with pytest.raises(RewardError, match="max-logprobs=20"):
            ask(server, random_images(1), ["a"])
        assert len(server.requests) == 1


COHERENCE_IS_MISSING = "Alignment Score (1-5): 3\nStyle Score (1-5): 4"


@pytest.mark.parametrize(
    ("settings", "answer", "what"),
    [
        ({"template": "rating"}, reply("I like it"), "'I like it'"),
        ({"template": "rating"}, reply("Score: 11"), "11 is not from 0 to 10"),
        ({"template": "rating"}, reply("Score: -1"), "-1 is not from 0 to 10"),
        ({"template": "rating"}, reply(None), "''"),
        ({"template": "rating"}, reply("Well, the", finish_reason="length"), "max_tokens = 64"),
        ({"template": "{prompt}", "pattern": r"(\w+)"}, reply("nine"), "'nine'"),
        ({"template": "{prompt}", "pattern": r"x|(\d)"}, reply("x"), "None"),
        ({"template": "unified_reward_2"}, reply(COHERENCE_IS_MISSING), "Coherence"),
        ({}, tokens(Maybe=0.5, The=0.3), "'maybe'"),
        # A model that thinks may reach max_tokens without an answer.
        ({"template": "ocr"}, reply(None, finish_reason="length"), "max_tokens = 512"),
    ],
)
def test_an_answer_without_a_score_is_repeated_with_the_next_seeds(settings, answer, what):
    if settings == {"template": "ocr"}:
        pytest.importorskip("rapidfuzz")
    server = FakeServers([answer] * 9)
    with pytest.raises(Stopped, match=what) as stopped:
        ask(server, random_images(1), ['a "cat"'], again=2, seed=5, **settings)
    assert A in str(stopped.value) and "cat" in str(stopped.value)
    assert [request["seed"] for request in server.requests] == [5, 6, 7]
    with pytest.raises(Stopped, match="1 attempt "):
        ask(FakeServers([answer]), random_images(1), ['a "cat"'], again=0, **settings)
    if settings == {"template": "rating"}:
        server = FakeServers([answer, reply("Score: 5")])
        assert ask(server, random_images(1), ["a cat"], **settings) == [0.5]


def test_failures_of_a_server_are_retried():
    for answer in (
        httpx.Response(500, json={"error": {"message": "out of memory"}}),
        httpx.Response(200, content=b"{"),
        httpx.Response(200, json={"choices": []}),
        httpx.Response(200, json={"choices": [{"message": {"content": ["x"]}}]}),
    ):
        server = FakeServers([answer, reply("Score: 5")])
        assert ask(server, random_images(1), ["a"], template="rating", again=0) == [0.5]


def test_a_refusal_has_the_servers_message():
    for body in (
        {"error": {"message": "The model is\nnot here", "type": "NotFoundError"}},  # OpenAI, vLLM
        {"detail": "The model is not here"},  # FastAPI, transformers serve
        {"error": "The model is not here"},
    ):
        server = FakeServers([httpx.Response(404, json=body)] * 9)
        with pytest.raises(RewardError, match=f"{A} .*'a' .*404: The model is not here"):
            ask(server, random_images(1), ["a"])
        assert len(server.requests) == 1


def test_the_model_is_the_only_one_or_must_be_there():
    server = FakeServers([reply("Score: 1")] * 2, models=("m", "n"))
    ask(server, random_images(1), ["a"], template="rating", model="n")
    assert server.requests[0]["model"] == "n"
    with pytest.raises(ConfigError, match=f"{A} .*'x'.*'m', 'n'"):
        ask(server, random_images(1), ["a"], model="x")
    with pytest.raises(ConfigError, match="'m', 'n'"):
        ask(server, random_images(1), ["a"])
    for wrong in (
        httpx.Response(200, json={"models": []}),
        httpx.Response(401, json={"error": "Unauthorized"}),
    ):
        with pytest.raises(ConfigError, match=A):
            ask(lambda request, wrong=wrong: wrong, random_images(1), ["a"])
    with pytest.raises(ConfigError, match="m, n"):
        choose_model({A: ["m"], B: ["n"]}, "")
    assert choose_model({A: ["m"], B: ["m"]}, "") == "m"


def test_a_server_that_starts_late_is_waited_for():
    failures = [httpx.Response(503, json={"error": "loading"})] * 3
    server = FakeServers([reply("Score: 4")])

    def late(request):
        return failures.pop() if failures else server(request)

    assert ask(late, random_images(1), ["a"], template="rating") == pytest.approx([0.4])
    assert not failures and len(server.requests) == 1


def test_the_token_is_that_of_the_environment(monkeypatch):
    monkeypatch.setenv("DIGEN_JUDGE_TOKEN", "secret")
    server = FakeServers([reply("Score: 1")])
    ask(server, random_images(1), ["a"], template="rating", servers=f"{A}/v1")
    assert server.tokens == ["Bearer secret"] * 2


def test_text_is_compared_as_by_the_reward_ocr():
    pytest.importorskip("rapidfuzz")
    prompts = ['a sign "OPEN now"'] * 4
    answers = {0: "open\nNOW!", 1: "opan now", 2: "", 3: "Open"}
    images = np.stack([np.full((4, 4, 3), i, np.uint8) for i in range(4)])
    server = FakeServers(lambda request: reply(answers[int(image_of(request)[0, 0, 0])]))
    scores = ask(server, images, prompts, template="ocr")
    # of the seven letters of "opennow" one is wrong, all are missing, three are missing
    np.testing.assert_allclose(scores, [1, 6 / 7, 0, 4 / 7], atol=1e-6)


def test_a_template_needs_fields_of_records():
    def needed(**settings):
        (needs,) = needs_of([RewardSettings("judge", settings=settings)]).values()
        return needs

    assert needed()({"prompt": "a"}) is None
    text = needed(template="{prompt}: {question}", pattern=r"(\d)")
    assert text({"prompt": "a", "question": "b"}) is None
    assert text({"prompt": "a"}) == "has no field 'question', which the judge's template has"
    for settings in ({"template": "ocr"}, {"template": "read", "score": "text"}, {"score": "text"}):
        assert needed(**settings)({"prompt": 'a sign "x"'}) is None
        assert "quotes no text" in needed(**settings)({"prompt": "a sign"})
    both = needs_of(
        [
            RewardSettings("judge", settings={"template": "ocr"}),
            RewardSettings("judge", settings={"template": "{question}"}, label="light"),
        ]
    )
    assert {title: needs({"prompt": "a"}) for title, needs in both.items()} == {
        "judge": needed(template="ocr")({"prompt": "a"}),
        "light": text({"prompt": "a"}),
    }
    assert both["light"]({"prompt": "a", "rewards": ["judge"]}) is None
    with pytest.raises(ConfigError, match="the prompt 'a' has no field 'b'"):
        ask(FakeServers([]), random_images(1), ["a"], template="{b}", pattern=r"(\d)")


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"servers": ()}, "servers"),
        ({"servers": ("localhost:8000",)}, "address of a judge"),
        ({"template": "unified"}, "template = 'unified'"),
        ({"template": "{prompt}"}, "pattern"),
        ({"template": "{prompt}", "pattern": "("}, r"pattern '\('"),
        ({"template": "{prompt}", "pattern": r"(\d)/(\d)"}, "2 groups"),
        ({"template": "rating", "scale": (1, 1)}, "scale"),
        ({"score": "maybe"}, "score is 'maybe'"),
        ({"format": "webp"}, "format is 'webp'"),
        ({"again": -1}, "again"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"modle": "x"}, "did you mean 'model'"),
    ],
)
def test_invalid_settings_are_refused(settings, field):
    with pytest.raises(ConfigError, match=field):
        resolve([RewardSettings("judge", settings={"servers": (A,)} | settings)])
