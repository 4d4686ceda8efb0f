"""The colours of objects by CLIP in torch, as GenEval names them: zero-shot, each object alone on grey.

Source: `color_classification` of djghosh13/geneval, evaluation/evaluate_images.py, commit 16f1681, with
`zero_shot_classifier` of LAION-AI/CLIP_benchmark. GenEval runs OpenAI's ViT-L/14 in open_clip; here it is transformers'
CLIPModel in the precision of its file.
"""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.rewards.detecting import COLORS

GREY = "#999"  # around an object
Box = tuple[float, float, float, float]


class Colors:
    """Names the colours of objects.

    Args:
      folder: of a CLIPModel with its tokenizer and processor, or its hub id.
      device: torch's name.

    Raises:
      ValueError: there is no such folder.
    """

    def __init__(self, folder: str, device: str):
        place = resolve_folder(folder)
        self._device = device
        self._network = CLIPModel.from_pretrained(place).to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(place)
        self._processor = AutoImageProcessor.from_pretrained(place)
        self._known: dict[str, torch.Tensor] = {}  # by class, a vector for each colour

    def __call__(
        self, image: np.ndarray, things: Sequence[tuple[Box, np.ndarray]], label: str
    ) -> list[str]:
        """The colour of each object of a class.

        Args:
          image: uint8 [h, w, 3].
          things: the box and the mask, bool [h, w], of each.
          label: their class.
        """
        if label not in self._known:
            self._known[label] = self._classifier(label)
        crops = [cut_out(image, box, mask) for box, mask in things]
        inputs = self._processor(images=crops, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            found = F.normalize(self._network.get_image_features(**inputs).pooler_output, dim=-1)
            best = (found @ self._known[label].T).argmax(-1)
        return [COLORS[i] for i in best.tolist()]

    def _classifier(self, label: str) -> torch.Tensor:
        """A vector of length 1 for each colour: the mean over three texts."""
        texts = [text for color in COLORS for text in texts_of(color, label)]
        most = self._network.config.text_config.max_position_embeddings
        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=most, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            found = F.normalize(self._network.get_text_features(**inputs).pooler_output, dim=-1)
            return F.normalize(found.unflatten(0, (len(COLORS), -1)).mean(1), dim=-1)


def texts_of(color: str, label: str) -> tuple[str, str, str]:
    """GenEval's texts for a colour of a class."""
    return (
        f"a photo of a {color} {label}",
        f"a photo of a {color}-colored {label}",
        f"a photo of a {color} object",
    )


def cut_out(image: np.ndarray, box: Box, mask: np.ndarray) -> Image.Image:
    """An object in its box, on grey."""
    picture = Image.fromarray(image)
    blank = Image.new("RGB", picture.size, GREY)
    return Image.composite(picture, blank, Image.fromarray(mask)).crop(box)
