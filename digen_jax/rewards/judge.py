"""A judge's requests: a picture and a question each."""

import base64
import dataclasses
import functools
import importlib.util
import io
import json
import os
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from digen_jax.errors import ConfigError, check_range
from digen_jax.rewards import ocr
from digen_jax.rewards.http_client import FailoverClient, Request, parse_addresses
from digen_jax.rewards.judge_templates import TEMPLATES, TOP, Template, lacking, named, read
from digen_jax.rewards.request_log import recorder

TOKEN = "DIGEN_JUDGE_TOKEN"  # the environment's variable that holds the servers' token
MODELS, CHAT = "/v1/models", "/v1/chat/completions"
QUALITY = 95  # of JPEG, as UnifiedReward's own requests have it
ANSWER = 2**22  # bytes of an answer at most


@dataclasses.dataclass(frozen=True)
class Judge:
    """A reward that asks a judge. Each process that scores has its own connections; the first call opens them.

    Attributes:
      servers: addresses, such as "http://127.0.0.1:8000"; the one with the fewest requests is asked.
      model: its name as the servers list it; "": their only one.
      template: of the question, as it is used.
      temperature: of sampling.
      seed: of sampling; the next one where a request is repeated for an answer without a score.
      format: of the pictures that are sent, "png" or "jpeg".
      again: how often a request is repeated after answers without a score.
      attempt: seconds of one attempt.
      deadline: seconds of all attempts of a request.
      retries: attempts after the first.
      connections: requests at the same time, of each reward process.
    """

    servers: tuple[str, ...]
    model: str
    template: Template
    temperature: float
    seed: int
    format: str
    again: int
    attempt: float
    deadline: float
    retries: int
    connections: int

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """A score from 0 to 1 for each picture; of a clip the mean over every fourth frame.

        Raises:
          ConfigError: a server lacks the model, or a record lacks a field of the template.
          RewardError, Stopped: as `FailoverClient.post`, and where a server sends no logprobs.
        """
        return asked_of(_client(self), self, images, prompts, metadata)


class Client:
    """The connections of a judge, and the model that its servers have."""

    def __init__(self, judge: Judge, transport: httpx.BaseTransport | None = None, **waits: Any):
        self._client = FailoverClient(
            judge.servers,
            "judge",
            os.environ.get(TOKEN) or None,
            judge.attempt,
            judge.deadline,
            judge.retries,
            judge.connections,
            listener=recorder("judge"),
            transport=transport,
            **waits,
        )
        self._named, self._model = judge.model, ""

    def model(self, prompts: Sequence[str]) -> str:
        """The model to ask for, which is found out when the first prompts wait to be scored; raises as `Judge`."""
        if not self._model:
            answers = self._client.get_each(MODELS, "vllm serve, for example", prompts)
            models = {url: listed(url, content) for url, content in answers.items()}
            self._model = chosen(models, self._named)
        return self._model

    def score(self, judge: Judge, picture: np.ndarray, prompt: str, record: dict) -> float:
        """One picture's score; raises as `Judge`."""
        lacks = lacking(judge.template, record | {"prompt": prompt})
        if lacks is not None:
            raise ConfigError(f"the prompt {prompt!r} {lacks}")
        message = content(
            judge, self.model([prompt]), picture, judge.template.filled(prompt, record)
        )
        request = Request(
            CHAT,
            [prompt],
            ANSWER,
            "application/json",
            # at a temperature above 0 the same seed would give the same answer
            lambda unread: json.dumps(message | {"seed": judge.seed + unread}).encode(),
        )
        template, wanted = judge.template, ocr.quoted(prompt)
        return self._client.post(request, lambda found: read(found, template, wanted, judge.again))

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()


@functools.lru_cache(maxsize=8)
def _client(judge: Judge) -> Client:
    return Client(judge)


def asked_of(
    client: Client,
    judge: Judge,
    images: UInt8[np.ndarray, "b *t h w 3"],
    prompts: list[str],
    metadata: list[dict],
) -> Float32[np.ndarray, "b"]:
    """The scores that `Judge` returns, a request for each picture, several of them at the same time."""
    clips = [image[None] if image.ndim == 3 else image[:: ocr.FRAMES] for image in images]
    client.model(prompts)  # before the threads, each of which would ask for it
    threads = ThreadPoolExecutor(judge.connections, "judge")
    try:
        futures = [
            [threads.submit(client.score, judge, frame, prompt, record) for frame in clip]
            for clip, prompt, record in zip(clips, prompts, metadata, strict=True)
        ]
        scores = [np.mean([future.result() for future in clip]) for clip in futures]
    finally:  # after an error nothing else is asked, and what is under way is not waited for
        threads.shutdown(wait=False, cancel_futures=True)
    return np.array(scores, np.float32)


def content(judge: Judge, model: str, picture: np.ndarray, text: str) -> dict[str, Any]:
    """The request for a picture, without its seed; the picture comes before the text."""
    file = io.BytesIO()
    Image.fromarray(np.asarray(picture)).save(file, judge.format.upper(), quality=QUALITY)
    data = base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/{judge.format};base64,{data}"}},
        {"type": "text", "text": text},
    ]
    system, logprobs = judge.template.system, judge.template.score == "yes"
    return {
        "model": model,
        "messages": [{"role": "system", "content": system}] * bool(system)
        + [{"role": "user", "content": parts}],
        "max_tokens": judge.template.max_tokens,
        "temperature": judge.temperature,
    } | ({"logprobs": True, "top_logprobs": TOP} if logprobs else {})


