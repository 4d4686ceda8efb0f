"""Stable Diffusion 3 with its T5 against diffusers' own pipeline, on a folder of random weights."""

import functools
import inspect
import json
import shutil

import jax
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline

from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_frozen, read_parts
from digen_jax.inference.model import all_devices
from digen_jax.models.family import Size
from digen_jax.models.sd3.network import forward_flops
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.parallel.sharding import Layout
from tests.cases import said
from tests.models.sd3.t5_folders import add_t5
from tests.tiny_runs import oracle, pipeline

PROMPTS = ["a photo of a red circle", "two blue squares and schräge ☃", ""]
NEGATIVE = ["a green star", "", "four shapes"]
RECORDS = [
    {"prompt": prompt, "negative_prompt": negative}
    for prompt, negative in zip(PROMPTS, NEGATIVE, strict=True)
]
LONG = "a red circle left of a blue square and " * 4 + "a green star"
ALL = [*PROMPTS, LONG, "Ein ROTER Kreis,  schräg ☃\n日本"]
PART = "text_encoder_3"
STEPS, GUIDANCE, SIZE, TOKENS = 4, 3.5, Size(32, 48), 21


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    target = tmp_path_factory.mktemp("t5") / "pipeline"
    return add_t5(pipeline(base), target, [*PROMPTS, *NEGATIVE])


@pytest.fixture(scope="module")
def pipe(folder):
    """diffusers' pipeline."""
    found = StableDiffusion3Pipeline.from_pretrained(folder)
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="module")
def ours(folder):
    """The family with all its parameters, and its jitted `encode`; fewer tokens than by default save time."""
    family, group = shorter(folder, TOKENS), all_devices(jax.devices()[:1])
    return family, read_parts(family, folder, family.shapes(), group), jax.jit(family.encode)


def shorter(folder, length: int, **options):
    return load_family(folder, max_sequence_length=length, **options)


