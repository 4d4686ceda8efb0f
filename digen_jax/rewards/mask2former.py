"""The detector of the reward "geneval": Mask2Former and CLIP of transformers, in torch.

Only a reward server's processes import this module: see `built_in.Where`.

From the network's output to objects it follows mmdet, which GenEval runs: MaskFormerFusionHead.instance_postprocess of
open-mmlab/mmdetection, as arXiv 2112.01527 has it. Masks are resized to the picture as logits, and the confidence of an
object is the probability of its class times the mean probability of its mask's pixels. transformers' own
`post_process_instance_segmentation` does the same at 384 x 384 pixels, and makes masks, not boxes.

What differs from GenEval: it has mmdet's weights of Mask2Former with Swin-S (mask2former_swin-s-p4-w7-224_lsj_8x2_50e),
and pictures resized to 1333 x 800 at most. Here the weights and the size of pictures are the folder's.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import UInt8
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoTokenizer,
    CLIPModel,
    Mask2FormerForUniversalSegmentation,
)

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.rewards.geneval import COLORS, Colored, Detection

# GenEval's names of classes for which COCO has others, in either of COCO's spellings.
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


class Thing(NamedTuple):
    """An object and its mask."""

    label: str
    confidence: float
    box: tuple[float, float, float, float]
    mask: np.ndarray  # bool [h, w]


class Mask2FormerDetector:
    """See `Detector`.

    Args:
      folder: of Mask2FormerForUniversalSegmentation and its processor, or its hub id.
      clip: of a CLIP; "": no colours.
      device: torch's name; "": the GPU if there is one.
      batch: pictures at once.
      least: objects with this confidence or less are left out.

    Raises:
      ValueError: a folder is missing or does not fit.
    """

    def __init__(
        self,
        folder: str,
        clip: str = "",
        device: str = "",
        batch: int = 8,
        least: float = 0.0,
    ):
        place = resolve_folder(folder)
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._processor = AutoImageProcessor.from_pretrained(place)
        network = Mask2FormerForUniversalSegmentation.from_pretrained(place)
        self._network = network.to(self._device).eval()
        names = network.config.id2label
        self._names = [GENEVAL.get(names[i], names[i]) for i in range(len(names))]
        self.labels = frozenset(self._names)
        self._colors = Colors(clip, self._device) if clip else None
        self._batch, self._least = batch, least

    def __call__(
        self, images: UInt8[np.ndarray, "b h w 3"], colored: Sequence[Colored]
    ) -> list[list[Detection]]:
        """The objects of each picture, the surest first; those that `colored` asks for have a colour."""
        images = np.asarray(images)  # processors test for the exact type
        found = []
        for start in range(0, len(images), self._batch):
            found += self.find(images[start : start + self._batch])
        return [self._with_colors(*one) for one in zip(images, found, colored, strict=True)]

    def find(self, images: UInt8[np.ndarray, "b h w 3"]) -> list[list[Thing]]:
        """The objects of each picture, the surest first."""
        inputs = self._processor(
            images=list(images), input_data_format="channels_last", return_tensors="pt"
        ).to(self._device)
        with torch.inference_mode():
            told = self._network(**inputs)
            # what the processor has filled up to the right and below is no part of the picture
            sizes = [(int(one[:, 0].sum()), int(one[0].sum())) for one in inputs["pixel_mask"]]
            whole = inputs["pixel_values"].shape[-2:]
            outputs = told.class_queries_logits, told.masks_queries_logits, sizes
            return [
                self._things(classes, masks, whole, size, images.shape[1:3])
                for classes, masks, size in zip(*outputs, strict=True)
            ]

    def _things(
        self,
        classes: torch.Tensor,
        masks: torch.Tensor,
        whole: tuple[int, int],
        size: tuple[int, int],
        shown: tuple[int, int],
    ) -> list[Thing]:
        """Objects from the network's output on a picture.

        Args:
          classes: logits [queries, classes + 1]; the last one is no object.
          masks: logits [queries, height, width].
          whole: height and width of the network's input.
          size: those of the picture in it.
          shown: those of the picture itself.
        """
        logits = _resized(_resized(masks, whole)[:, : size[0], : size[1]], shown)
        chances = classes.float().softmax(-1)[:, :-1]
        best, places = chances.flatten().topk(min(len(classes), chances.numel()))
        queries, labels = places // chances.shape[1], places % chances.shape[1]
        found = []
        for chance, query, label in zip(
            best.tolist(), queries.tolist(), labels.tolist(), strict=True
        ):
            inside = logits[query] > 0
            if chance <= self._least or not inside.any():
                continue
            confidence = chance * logits[query].sigmoid()[inside].mean().item()
            if confidence > self._least:
                mask = inside.cpu().numpy()
                found.append(Thing(self._names[label], confidence, _box(mask), mask))
        return sorted(found, key=lambda one: -one.confidence)

    def _with_colors(
        self, image: np.ndarray, found: list[Thing], colored: Colored
    ) -> list[Detection]:
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


def _resized(logits: torch.Tensor, size: Any) -> torch.Tensor:
    """Masks as logits in another size, bilinear."""
    return F.interpolate(logits[None].float(), tuple(size), mode="bilinear", align_corners=False)[0]


def _box(mask: np.ndarray) -> tuple[float, float, float, float]:
    """The box of a mask; its right and lower ends are behind the last pixel."""
    across, down = np.flatnonzero(mask.any(0)), np.flatnonzero(mask.any(1))
    return float(across[0]), float(down[0]), float(across[-1] + 1), float(down[-1] + 1)


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
