"""Templates of the reward "judge": questions, and parsing of scores from answers.

"ocr" is the question of verl-omni's `genrm_ocr` (verl-project/verl-omni, verl_omni/utils/reward_score/genrm_ocr.py,
commit 1384a41). "alignment" is VQAScore's question (Lin et al., arXiv 2404.01291; linzhiqiu/t2v_metrics,
t2v_metrics/models/vqascore_models/gpt4v_model.py, commit 0ab6f3e). "unified_reward" and "unified_reward_2" are the
pointwise templates of UnifiedReward (Wang et al., arXiv 2503.05236; CodeGoat24/UnifiedReward, folder inference_qwen):
image_generation/qwen_point_score_image_generation.py, commit ed52f98, and
UnifiedReward-2.0-inference/point_score_ACS_image_generation.py, commit a759534, each for the models trained with it.
"rating" is specific to this project.
"""

import dataclasses
import json
import math
import re
import unicodedata
from collections.abc import Callable
from typing import Any

from digen_jax.rewards import ocr
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.http_client import RetryableError, UnusableAnswer

FIELD = re.compile(r"\{([A-Za-z_]\w*)\}")  # a field of the prompt's record, such as {prompt}
NUMBER = r"([-+]?\d+(?:\.\d+)?)"
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


def lines(*texts: str) -> str:
    """Joins texts with line breaks."""
    return "\n".join(texts)


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
        patterns=tuple(  # such as "Style Score (1-5): 3.5"
            rf"{name}\s+Score\s*(?:\(1-5\))?\s*:\s*{NUMBER}"
            for name in ("Alignment", "Coherence", "Style")
        ),
        scale=(1.0, 5.0),
        max_tokens=512,
    ),
}


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
