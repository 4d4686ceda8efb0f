"""Reward "judge": a vision-language model (VLM) behind an OpenAI-compatible server rates each image.

The questions are in judge_templates.toml.
"""

import base64
import dataclasses
import functools
import importlib.util
import io
import json
import math
import os
import pathlib
import re
import tomllib
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from jaxtyping import Float32, UInt8
from PIL import Image

from digen_jax.errors import ConfigError, check_choice, check_range, user_input
from digen_jax.images import read_image, source_images
from digen_jax.rewards import ocr
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import (
    FailoverClient,
    Request,
    RetryableError,
    UnusableAnswer,
    parse_addresses,
)

TOKEN = "DIGEN_JUDGE_TOKEN"  # environment variable with the bearer token
MODELS, CHAT = "/v1/models", "/v1/chat/completions"
QUALITY = 95  # JPEG quality, as in UnifiedReward's requests
ANSWER = 2**22  # maximum response size in bytes
FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")  # a field of the prompt's record, such as {prompt}
SOURCE, GENERATED = "{source}", "{generated}"  # places of images in a template's text
TOP = 20  # number of logprobs per token: vLLM's default maximum
DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
MARKS = r"\\?[*`~]+|(?<![^\W_])_+|_+(?![^\W_])"
SHOWN = 200  # maximum characters of an answer in an error


@dataclasses.dataclass(frozen=True)
class Template:
    """Question about an image, and parsing of the score from the answer."""

    # question; {prompt} and other fields of the prompt's record are filled in, {source} becomes its source images and
    # {generated} the image to rate, which otherwise precedes the text
    text: str
    # "pattern" is the mean of the numbers that match `patterns` in the answer; "yes" the probability that the answer
    # starts with yes; "text" the similarity of the answer and the text quoted in the prompt
    score: str = ""
    patterns: Sequence[str] = ()  # regular expressions with one group each, a number
    scale: Sequence[float] = (0.0, 1.0)  # the numbers that map to 0 and 1
    max_tokens: int = 0  # maximum tokens of the answer
    system: str = ""  # system message, if any

    def fill(
        self,
        prompt: str,
        record: dict[str, Any],
        show: Callable[[Image.Image], dict],
        image: Image.Image,
    ) -> list[dict]:
        """Returns the message about an image; `show` converts images. Raises KeyError if the record lacks a field."""
        known, message = record | {"prompt": prompt}, []
        text = self.text if GENERATED in self.text else GENERATED + self.text
        for part in re.split(f"({re.escape(SOURCE)}|{re.escape(GENERATED)})", text):
            if part == SOURCE:
                with user_input():
                    message += [show(read_image(source)) for source in source_images(record)]
            elif part == GENERATED:
                message.append(show(image))
            elif part.strip():
                filled = FIELD.sub(lambda found: str(known[found[1]]), part)
                message.append({"type": "text", "text": filled})
        return message

    def lacking(self, record: dict[str, Any]) -> str | None:
        """Describes the missing input of a record, such as "has no field ...", or returns None."""
        if self.score == "text":
            return ocr.needs(record)
        if SOURCE in self.text and not source_images(record):
            return "has no image to edit, which the judge's template shows"
        names = FIELD.findall(self.text.replace(SOURCE, "").replace(GENERATED, ""))
        missing = [name for name in names if name not in record]
        return f"has no field {missing[0]!r}, which the judge's template has" if missing else None


FILE = pathlib.Path(__file__).with_name("judge_templates.toml")
TEMPLATES = {
    name: Template(**fields) for name, fields in tomllib.loads(FILE.read_text("utf-8")).items()
}


def find_template(name: str) -> Template:
    """Returns the named template, or one for a custom text."""
    return TEMPLATES.get(name, Template(name))


