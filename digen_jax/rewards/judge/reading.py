"""What the answers of an OpenAI-compatible server say."""

import json
import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from digen_jax.rewards import ocr
from digen_jax.rewards.judge.templates import Template
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.service.asking import Passing, Unreadable

TOP = 20  # tokens of which a server tells the logprobs: the most that vLLM tells by default
DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
MARKS = r"\\?[*`~]+|(?<![^\W_])_+|_+(?![^\W_])"
SHOWN = 200  # characters of an answer in an error


def read(content: bytes, template: Template, wanted: str | None, again: int) -> float:
    """The score in an answer, from 0 to 1.

    Args:
      content: of the answer.
      template: of the question.
      wanted: the text that is to be read in the picture, for `score` "text".
      again: how often the request is repeated after answers without a score.

    Raises:
      Passing: the answer is no chat completion; Unreadable: it has no score.
      RewardMistake: it has no logprobs.
    """
    try:
        choice = json.loads(content)["choices"][0]
        answer = choice["message"].get("content") or ""
        if not isinstance(answer, str):
            raise TypeError("content")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Passing("sent an answer that is no chat completion", down=True) from error
    cut = choice.get("finish_reason") == "length"
    if template.score == "text" and not (cut and not answer):
        return ocr.of_text("".join(answer.split()), "".join(str(wanted).split()))

    def unreadable(what: str) -> Unreadable:
        short = cut and template.score != "yes"
        length = f", cut off at max_tokens = {template.max_tokens}" if short else ""
        advice = (
            "change the judge's template, pattern or max_tokens, and the same command continues"
        )
        return Unreadable(f"answered {answer[:SHOWN]!r}{length}, {what}", again, advice)

    if template.score == "text":  # what was cut off are a model's thoughts
        raise unreadable("before it says anything")
    if template.score == "yes":
        return probability(choice, unreadable)
    return by_patterns(answer, template, unreadable)


def by_patterns(answer: str, template: Template, unreadable: Callable[[str], Unreadable]) -> float:
    """The mean of the numbers that patterns find last in an answer, on the template's scale.

    A pattern reads the answer's plain text (`plain`), or the answer as it is where it finds nothing in that.

    Raises:
      Unreadable: a pattern finds no number, or one outside of the scale.
    """
    low, high = template.scale
    numbers = []
    for pattern in template.patterns:
        texts = (plain(answer, template.scale), answer)
        found = next(
            filter(None, (list(re.finditer(pattern, t, re.IGNORECASE)) for t in texts)), []
        )
        if not found:
            raise unreadable(f"in which the pattern {pattern!r} finds no number")
        try:
            number = float(found[-1][1])
        except (TypeError, ValueError) as error:
            raise unreadable(f"in which {pattern!r} finds {found[-1][1]!r}, no number") from error
        if not min(low, high) <= number <= max(low, high):
            raise unreadable(f"whose number {number:g} is not from {low:g} to {high:g}")
        numbers.append(number)
    return (sum(numbers) / len(numbers) - low) / (high - low)


def plain(answer: str, scale: tuple[float, float]) -> str:
    """An answer without Markdown's emphasis and code marks, in ASCII's colons, digits and signs, with decimal points.

    Args:
      answer: such as "**Score**：7,5".
      scale: of its number; a comma between digits is a decimal one, or where the scale reaches 1000 one of thousands.
    """
    text = unicodedata.normalize("NFKC", answer).translate(DASHES)
    text = re.sub(MARKS, "", text)
    return re.sub(r"(?<=\d),(?=\d)", "" if max(map(abs, scale)) >= 1000 else ".", text)


def probability(choice: dict[str, Any], unreadable: Callable[[str], Unreadable]) -> float:
    """The probability that the answer's first token is yes, in any of its spellings.

    It is not divided by the sum for yes and no, as a model that says something else is not sure. Without yes among
    the likeliest tokens, and with no, it is 0: too low by less than the least of their probabilities.

    Source: VQAScore, P("Yes") of the first token; UniRL adds "Yes", "yes", and both with a space before
    (Tencent-Hunyuan/UniRL, unirl/reward/local/geneval2.py, commit 2f357c7).

    Raises:
      Unreadable: neither yes nor no is among the likeliest tokens.
      RewardMistake: the answer has no logprobs.
    """
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        likely = [(spelled(one["token"]), math.exp(one["logprob"])) for one in tokens]
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RewardMistake(_no_logprobs()) from error
    if not likely:
        raise RewardMistake(_no_logprobs())
    if not any(token in ("yes", "no") for token, _ in likely):
        first = max(likely, key=lambda one: one[1])[0]
        raise unreadable(
            f"of whose first token neither yes nor no is among the {len(likely)} likeliest (first: {first!r})"
        )
    chance = math.fsum(chance for token, chance in likely if token == "yes")
    if not chance < 1.01:  # NaN, too; sums of rounded logprobs are a little above 1
        raise unreadable(f"of whose first token yes has a probability of {chance:g}")
    return min(1.0, chance)


def spelled(token: str) -> str:
    """A token in lower case without spaces, those of SentencePiece included."""
    return token.replace("▁", " ").strip().lower()


def _no_logprobs() -> str:
    return (
        "the judge's server sends no top_logprobs of its answer's first token, which score = 'yes' needs: start vLLM "
        f"with --max-logprobs={TOP} or more, ask sglang, which sends them without an option, or set score = 'pattern' "
        "for a server that has none, such as transformers serve"
    )
