"""The detector with tiny networks and random weights, against transformers' own ways from outputs to objects."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPTokenizer,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    Mask2FormerImageProcessorPil,
    SwinConfig,
)

from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.geneval import COLORS, satisfies
from digen_jax.rewards.mask2former import Colors, Mask2FormerDetector, cut_out
from tests.learned_rewards import folders
from tests.models import parity
from tests.rewards.service.helpers import random_images

pytestmark = pytest.mark.slow

LABELS = ("person", "mouse", "cat", "keyboard", "dog")
SIDE = 384  # transformers' post-processing makes masks of this size


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("mask2former")
    backbone = SwinConfig(
        image_size=SIDE,
        embed_dim=8,
        depths=[1, 1, 1, 1],
        num_heads=[1, 1, 2, 2],
        window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )
    config = Mask2FormerConfig(
        backbone_config=backbone,
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        dim_feedforward=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        num_queries=12,
        id2label=dict(enumerate(LABELS)),
    )
    parity.randomise(Mask2FormerForUniversalSegmentation(config)).save_pretrained(place)
    size = {"height": SIDE, "width": SIDE}
    Mask2FormerImageProcessorPil(size=size, num_labels=5).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def detector(folder):
    return Mask2FormerDetector(str(folder), least=0.0, device="cpu", batch=2)


def test_objects_are_those_of_transformers(folder, detector):
    images = random_images(3, SIDE, SIDE, seed=3)
    images[1, :, :200] = 30
    found = detector.find(images[:2]) + detector.find(images[2:])
    processor = Mask2FormerImageProcessorPil.from_pretrained(folder)
    network = Mask2FormerForUniversalSegmentation.from_pretrained(folder).eval()
    with torch.no_grad():
        outputs = network(**processor(images=list(images), return_tensors="pt"))
    expected = processor.post_process_instance_segmentation(
        outputs, threshold=1e-9, return_binary_maps=True
    )
    names = ["person", "computer mouse", "cat", "computer keyboard", "dog"]
    assert sum(map(len, found)) > 12
    for things, one in zip(found, expected, strict=True):
        order = sorted(one["segments_info"], key=lambda segment: -segment["score"])
        given = [thing.confidence for thing in things]
        np.testing.assert_allclose(given, [s["score"] for s in order], atol=2e-6)
        assert sorted(t.label for t in things) == sorted(names[s["label_id"]] for s in order)
        masks = np.stack([np.asarray(one["segmentation"][s["id"]], bool) for s in order])
        for thing in things:
            # Another batch's rounding may move a pixel at an edge.
            assert (masks != thing.mask).sum((1, 2)).min() <= 3
            rows, columns = np.nonzero(thing.mask)
            expected_box = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
            assert thing.box == expected_box


def test_batches_and_other_image_sizes(detector):
    images = random_images(3, 48, 96, seed=5)
    together = detector(images, [{}] * 3)
    for image, things in zip(images, together, strict=True):
        (alone,) = detector(image[None], [{}])
        given = [one.confidence for one in alone]
        np.testing.assert_allclose(given, [one.confidence for one in things], atol=1e-5)
        assert given == sorted(given, reverse=True) and all(one.color is None for one in things)
        for one in things:
            assert 0 <= one.box[0] < one.box[2] <= 96 and 0 <= one.box[1] < one.box[3] <= 48


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return folders.write(tmp_path_factory.mktemp("clip")).clip


def nearest(network, processor, tokenizer, image, box, mask):
    """The color by transformers' own embeddings of an object on gray and of all texts."""
    gray = np.where(mask[..., None], image, np.uint8(0x99))
    x0, y0, x1, y1 = map(int, box)
    pixels = processor(images=Image.fromarray(gray[y0:y1, x0:x1]), return_tensors="pt")
    scores = []
    for color in COLORS:
        texts = [f"a photo of a {color} cat", f"a photo of a {color}-colored cat"]
        ids = tokenizer(
            [*texts, f"a photo of a {color} object"],
            padding=True,
            truncation=True,
            max_length=network.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        with torch.no_grad():
            output = network(**ids, **pixels)
        mean = output.text_embeds.mean(0)
        scores.append(float(output.image_embeds[0] @ mean / mean.norm()))
    return COLORS[int(np.argmax(scores))]


def test_colors_are_those_of_the_logits_of_clip(clip):
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (40, 48, 3), dtype=np.uint8)
    masks, boxes = np.zeros((3, 40, 48), bool), []
    for i in range(3):
        image[:, 16 * i : 16 * i + 16] = draw.integers(0, 256, 3)
        masks[i, 5 : 20 + 3 * i, 16 * i + 1 : 16 * i + 9 + i] = True
        boxes.append((16.0 * i + 1, 5.0, 16.0 * i + 9 + i, 20.0 + 3 * i))
    things = list(zip(boxes, masks, strict=True))
    parts = CLIPImageProcessorPil.from_pretrained(clip), CLIPTokenizer.from_pretrained(clip)
    every = set()
    for seed in range(5):  # a small random network names all objects alike
        network = parity.randomise(CLIPModel.from_pretrained(clip), seed)
        network.save_pretrained(clip)
        named = Colors(str(clip), "cpu")(image, things, "cat")
        assert named == [nearest(network, *parts, image, *thing) for thing in things]
        every |= set(named)
    assert len(every) > 2
    assert cut_out(image, *things[0]).size == (8, 15)


def test_the_reward_reads_folders_and_applies_the_rules(folder, clip, monkeypatch):
    monkeypatch.setattr("digen_jax.rewards.geneval.THRESHOLD", 0.02)
    settings = {"folder": str(folder), "clip": str(clip), "device": "cpu", "batch": 2}
    (named,) = resolve([RewardSettings("geneval", settings=settings)], serving=True).members
    images = random_images(4, 64, 64, seed=7)
    records = [
        {"prompt": label, "tag": "colors", "include": [{"class": label, "count": 1}]}
        for label in ("person", "computer mouse", "cat", "dog")
    ]
    records[0]["include"][0]["color"] = "red"
    scores = named.function(images, ["p"] * 4, records)
    own = Mask2FormerDetector(str(folder), str(clip), "cpu", 2, least=0.02)
    found = own(images, [{"person": 1}, {}, {}, {}])
    expected = [satisfies(things, record) for things, record in zip(found, records, strict=True)]
    assert scores.tolist() == [float(one) for one in expected]