def close(actual, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    expected = expected.numpy()
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < tolerance * np.abs(expected).max()


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield


def test_the_default_length_is_the_pipelines(folder):
    default = (
        inspect.signature(StableDiffusion3Pipeline.__call__)
        .parameters["max_sequence_length"]
        .default
    )
    assert load_family(folder).max_sequence_length == default == 256


def test_prompts_are_encoded_as_by_the_pipeline(ours, pipe, folder):
    family, params, encode = ours
    prompts = list(ALL)
    expected = pipe.encode_prompt(prompts, prompts, prompts, max_sequence_length=TOKENS)
    context, null, pooled, null_pooled = expected
    found, empty = (
        encode(params, tokens)
        for tokens in (family.tokenize(said(*prompts)), family.tokenize_null(said(*prompts)))
    )
    tokens = family.max_sequence_length
    assert tokens == TOKENS and len(pipe.tokenizer_3(LONG).input_ids) > TOKENS
    close(found.context, context)
    close(found.pooled, pooled)
    close(empty.context, null[:1])
    close(empty.pooled, null_pooled[:1])
    # The T5's part has a scale of its own, and differs by prompt.
    close(found.context[:, -tokens:], context[:, -tokens:])
    assert np.abs(np.diff(found.context[:, -tokens:], axis=0)).max((1, 2)).min() > 1e-2


def test_a_prompt_is_encoded_alone_as_beside_a_longer_one_and_twice(ours):
    family, params, encode = ours
    records = said(*ALL)
    whole = encode(params, family.tokenize(records))
    again = encode(params, family.tokenize(records))
    assert records == said(*ALL)
    jax.tree.map(np.testing.assert_array_equal, whole, again)
    alone = encode(params, family.tokenize(records[:1] * len(records)))  # in the same program
    for one, all_ in zip(alone, whole, strict=True):
        np.testing.assert_allclose(one[0], all_[0], rtol=0, atol=1e-5 * np.abs(all_).max())


def images_of(family, params, guidance, group):
    """Images of PROMPTS by the sampler, and their start noise."""
    policy = Policy(family, guidance)
    sampler = Sampler(policy, group, SamplerSettings(SIZE, STEPS, Ode()))
    tuned, base = policy.split(
        jax.random.key(0), {"transformer": params["transformer"]}, reference=False
    )
    frozen = {part: tree for part, tree in params.items() if part != "transformer"}
    weights = Weights(tuned, base, frozen)
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    keys = image_keys(jax.random.key(3), rows, np.zeros_like(rows))
    prompts = sampler.encode(weights, RECORDS)
    images = sampler.decode(weights, sampler.generate(weights, prompts, rows, keys))
    noise = np.asarray(start_noise(keys, sampler.shape)).transpose(0, 3, 1, 2)
    return np.asarray(images)[:, 0], torch.tensor(noise)


@pytest.mark.parametrize("left_out", [False, True])
def test_the_samplers_images_are_the_pipelines(base, folder, pipe, left_out):
    """With the T5, and with zero tokens in its place; with negative prompts that are not all empty."""
    family = shorter(folder, TOKENS, without=(PART,) * left_out)
    group = all_devices(jax.devices()[:1])
    params = read_parts(family, folder, family.shapes(), group)
    assert (PART in params) != left_out and family.heads.weighted == left_out
    images, noise = images_of(family, params, GUIDANCE, group)
    one, other = pipe, oracle(pipeline(base))
    call = functools.partial(
        dict,
        prompt=PROMPTS,
        negative_prompt=NEGATIVE,
        height=SIZE.height,
        width=SIZE.width,
        num_inference_steps=STEPS,
        guidance_scale=GUIDANCE,
        max_sequence_length=TOKENS,
        latents=noise,
        output_type="np",
    )
    expected, others = (other, one) if left_out else (one, other)
    found = expected(**call()).images
    np.testing.assert_allclose(images, found, rtol=0, atol=1e-3)
    assert ((found > 0.02) & (found < 0.98)).mean() > 0.3
    assert np.abs(found - others(**call()).images).max((1, 2, 3)).min() > 20 / 255
    if left_out:  # the number of zero tokens matters
        assert np.abs(found - expected(**call(max_sequence_length=256)).images).max() > 4 / 255


def test_a_split_t5_encodes_as_a_whole_one(ours, folder):
    """Over fsdp and tensor, by the rules that a run uses."""
    family, params, encode = ours
    rules = ((".*", "embed", "fsdp"),)
    layout = Layout.of(rules, family.axes())
    group = DeviceGroup(make_mesh(jax.devices()[:4], fsdp=2, tensor=2), layout)
    frozen = read_frozen(family, folder, group)
    tree = frozen[PART]["encoder"]["block_1to2"]
    kernels = [tree["layer_0"]["SelfAttention"]["q"], tree["layer_1"]["DenseReluDense"]["wo"]]
    specs = [tuple(kernel["kernel"].sharding.spec) for kernel in kernels]
    assert specs == [(None, "fsdp", "tensor"), (None, "tensor", "fsdp")]
    sampler = Sampler(Policy(family), group, SamplerSettings(SIZE, STEPS, Ode()))
    found = sampler.encode(Weights(None, None, frozen), said(*PROMPTS)).conditioning
    expected = encode(params, family.tokenize(said(*PROMPTS)))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_flops_and_cut_prompts_count_the_t5s_tokens(folder):
    call = inspect.signature(StableDiffusion3Pipeline.__call__).parameters
    assert load_family(folder).max_sequence_length == call["max_sequence_length"].default
    family = shorter(folder, 9)
    config = family.transformer.config
    clip = family.tokenizers[0].model_max_length
    latent = family.latent_shape(SIZE)
    assert family.flops(SIZE)["transformer"] == forward_flops(config, latent, clip + 9)
    left_out = shorter(folder, 9, without=(PART,))
    assert left_out.flops(SIZE)["transformer"] == forward_flops(config, latent, clip + 1)
    # Seven of the T5's tokens and fewer of a CLIP's, then too many of the T5's alone.
    assert family.cut(["a red circle", "☃ ☃ ☃ ☃ ☃"]).tolist() == [False, True]
    assert left_out.cut(["a red circle", "☃ ☃"]).tolist() == [False, False]


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "pipeline")


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_family(open_pipeline(str(folder)), **options)
    return str(caught.value).replace(f"{folder}/", "")


def test_a_t5_that_does_not_fit_is_refused_by_its_file(copy):
    edit(copy / PART / "config.json", d_model=7)
    assert refused(copy).startswith(f"{PART}/config.json: d_model must be 32, the transformer's")
    edit(copy / PART / "config.json", d_model=32, vocab_size=9)
    assert refused(copy).startswith("the tokenizer in tokenizer_3 has ")
    edit(copy / PART / "config.json", architectures=["UMT5EncoderModel"])
    assert refused(copy).startswith(f"{PART}/config.json describes a UMT5EncoderModel, not a T5")
    edit(copy / "model_index.json", tokenizer_3=[None, None])
    assert refused(copy).startswith("model_index.json says that tokenizer_3 is [null, null]")
    shutil.rmtree(copy / PART)
    assert refused(copy).startswith(f"{PART} is missing, but model_index.json names it: add")
    assert load_family(copy, without=(PART,)).text_encoder_3 is None
    edit(copy / "model_index.json", text_encoder_3=[None, None])
    assert load_family(copy).text_encoder_3 is None
