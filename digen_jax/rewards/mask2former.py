"""Detector of the reward "geneval": Mask2Former and CLIP from transformers, in torch.

Only reward server processes import this module: see `built_in.Where`.

Postprocessing follows mmdet, which GenEval uses: MaskFormerFusionHead.instance_postprocess of
open-mmlab/mmdetection, as in arXiv 2112.01527. Mask logits are resized to the image; the confidence of an object is the
class probability times the mean probability of its mask's pixels. transformers'
`post_process_instance_segmentation` does the same at 384 x 384 pixels, and returns masks instead of boxes.

The color of an object is CLIP's zero-shot choice, with each object alone on gray: `color_classification` of
djghosh13/geneval, evaluation/evaluate_images.py, commit 16f1681, with LAION-AI/CLIP_benchmark's
`zero_shot_classifier`.

Differences: GenEval uses mmdet's weights of Mask2Former with Swin-S (mask2former_swin-s-p4-w7-224_lsj_8x2_50e),
images resized to at most 1333 x 800, and OpenAI's ViT-L/14 in open_clip. Here, weights and image size are those of
the folder, and the CLIP is transformers' CLIPModel in the precision of its file.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel
from transformers import Mask2FormerForUniversalSegmentation as Mask2Former

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.rewards.geneval import COLORS, Colored, Detection

# GenEval's names of classes with other names in COCO, in both spellings of COCO.
GENEVAL = {
    "mouse": "computer mouse",
    "remote": "tv remote",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "aeroplane": "airplane",
    "sofa": "couch",
    "pottedplant": "potted plant",
    "diningtable": "dining table",
    "tvmonitor": "tv",
}
GRAY = "#999"  # background of an object
Box = tuple[float, float, float, float]


class Thing(NamedTuple):
    """Detected object with its mask."""

    label: str
    confidence: float
    box: Box
    mask: np.ndarray  # bool [h, w]


class Mask2FormerDetector:
    """Implements `geneval.Detector`.

    See `geneval.GenEval` for the first four arguments. Objects with at most the confidence `least` are dropped.

    Raises:
      ValueError: A folder is missing or invalid.
    """

    def __init__(
        self, folder: str, clip: str = "", device: str = "", batch: int = 8, least: float = 0.0
    ):
        path = resolve_folder(folder)
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._processor = AutoImageProcessor.from_pretrained(path)
        network = Mask2Former.from_pretrained(path)
        self._network = network.to(self._device).eval()
        names = network.config.id2label
        self._names = [GENEVAL.get(names[i], names[i]) for i in range(len(names))]
        self.labels = frozenset(self._names)
        self._colors = Colors(clip, self._device) if clip else None
        self._batch, self._least = batch, least

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], colored: Sequence[Colored]
    ) -> list[list[Detection]]:
        """Returns the objects of each image, most confident first; those selected by `colored` have a color."""
        images = np.asarray(images)  # processors check the exact type
        found = []
        for start in range(0, len(images), self._batch):
            found += self.find(images[start : start + self._batch])
        return [self._with_colors(*one) for one in zip(images, found, colored, strict=True)]

    def find(self, images: UInt8[np.ndarray, "b h w 3"]) -> list[list[Thing]]:
        """Returns the objects of each image, most confident first."""
        inputs = self._processor(
            images=list(images), input_data_format="channels_last", return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            output = self._network(**inputs)
            # The processor pads right and bottom.
            sizes = [(int(one[:, 0].sum()), int(one[0].sum())) for one in inputs["pixel_mask"]]
            padded = inputs["pixel_values"].shape[-2:]
            outputs = output.class_queries_logits, output.masks_queries_logits, sizes
            return [
                self._things(classes, masks, padded, size, images.shape[1:3])
                for classes, masks, size in zip(*outputs, strict=True)
            ]

    def _things(
        self,
        classes: torch.Tensor,
        masks: torch.Tensor,
        padded: tuple[int, int],
        size: tuple[int, int],
        original: tuple[int, int],
    ) -> list[Thing]:
        """Converts the network's output for an image to objects.

        Args:
          classes: Logits [queries, classes + 1]; the last class means no object.
          masks: Logits [queries, height, width].
          padded: (height, width) of the network's input.
          size: (height, width) of the image within the input.
          original: (height, width) of the original image.
        """
        logits = _resize(_resize(masks, padded)[:, : size[0], : size[1]], original)
        chances = classes.float().softmax(-1)[:, :-1]
        best, places = chances.flatten().topk(min(len(classes), chances.numel()))
        found = []
        for chance, place in zip(best.tolist(), places.tolist(), strict=True):
            query, label = divmod(place, chances.shape[1])
            inside = logits[query] > 0
            if chance <= self._least or not inside.any():
                continue
            confidence = chance * logits[query].sigmoid()[inside].mean().item()
            if confidence > self._least:
                mask = inside.cpu().numpy()
                found.append(Thing(self._names[label], confidence, _box(mask), mask))
        return sorted(found, key=lambda one: -one.confidence)

    def _with_colors(self, image: np.ndarray, found: list[Thing], colored: Colored) -> list:
        """Converts the objects of an image to `Detection`s."""
        colors: dict[int, str] = {}
        for label, count in colored.items():
            chosen = [i for i, thing in enumerate(found) if thing.label == label][:count]
            if chosen and self._colors is not None:
                named = self._colors(image, [found[i][2:] for i in chosen], label)
                colors |= dict(zip(chosen, named, strict=True))
        return [
            Detection(thing.label, colors.get(i), thing.box, min(1.0, thing.confidence))
            for i, thing in enumerate(found)
        ]


def _resize(logits: torch.Tensor, size: Any) -> torch.Tensor:
    """Resizes mask logits by bilinear interpolation."""
    return F.interpolate(logits[None].float(), tuple(size), mode="bilinear", align_corners=False)[0]


def _box(mask: np.ndarray) -> Box:
    """Returns the bounding box of a mask; right and bottom are exclusive."""
    across, down = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return float(across[0]), float(down[0]), float(across[-1] + 1), float(down[-1] + 1)


class Colors:
    """Classifies the colors of objects with the CLIPModel, tokenizer and processor of a folder or Hub id.

    Raises:
      ValueError: The folder does not exist.
    """

    def __init__(self, folder: str, device: str):
        path = resolve_folder(folder)
        self._device = device
        self._network = CLIPModel.from_pretrained(path).to(device).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(path)
        self._processor = AutoImageProcessor.from_pretrained(path)
        self._known: dict[str, torch.Tensor] = {}  # a vector per color, by class

    def __call__(
        self, image: np.ndarray, things: Sequence[tuple[Box, np.ndarray]], label: str
    ) -> list[str]:
        """Returns the color of each object of the class `label`, given its box and mask, bool [h, w]."""
        if label not in self._known:
            self._known[label] = self._classifier(label)
        crops = [cut_out(image, box, mask) for box, mask in things]
        inputs = self._processor(images=crops, return_tensors="pt").to(self._device)
        with torch.inference_mode():
            found = F.normalize(self._network.get_image_features(**inputs).pooler_output, dim=-1)
            best = (found @ self._known[label].T).argmax(-1)
        return [COLORS[i] for i in best.tolist()]

    def _classifier(self, label: str) -> torch.Tensor:
        """Returns an L2-normalized vector per color: the mean over three texts."""
        texts = [text for color in COLORS for text in texts_of(color, label)]
        positions = self._network.config.text_config.max_position_embeddings
        inputs = self._tokenizer(
            texts, padding=True, truncation=True, max_length=positions, return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            found = F.normalize(self._network.get_text_features(**inputs).pooler_output, dim=-1)
            return F.normalize(found.unflatten(0, (len(COLORS), -1)).mean(1), dim=-1)


def texts_of(color: str, label: str) -> tuple[str, str, str]:
    """Returns GenEval's texts for a color and a class."""
    return (
        f"a photo of a {color} {label}",
        f"a photo of a {color}-colored {label}",
        f"a photo of a {color} object",
    )


def cut_out(image: np.ndarray, box: Box, mask: np.ndarray) -> Image.Image:
    """Crops an object to its box, on a gray background."""
    original = Image.fromarray(image)
    blank = Image.new("RGB", original.size, GRAY)
    return Image.composite(original, blank, Image.fromarray(mask)).crop(box)
