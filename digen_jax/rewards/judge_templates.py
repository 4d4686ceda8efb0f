"""What a judge is asked, and how its answer is read: templates that have a name, and those of users.

"ocr" asks as verl-omni's `genrm_ocr` does (verl-project/verl-omni, verl_omni/utils/reward_score/genrm_ocr.py, commit
1384a41). "alignment" is VQAScore's question (Lin et al., arXiv 2404.01291; linzhiqiu/t2v_metrics,
t2v_metrics/models/vqascore_models/gpt4v_model.py, commit 0ab6f3e). "unified_reward" and "unified_reward_2" are the
pointwise templates of UnifiedReward (Wang et al., arXiv 2503.05236; CodeGoat24/UnifiedReward, folder inference_qwen):
those of image_generation/qwen_point_score_image_generation.py, commit ed52f98, and of
UnifiedReward-2.0-inference/point_score_ACS_image_generation.py, commit a759534, each for the models that were trained
with it. "rating" is this project's.
"""

import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from digen_jax.rewards import ocr
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import RetryableError, UnusableAnswer

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")  # such as {prompt}: of the prompt's record
NUMBER = r"([-+]?\d+(?:\.\d+)?)"


@dataclasses.dataclass(frozen=True)
class Template:
    """A question about a picture, and how its answer becomes a score.

    Attributes:
      text: the question; {prompt}, and any other field of a prompt's record, is filled in.
      score: "pattern": the numbers that patterns find in the answer; "yes": the probability that the answer begins
        with yes; "text": how well the answer is the text that the prompt quotes.
      patterns: regular expressions with one group each, a number; the score is the mean of these numbers.
      scale: the numbers that become 0 and 1.
      max_tokens: of the answer.
      system: the system's message; "": none.
    """

    text: str
    score: str = ""
    patterns: tuple[str, ...] = ()
    scale: tuple[float, float] = (0.0, 1.0)
    max_tokens: int = 0
    system: str = ""

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of a record that the text has, each once."""
        return tuple(dict.fromkeys(FIELD.findall(self.text)))

    def filled(self, prompt: str, record: dict[str, Any]) -> str:
        """The question about a picture of a prompt.

        Raises:
          KeyError: the record lacks a field.
        """
        known = record | {"prompt": prompt}
        return FIELD.sub(lambda found: str(known[found[1]]), self.text)


def lines(*texts: str) -> str:
    """Texts, a line each."""
    return "\n".join(texts)


def axes(names: Sequence[str]) -> tuple[str, ...]:
    """The patterns of scores such as "Style Score (1-5): 3.5"."""
    return tuple(rf"{name}\s+Score\s*(?:\(1-5\))?\s*:\s*{NUMBER}" for name in names)


TEMPLATES = {
    "alignment": Template(
        'Does this figure show "{prompt}"? Please answer yes or no.', score="yes", max_tokens=1
    ),
    "rating": Template(
        lines(
            "This picture was made for the following prompt:",
            "{prompt}",
            "Rate from 0 to 10 how good the picture is: whether all that the prompt asks for is there and nothing "
            "is wrong, and whether it is sharp, natural and pleasing.",
            "Answer by one line, with a number in place of X:",
            "Score: X",
        ),
        score="pattern",
        patterns=(rf"Score\s*:\s*{NUMBER}",),
        scale=(0.0, 10.0),
        max_tokens=64,
    ),
    "ocr": Template(
        "Please output only the text content from the image without any additional descriptions or formatting.",
        score="text",
        max_tokens=512,
        system="You are a helpful assistant.",
    ),
    "unified_reward": Template(
        lines(
            "You are given a text caption and a generated image based on that caption. Your task is to evaluate this "
            "image based on two key criteria:",
            "1. Alignment with the Caption: Assess how well this image aligns with the provided caption. Consider the "
            "accuracy of depicted objects, their relationships, and attributes as described in the caption.",
            "2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
            "preservation, color accuracy, and overall aesthetic appeal.",
            "Extract key elements from the provided text caption, evaluate their presence in the generated image using "
            "the format: 'element (type): value' (where value=0 means not generated, and value=1 means generated), "
            "and assign a score from 1 to 5 after 'Final Score:'.",
            "Your task is provided as follows:",
            "Text Caption: [{prompt}]",
        ),
        score="pattern",
        patterns=(rf"Final Score\s*:\s*{NUMBER}",),
        scale=(1.0, 5.0),
        max_tokens=512,
    ),
    "unified_reward_2": Template(
        lines(
            "You are presented with a generated image and its associated text caption. Your task is to analyze the "
            "image across multiple dimensions in relation to the caption. Specifically:",
            "Provide overall assessments for the image along the following axes (each rated from 1 to 5):",
            "- Alignment Score: How well the image matches the caption in terms of content.",
            "- Coherence Score: How logically consistent the image is (absence of visual glitches, object "
            "distortions, etc.).",
            "- Style Score: How aesthetically appealing the image looks, regardless of caption accuracy.",
            "",
            "Output your evaluation using the format below:",
            "",
            "Alignment Score (1-5): X",
            "Coherence Score (1-5): Y",
            "Style Score (1-5): Z",
            "",
            "Your task is provided as follows:",
            "Text Caption: [{prompt}]",
        ),
        score="pattern",
        patterns=axes(("Alignment", "Coherence", "Style")),
        scale=(1.0, 5.0),
        max_tokens=512,
    ),
}


def named(template: str) -> Template:
    """The template with a name, else that of a user's text."""
    return TEMPLATES.get(template, Template(template))