def listed(url: str, content: bytes) -> list[str]:
    """The names of the models that a server has; raises ConfigError where it does not list them."""
    try:
        return [str(one["id"]) for one in json.loads(content)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{url} is no OpenAI-compatible server: its {MODELS} has another format"
        ) from error


def chosen(found: Mapping[str, Sequence[str]], model: str) -> str:
    """The model to ask for, from those of each server; "": the only one.

    Raises:
      ConfigError: a server lacks the model, or has several where none is named.
    """
    for url, models in found.items():
        names = ", ".join(map(repr, models)) or "none"
        if model and model not in models:
            raise ConfigError(f"judge {url} has no model {model!r}, but {names}: set model")
        if not model and len(models) != 1:
            raise ConfigError(f"judge {url} has the models {names}: name one by the setting model")
    if model:
        return model
    only = {models[0] for models in found.values()}
    if len(only) > 1:
        raise ConfigError(f"the judge's servers have different models: {', '.join(sorted(only))}")
    return only.pop()


FORMATS = ("png", "jpeg")
SCORES = ("pattern", "yes", "text")


def judge(
    servers: Sequence[str] = (),
    model: str = "",
    template: str = "alignment",
    score: str = "",
    pattern: Sequence[str] = (),
    scale: Sequence[int | float] = (),
    system: str = "",
    max_tokens: int = 0,
    temperature: float = 0.0,
    seed: int = 0,
    format: str = "png",
    again: int = 2,
    attempt: float = 120.0,
    deadline: float = 1800.0,
    retries: int = 8,
    connections: int = 16,
) -> Judge:
    """A reward by a judge; the environment's DIGEN_JUDGE_TOKEN is the token.

    The settings are the fields of `Judge`, and what its template is made of:

      template: the name of one in `TEMPLATES`, or a text with {prompt} or other fields of a prompt's record.
      score: "pattern", "yes" or "text", see `Template`; "": the template's, of a text of your own "pattern".
      pattern: a regular expression with one group, a number, or several such; (): the template's.
      scale: the numbers that become 0 and 1; (): the template's, of a text of your own 0 and 1.
      system: the system's message; "": the template's.
      max_tokens: of an answer; 0: the template's, of a text of your own 512 (for "yes" 1).

    Raises:
      ConfigError: names the setting that is missing or wrong.
    """
    if format not in FORMATS:
        raise ConfigError(f"the reward 'judge' has format = {format!r}: set it to png or jpeg")
    for name, value, least in (("again", again, 0), ("temperature", temperature, 0)):
        check_range(name, value, least)
    given = dict(score=score, patterns=pattern, scale=scale, system=system, max_tokens=max_tokens)
    asked = parse_addresses(servers, "judge", "judge", "http://127.0.0.1:8000"), model
    sampling = _template(template, given), temperature, seed, format
    return Judge(*asked, *sampling, again, attempt, deadline, retries, connections)


def needs(record: dict, settings: Mapping[str, Any]) -> str | None:
    """What a prompt record lacks for a judge with these settings, as the end of a sentence about it; None: nothing."""
    template = named(settings.get("template", "alignment"))
    score = template.score or settings.get("score", "")
    return lacking(dataclasses.replace(template, score=score), record)


def _template(name: str, given: Mapping[str, Any]) -> Template:
    """The template with a name, or of a user's text, with what is given instead of its own."""
    found = named(name)
    if found.text == name and re.fullmatch(r"\w*", name):
        raise ConfigError(
            f"the reward 'judge' has template = {name!r}: name one of {', '.join(TEMPLATES)}, or write a text, "
            "such as 'Rate from 1 to 10 how well this shows: {prompt}'"
        )
    given = dict(given)
    if isinstance(given["patterns"], str):
        given["patterns"] = (given["patterns"],)
    kept = {name: value for name, value in given.items() if value not in ("", 0, (), [])}
    if "patterns" in kept:
        kept["patterns"] = tuple(kept["patterns"])
    if "scale" in kept:
        kept["scale"] = _scale(kept["scale"])
    found = dataclasses.replace(found, **kept)
    score = found.score or "pattern"
    tokens = found.max_tokens or (1 if score == "yes" else 512)
    found = dataclasses.replace(found, score=score, max_tokens=tokens)
    _check(found)
    return found


def _scale(given: Sequence[int | float]) -> tuple[float, float]:
    """The two numbers of a scale; raises ConfigError if they are none, or equal."""
    if len(given) != 2 or given[0] == given[1] or not np.isfinite(given).all():
        raise ConfigError(
            f"the reward 'judge' has scale = {given!r}: give it two numbers, such as (1, 10)"
        )
    return float(given[0]), float(given[1])


def _check(template: Template) -> None:
    """Refuses a template whose answers could not be read."""
    where = "the reward 'judge' has"
    if template.score not in SCORES:
        raise ConfigError(f"{where} score = {template.score!r}: set it to {', '.join(SCORES)}")
    check_range("max_tokens", template.max_tokens, 1)
    if template.score == "text" and importlib.util.find_spec("rapidfuzz") is None:
        raise ConfigError(
            "the judge's score 'text' needs rapidfuzz: run pip install -r requirements-reward.txt"
        )
    if template.score == "pattern" and not template.patterns:
        raise ConfigError(
            f"{where} no pattern: give it a regular expression with one group, a number, such as "
            r"'Score: (\d+)'"
        )
    for pattern in template.patterns:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ConfigError(f"{where} the pattern {pattern!r}: {error}") from error
        if groups != 1:
            raise ConfigError(
                f"{where} the pattern {pattern!r} with {groups} groups: it must have one, the number"
            )