@dataclasses.dataclass(frozen=True)
class Judge:
    """VLM judge reward. Each scoring process opens connections at its first call.

    The environment variable DIGEN_JUDGE_TOKEN is the bearer token.
    """

    servers: Sequence[str] = ()  # the one with the fewest requests in flight is used
    model: str = ""  # name on the servers; empty means their only model
    # name in `TEMPLATES`, or a text with {prompt} or other fields of a prompt's record
    template: str = "alignment"
    # "pattern", "yes" or "text", see `Template`; empty means the template's, or "pattern" for a custom text
    score: str = ""
    # one or several regular expressions with one group, a number; empty means the template's
    pattern: Sequence[str] = ()
    # the numbers that map to 0 and 1; empty means the template's, or (0, 1) for a custom text
    scale: Sequence[int | float] = ()
    system: str = ""  # system message; empty means the template's
    # maximum tokens of an answer; 0 means the template's, for a custom text 512 ("yes": 1)
    max_tokens: int = 0
    temperature: float = 0.0  # sampling temperature
    seed: int = 0  # sampling seed; incremented for each retry after an answer without a score
    format: str = "png"  # of the images sent, "png" or "jpeg"
    again: int = 2  # maximum retries after answers without a score
    attempt: float = 120.0  # timeout of one attempt, in seconds
    deadline: float = 1800.0  # timeout of all attempts of a request, in seconds
    retries: int = 8  # attempts after the first
    connections: int = 16  # requests in flight per reward process

    def __post_init__(self):
        """Raises ConfigError if a setting is missing or invalid."""
        check_choice("format", self.format, ("png", "jpeg"))
        check_range("again", self.again, 0)
        check_range("temperature", self.temperature, 0)
        scale = tuple(self.scale)
        if scale and (len(scale) != 2 or scale[0] == scale[1] or not np.isfinite(scale).all()):
            raise ConfigError(
                f"the reward 'judge' has scale = {self.scale!r}: use two, such as (1, 10)"
            )
        pattern = (self.pattern,) if isinstance(self.pattern, str) else tuple(self.pattern)
        servers = parse_addresses(self.servers, "judge", "http://127.0.0.1:8000")
        for name, value in (("servers", servers), ("pattern", pattern), ("scale", scale)):
            object.__setattr__(self, name, value)
        _check_template(self.question)

    @functools.cached_property
    def question(self) -> Template:
        """Template with all settings."""
        found = find_template(self.template)
        if found.text == self.template and re.fullmatch(r"\w*", self.template):
            raise ConfigError(
                f"the reward 'judge' has template = {self.template!r}: use one of {', '.join(TEMPLATES)}, or your own "
                f"text, such as 'Rate from 1 to 10 how well this shows: {{prompt}}'"
            )
        score = self.score or found.score or "pattern"
        return Template(
            found.text,
            score,
            tuple(self.pattern) or found.patterns,
            tuple(map(float, self.scale)) or found.scale,
            self.max_tokens or found.max_tokens or (1 if score == "yes" else 512),
            self.system or found.system,
        )

    def __call__(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Returns a score in [0, 1] for each image; for a clip, the mean over every fourth frame.

        Raises:
          ConfigError: A server lacks the model, or a record lacks a field of the template.
          RewardError, Stopped: See `FailoverClient.post`. Also raised if a server sends no logprobs.
        """
        return _client(self).score(images, prompts, metadata)


class Client:
    """Connections of a judge, and the model of its servers; `options` are those of `FailoverClient`."""

    def __init__(self, judge: Judge, **options: Any):
        self._judge, self._model = judge, ""
        token = os.environ.get(TOKEN) or None
        limits = judge.attempt, judge.deadline, judge.retries, judge.connections
        self._client = FailoverClient(judge.servers, "judge", token, *limits, **options)

    def score(
        self, images: UInt8[np.ndarray, "b *t h w 3"], prompts: list[str], metadata: list[dict]
    ) -> Float32[np.ndarray, "b"]:
        """Scores images as described in `Judge`; sends one request per image, several concurrently."""
        clips = [image[None] if image.ndim == 3 else image[:: ocr.FRAMES] for image in images]
        if not self._model:  # before the threads start, to request it only once
            answers = self._client.get_each(MODELS, "vllm serve, for example", prompts)
            models = {url: parse_models(url, content) for url, content in answers.items()}
            self._model = choose_model(models, self._judge.model)
        threads = ThreadPoolExecutor(self._judge.connections, "judge")
        try:
            futures = [
                [threads.submit(self._score, frame, prompt, record) for frame in clip]
                for clip, prompt, record in zip(clips, prompts, metadata, strict=True)
            ]
            scores = [np.mean([future.result() for future in clip]) for clip in futures]
        finally:  # after an error, pending requests are canceled and those in flight are abandoned
            threads.shutdown(wait=False, cancel_futures=True)
        return np.array(scores, np.float32)

    def _score(self, image: np.ndarray, prompt: str, record: dict) -> float:
        """Returns the score of one image."""
        judge, template = self._judge, self._judge.question
        if (lacks := template.lacking(record | {"prompt": prompt})) is not None:
            raise ConfigError(f"the prompt {prompt!r} {lacks}")

        def show(image: Image.Image) -> dict:
            file = io.BytesIO()
            image.save(file, judge.format.upper(), quality=QUALITY)
            data = base64.b64encode(file.getvalue()).decode()
            url = f"data:image/{judge.format};base64,{data}"
            return {"type": "image_url", "image_url": {"url": url}}

        content = template.fill(prompt, record, show, Image.fromarray(np.asarray(image)))
        system = [{"role": "system", "content": template.system}] if template.system else []
        message = {
            "model": self._model,
            "messages": [*system, {"role": "user", "content": content}],
            "max_tokens": template.max_tokens,
            "temperature": judge.temperature,
        }
        if template.score == "yes":
            message |= {"logprobs": True, "top_logprobs": TOP}

        def body(unusable: int) -> bytes:
            # With temperature > 0, the same seed would repeat the answer.
            return json.dumps(message | {"seed": judge.seed + unusable}).encode()

        text = ocr.quoted(prompt)
        return self._client.post(
            Request(CHAT, [prompt], ANSWER, "application/json", body),
            lambda answer: read_score(answer, template, text, judge.again),
        )


@functools.lru_cache(maxsize=8)
def _client(judge: Judge) -> Client:
    return Client(judge)


def parse_models(url: str, content: bytes) -> list[str]:
    """Returns the names of a server's models. Raises ConfigError if they are not listed."""
    try:
        return [str(one["id"]) for one in json.loads(content)["data"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ConfigError(f"{url} is not an OpenAI-compatible server, by its {MODELS}") from error


def choose_model(found: Mapping[str, Sequence[str]], model: str) -> str:
    """Returns the model to use, from the models of each server. An empty `model` means the only one.

    Raises:
      ConfigError: A server lacks the model, or has several and `model` is empty.
    """
    for url, models in found.items():
        names = ", ".join(map(repr, models)) or "none"
        if model and model not in models:
            raise ConfigError(f"judge {url} has no model {model!r}, but {names}: set model")
        if not model and len(models) != 1:
            raise ConfigError(f"judge {url} has the models {names}: choose one by setting model")
    only = {model} if model else {models[0] for models in found.values()}
    if len(only) > 1:
        raise ConfigError(f"the judge's servers have different models: {', '.join(sorted(only))}")
    return only.pop()


def needs(record: dict, settings: Mapping[str, Any]) -> str | None:
    """Describes the missing input of a record, such as "has no field ...", or returns None."""
    template = find_template(settings.get("template", "alignment"))
    score = settings.get("score") or template.score
    return dataclasses.replace(template, score=score).lacking(record)


def _check_template(template: Template) -> None:
    """Rejects a template with unparseable answers."""
    check_choice("score", template.score, ("pattern", "yes", "text"))
    check_range("max_tokens", template.max_tokens, 1)
    if template.score == "text" and importlib.util.find_spec("rapidfuzz") is None:
        install = "run pip install -r requirements-reward.txt"
        raise ConfigError(f"the judge's score 'text' needs rapidfuzz: {install}")
    if template.score == "pattern" and not template.patterns:
        example = r"with one group for a number, such as 'Score: (\d+)'"
        raise ConfigError(f"the reward 'judge' has no pattern: give a regular expression {example}")
    for pattern in template.patterns:
        given = f"the reward 'judge' has the pattern {pattern!r}"
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ConfigError(f"{given}: {error}") from error
        if groups != 1:
            raise ConfigError(f"{given} with {groups} groups: it must have one, the number")


def read_score(content: bytes, template: Template, quoted: str | None, again: int) -> float:
    """Parses the score of an answer, in [0, 1].

    `quoted` is the text that must be readable in the image, for the score "text"; `again` is the maximum number of
    retries after answers without a score.

    Raises:
      RetryableError: The answer is not a chat completion.
      UnusableAnswer: The answer has no score.
      RewardError: The answer has no logprobs.
    """
    try:
        choice = json.loads(content)["choices"][0]
        answer = choice["message"].get("content") or ""
        if not isinstance(answer, str):
            raise TypeError("content")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RetryableError("sent an answer that is not a chat completion", down=True) from error
    truncated = choice.get("finish_reason") == "length"

    def unusable(what: str) -> UnusableAnswer:
        short = truncated and template.score != "yes"
        length = f", cut off at max_tokens = {template.max_tokens}" if short else ""
        advice = "change the template, pattern or max_tokens; then the same command continues"
        return UnusableAnswer(f"answered {answer[:SHOWN]!r}{length}, {what}", again, advice)

    if template.score == "text":
        if truncated and not answer:  # only reasoning tokens were generated
            raise unusable("which is empty")
        return ocr.of_text("".join(answer.split()), "".join(str(quoted).split()))
    if template.score == "yes":
        return probability_of_yes(choice, unusable)
    return by_patterns(answer, template, unusable)


def by_patterns(answer: str, template: Template, unusable: Callable[[str], Exception]) -> float:
    """Returns the mean of the last numbers that match the patterns in an answer, normalized by the template's scale.

    Each pattern is applied to the answer's plain text (`plain`), and to the raw answer if there is no match.

    Raises:
      UnusableAnswer: A pattern matches no number, or one outside of the scale.
    """
    low, high = template.scale
    numbers = []
    for pattern in template.patterns:
        texts = (plain(answer, template.scale), answer)
        matches = (list(re.finditer(pattern, text, re.IGNORECASE)) for text in texts)
        found = next(filter(None, matches), [])
        if not found:
            raise unusable(f"in which the pattern {pattern!r} finds no number")
        try:
            number = float(found[-1][1])
        except (TypeError, ValueError) as error:
            raise unusable(f"in which {pattern!r} finds {found[-1][1]!r}, not a number") from error
        if not min(low, high) <= number <= max(low, high):
            raise unusable(f"whose number {number:g} is not from {low:g} to {high:g}")
        numbers.append(number)
    return (sum(numbers) / len(numbers) - low) / (high - low)


def plain(answer: str, scale: Sequence[float]) -> str:
    """Removes Markdown emphasis and code marks, and converts colons, digits, signs and points to ASCII.

    A comma between digits is a decimal comma, or a thousands separator if the scale, the number's range, reaches 1000.
    """
    text = unicodedata.normalize("NFKC", answer).translate(DASHES)
    text = re.sub(MARKS, "", text)
    return re.sub(r"(?<=\d),(?=\d)", "" if max(map(abs, scale)) >= 1000 else ".", text)


def probability_of_yes(choice: dict[str, Any], unusable: Callable[[str], UnusableAnswer]) -> float:
    """Returns the probability that the answer's first token is yes, in any spelling.

    It is not normalized by the sum for yes and no, because other answers mean that the model is uncertain. If only no
    is among the top tokens, it is 0: an underestimate by less than the smallest of their probabilities.

    Source: VQAScore, P("Yes") of the first token; UniRL adds "Yes", "yes", and both with a leading space
    (Tencent-Hunyuan/UniRL, unirl/reward/local/geneval2.py, commit 2f357c7).

    Raises:
      UnusableAnswer: Neither yes nor no is among the top tokens.
      RewardError: The answer has no logprobs.
    """
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        likely = [(normalize(one["token"]), math.exp(one["logprob"])) for one in tokens]
        first = max(likely, key=lambda one: one[1])[0]
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RewardError(
            "the judge's server sends no top_logprobs of the first token, which score = 'yes' needs: start vLLM with "
            f"--max-logprobs={TOP} or more, use sglang, or set score = 'pattern', as for transformers serve"
        ) from error
    if not any(token in ("yes", "no") for token, _ in likely):
        raise unusable(f"with neither yes nor no in the {len(likely)} top tokens ({first!r}, ...)")
    probability = math.fsum(one for token, one in likely if token == "yes")
    if not probability < 1.01:  # also catches NaN; sums of rounded logprobs may slightly exceed 1
        raise unusable(f"of whose first token yes has a probability of {probability:g}")
    return min(1.0, probability)


def normalize(token: str) -> str:
    """Returns a token in lower case without spaces, including SentencePiece's."""
    return token.replace("▁", " ").strip().lower()