def lacking(template: Template, record: dict[str, Any]) -> str | None:
    """What a record lacks for a template, as the end of a sentence about its prompt; None: nothing."""
    if template.score == "text":
        return ocr.needs(record)
    missing = [name for name in template.fields if name not in record]
    return f"has no field {missing[0]!r}, which the judge's template has" if missing else None


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
      RetryableError: the answer is no chat completion; UnusableAnswer: it has no score.
      RewardError: it has no logprobs.
    """
    try:
        choice = json.loads(content)["choices"][0]
        answer = choice["message"].get("content") or ""
        if not isinstance(answer, str):
            raise TypeError("content")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RetryableError("sent an answer that is no chat completion", down=True) from error
    cut = choice.get("finish_reason") == "length"
    if template.score == "text" and not (cut and not answer):
        return ocr.of_text("".join(answer.split()), "".join(str(wanted).split()))

    def unreadable(what: str) -> UnusableAnswer:
        short = cut and template.score != "yes"
        length = f", cut off at max_tokens = {template.max_tokens}" if short else ""
        advice = (
            "change the judge's template, pattern or max_tokens, and the same command continues"
        )
        return UnusableAnswer(f"answered {answer[:SHOWN]!r}{length}, {what}", again, advice)

    if template.score == "text":  # what was cut off are a model's thoughts
        raise unreadable("before it says anything")
    if template.score == "yes":
        return probability(choice, unreadable)
    return by_patterns(answer, template, unreadable)


def by_patterns(
    answer: str, template: Template, unreadable: Callable[[str], UnusableAnswer]
) -> float:
    """The mean of the numbers that patterns find last in an answer, on the template's scale.

    A pattern reads the answer's plain text (`plain`), or the answer as it is where it finds nothing in that.

    Raises:
      UnusableAnswer: a pattern finds no number, or one outside of the scale.
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


def probability(choice: dict[str, Any], unreadable: Callable[[str], UnusableAnswer]) -> float:
    """The probability that the answer's first token is yes, in any of its spellings.

    It is not divided by the sum for yes and no, as a model that says something else is not sure. Without yes among
    the likeliest tokens, and with no, it is 0: too low by less than the least of their probabilities.

    Source: VQAScore, P("Yes") of the first token; UniRL adds "Yes", "yes", and both with a space before
    (Tencent-Hunyuan/UniRL, unirl/reward/local/geneval2.py, commit 2f357c7).

    Raises:
      UnusableAnswer: neither yes nor no is among the likeliest tokens.
      RewardError: the answer has no logprobs.
    """
    try:
        tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        likely = [(spelled(one["token"]), math.exp(one["logprob"])) for one in tokens]
    except (LookupError, TypeError, AttributeError, OverflowError) as error:
        raise RewardError(_no_logprobs()) from error
    if not likely:
        raise RewardError(_no_logprobs())
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
