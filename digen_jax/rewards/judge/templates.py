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
import re
from collections.abc import Sequence
from typing import Any

from digen_jax.rewards import ocr

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
