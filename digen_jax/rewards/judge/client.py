"""A judge's requests: a picture and a question each."""

import base64
import dataclasses
import functools
import io
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from digen_jax.errors import ConfigError
from digen_jax.rewards import ocr
from digen_jax.rewards.exchanges import noting
from digen_jax.rewards.judge.reading import TOP, read
from digen_jax.rewards.judge.templates import Template, lacking
from digen_jax.rewards.service.asking import Asker, Request

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
          RewardMistake, Stopped: as `Asker.ask`, and where a server sends no logprobs.
        """
        return asked_of(_client(self), self, images, prompts, metadata)


class Client:
    """The connections of a judge, and the model that its servers have."""

    def __init__(self, judge: Judge, transport: httpx.BaseTransport | None = None, **waits: Any):
        self._asker = Asker(
            judge.servers,
            "judge",
            os.environ.get(TOKEN) or None,
            judge.attempt,
            judge.deadline,
            judge.retries,
            judge.connections,
            listen=noting("judge"),
            transport=transport,
            **waits,
        )
        self._named, self._model = judge.model, ""

    def model(self, prompts: Sequence[str]) -> str:
        """The model to ask for, which is found out when the first prompts wait to be scored; raises as `Judge`."""
        if not self._model:
            answers = self._asker.each(MODELS, "vllm serve, for example", prompts)
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
        return self._asker.ask(request, lambda found: read(found, template, wanted, judge.again))

    def close(self) -> None:
        """Closes the connections."""
        self._asker.close()


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
