"""Templates of the reward "judge", which are in judge_templates.toml, and parsing of scores from answers."""

import dataclasses
import json
import math
import pathlib
import re
import tomllib
import unicodedata
from collections.abc import Callable
from typing import Any

from digen_jax.rewards import ocr
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import RetryableError, UnusableAnswer

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")  # a field of the prompt's record, such as {prompt}
TOP = 20  # number of logprobs per token: vLLM's default maximum
DASHES = dict.fromkeys(map(ord, "‐‑‒–—−"), "-")
MARKS = r"\\?[*`~]+|(?<![^\W_])_+|_+(?![^\W_])"
SHOWN = 200  # maximum characters of an answer in an error


@dataclasses.dataclass(frozen=True)
class Template:
    """Question about an image, and parsing of the score from the answer."""

    text: str  # question; {prompt} and other fields of the prompt's record are filled in
    # "pattern" is the mean of the numbers that match `patterns` in the answer; "yes" the probability that the answer
    # starts with yes; "text" the similarity of the answer and the text quoted in the prompt
    score: str = ""
    patterns: tuple[str, ...] = ()  # regular expressions with one group each, a number
    scale: tuple[float, float] = (0.0, 1.0)  # the numbers that map to 0 and 1
    max_tokens: int = 0  # maximum tokens of the answer
    system: str = ""  # system message, if any

    def fill(self, prompt: str, record: dict[str, Any]) -> str:
        """Returns the question for a prompt. Raises KeyError if the record lacks a field."""
        known = record | {"prompt": prompt}
        return FIELD.sub(lambda found: str(known[found[1]]), self.text)

    def lacking(self, record: dict[str, Any]) -> str | None:
        """Describes the missing input of a record, such as "has no field ...", or returns None."""
        if self.score == "text":
            return ocr.needs(record)
        missing = [name for name in FIELD.findall(self.text) if name not in record]
        return f"has no field {missing[0]!r}, which the judge's template has" if missing else None


def _read_templates() -> dict[str, Template]:
    text = pathlib.Path(__file__).with_suffix(".toml").read_text("utf-8")
    templates: dict[str, dict[str, Any]] = tomllib.loads(text)
    for fields in templates.values():
        fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return {name: Template(**fields) for name, fields in templates.items()}


TEMPLATES = _read_templates()


def find_template(name: str) -> Template:
    """Returns the named template, or one for a custom text."""
    return TEMPLATES.get(name, Template(name))


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


def plain(answer: str, scale: tuple[float, float]) -> str:
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
