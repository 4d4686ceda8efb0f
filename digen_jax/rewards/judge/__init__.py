"""The reward "judge": a vision-language model behind an OpenAI-compatible server says how good each picture is.

`templates` has the questions, `client` asks them, `reading` makes scores of the answers.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from digen_jax.errors import ConfigError, check_range
from digen_jax.rewards.judge.client import Judge
from digen_jax.rewards.judge.templates import TEMPLATES, Template, lacking, named
from digen_jax.rewards.service.http import addresses

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
    asked = addresses(servers, "judge", "judge", "http://127.0.0.1:8000"), model
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
