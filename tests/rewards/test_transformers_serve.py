"""The judge asks `transformers serve`, which has a tiny vision-language model with random weights."""

import hashlib
import os
import pathlib
import subprocess
import sys
import time

import httpx
import numpy as np
import pytest

from digen_jax.errors import ConfigError
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.errors import RewardError
from tests.ports import free_port
from tests.rewards.service.helpers import random_images

pytestmark = pytest.mark.slow

NAME = "tiny/judge"
SIDE, PATCH = 28, 14
CHAT = (
    "{% for message in messages %}{{ message['role'] }}:{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tiny_tokenizer():
    """A token for each byte, and three special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "<end>", "<image>", *letters])}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<end>",
        additional_special_tokens=["<image>"],
    )


def tiny_processor():
    from transformers import LlavaImageProcessorPil, LlavaProcessor

    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    return LlavaProcessor(
        LlavaImageProcessorPil(**sizes),
        tiny_tokenizer(),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT,
    )


def tiny_model(tokenizer):
    """Random weights; those of the last layer are 0 for all tokens but digits, so that it always answers digits."""
    import torch
    from transformers import (
        CLIPVisionConfig,
        LlamaConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
    )

    wide = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    vision = CLIPVisionConfig(**wide, image_size=SIDE, patch_size=PATCH, projection_dim=32)
    text = LlamaConfig(
        **wide,
        vocab_size=len(tokenizer),
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=image, image_seq_length=4
    )
    model = LlavaForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
        digits = torch.tensor(tokenizer.convert_tokens_to_ids(list("0123456789")))
        rows = torch.zeros(len(tokenizer), 1).index_fill(0, digits, 1.0)
        model.lm_head.weight.mul_(rows)
    return model


def in_cache(cache, *parts):
    """Writes what can be saved as the hub's cache has it, since the server lists no other models."""
    revision = hashlib.sha1(b"tiny").hexdigest()
    folder = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    for part in parts:
        part.save_pretrained(snapshot)
    (folder / "refs").mkdir()
    (folder / "blobs").mkdir()
    (folder / "refs" / "main").write_text(revision)
    return snapshot


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    """(the server's address, the model and the processor that it has)"""
    home = tmp_path_factory.mktemp("hub")
    processor = tiny_processor()
    model = tiny_model(processor.tokenizer)
    in_cache(home, model, processor)
    port = free_port()
    command = pathlib.Path(sys.executable).parent / "transformers"
    process = subprocess.Popen(
        [command, "serve", NAME, "--host=127.0.0.1", f"--port={port}", "--device=cpu"],
        env=os.environ | {"HF_HUB_CACHE": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    address = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            assert process.poll() is None, "the server has ended"
            assert time.monotonic() < until, "the server does not start"
            try:
                if httpx.get(f"{address}/health", timeout=5, trust_env=False).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield address, model, processor
    finally:
        process.terminate()
        process.wait(30)


def reward(address, **settings):
    settings = {"servers": (address,), "template": "Rate {prompt}.", "connections": 2} | settings
    (named,) = resolve([RewardSettings("judge", settings=settings)]).members
    return named.function


def expected(model, processor, image, text, tokens):
    """What the model answers greedily, asked without a server."""
    import torch
    from PIL import Image

    content = [{"type": "image", "image": Image.fromarray(image)}, {"type": "text", "text": text}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": content}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        ids = model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
    return processor.tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :])


def test_scores_by_pattern_are_those_of_the_model_without_a_server(serving):
    address, model, processor = serving
    images = random_images(6, 40, 40)
    images[3:] //= 4
    prompts = ["a cat", "a dog", 'a "sign"'] * 2
    given = reward(address, pattern=r"^(\d{3})$", scale=(0, 999), max_tokens=3)
    scores = given(images, prompts, [{} for _ in prompts])
    answers = [
        expected(model, processor, image, f"Rate {prompt}.", 3)
        for image, prompt in zip(images, prompts, strict=True)
    ]
    assert len(set(answers)) > 1  # it sees pictures and prompts
    np.testing.assert_allclose(scores, [int(answer) / 999 for answer in answers], rtol=1e-6)


def test_a_server_without_logprobs_is_named(serving):
    with pytest.raises(RewardError, match="sends no top_logprobs"):
        reward(serving[0], template="alignment")(random_images(1), ["a"], [{}])


def test_the_servers_models_are_known(serving):
    with pytest.raises(ConfigError, match=f"has no model 'other', but '{NAME}'"):
        reward(serving[0], model="other", pattern=r"(\d)")(random_images(1), ["a"], [{}])
