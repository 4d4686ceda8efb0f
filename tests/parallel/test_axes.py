"""Tiny models on every mesh of eight virtual devices: the same images and gradients as on one."""

import functools
import math
import re

import jax
import numpy as np
import pytest
from ml_collections import ConfigDict

from digen_jax import assemble
from digen_jax.config.load import fit_config, load_config
from digen_jax.diffusion.sampling import image_keys
from digen_jax.parallel.system import SampledImages, make_train_batch
from digen_jax.planning.programs import trace_generate
from tests.cases import said
from tests.models.flux.kontext_folders import edit_prompts, picture
from tests.models.folders import flux_folder, klein_folder
from tests.models.hunyuan.folders import hunyuan_folder
from tests.models.wan.folders import wan_folder
from tests.parallel import toy
from tests.pipelines import decode_floats, write_tiny_pipeline
from tests.tiny_runs import TARGETS, once, prompt_file

pytestmark = pytest.mark.usefixtures("exact_and_split")

MESHES = {
    "one device": dict(),
    "fsdp": dict(fsdp=4),
    "data x fsdp x tensor": dict(data=2, fsdp=2, tensor=2),
    "time x tensor x sequence": dict(time=2, tensor=2, sequence=2),
    "sequence": dict(sequence=4),
    "tensor x sequence": dict(data=2, tensor=2, sequence=2),
    "two of fsdp": dict(fsdp=2),
    "two of tensor and sequence": dict(tensor=2, sequence=2),
}
VIDEO = dict(wan=wan_folder, hunyuan=hunyuan_folder)
# Models of clips that start with an image.
STARTED = {"5B", "image", "image experts"}
ROWS = np.repeat(np.arange(2, dtype=np.int32), 4)
ADVANTAGES = np.array([1.5, -0.4, -0.9, 0.2, -1.7, 0.3, 0.8, 0.6], np.float32)


def model(base, family):
    """The section of a model with four heads."""
    if family == "flux":
        folder = str(flux_folder(base, "dev"))
        return dict(folder=folder, height=20, width=12, max_sequence_length=9)
    if family == "klein":
        folder = str(klein_folder(base))
        return dict(folder=folder, height=20, width=12, max_sequence_length=9)
    if family in VIDEO:
        folder = str(VIDEO[family](base))
        return dict(folder=folder, height=16, width=24, max_sequence_length=9)
    if family in STARTED:
        height, tokens = (32, 9) if family == "5B" else (16, 512)
        size = dict(height=height, width=64, source_height=height, source_width=64, frames=9)
        return dict(folder=str(wan_folder(base, family)), max_sequence_length=tokens, **size)
    make = functools.partial(write_tiny_pipeline, heads=4)
    return dict(folder=str(once(base / "four-heads", make)))


def config(base, tuning, mesh, family="sd3", **fields):
    prompts = str(edit_prompts(base) if family in STARTED else prompt_file(base))
    c = dict(
        model=model(base, family),
        prompts=dict(file=prompts),
        batch=dict(groups=2, images=4),
        sampler=dict(steps=3, window=dict(first=0, length=2), guidance=2.0, chunk=8),
        trainer=dict(micro_batch=4, pack=2),
        # Neither ratios of changed parameters nor a KL, because both magnify rounding.
        algorithm=dict(old_log_probs="current"),
        placement=dict(
            rollout=dict(data=0), trainer=dict(data=1) | MESHES[mesh], rules=((".*", "fsdp"),)
        ),
        evaluation=dict(prompts=prompts, batch=8),
    )
    if tuning == "lora":
        c["lora"] = dict(rank=4, alpha=8.0)
        if family == "sd3":
            c["lora"]["targets"] = TARGETS
    for name, value in fields.items():
        section, field = name.split("__")
        c[section][field] = value
    return ConfigDict(c)


def placed(config):
    """(recipe, devices) of the config's trainer mesh."""
    devices = math.prod({"data": 1, **config.placement.trainer}.values())
    return fit_config(load_config(config), devices), jax.devices()[:devices]


def records(family):
    """Two prompts."""
    found = said("a photo of a star", "two rings")
    for seed, record in enumerate(found if family in STARTED else ()):
        record["image"] = picture(seed, 33, 21)
    return found


def system_of(config):
    return assemble.build(*placed(config))


def outlined(config):
    """(recipe, its system without arrays)."""
    train_config, devices = placed(config)
    return train_config, assemble.outline(train_config, devices)


@pytest.fixture(scope="module")
def result(base):
    @functools.cache
    def of(tuning, mesh, family="sd3"):
        """(clips, gradient, ratio) of eight images with parameters at some distance from the start."""
        system = system_of(config(base, tuning, mesh, family))
        tuned = toy.moved(system.start, 0.01)
        sampler, weights = system.sampler, system.rollout_weights(tuned)
        prompts = sampler.encode(weights, records(family))
        keys = image_keys(jax.random.key(1), ROWS, np.arange(8) % 4)
        trajectory = sampler.generate(weights, prompts, ROWS, keys)
        clips = decode_floats(sampler, weights, trajectory)
        if family not in STARTED:
            clips = clips[:, 0]
        # The same trajectories for every trainer, so that only the gradient is compared.
        if mesh != "one device":
            *_, prompts, trajectory = of(tuning, "one device", family)
        prompts, trajectory = jax.device_get((prompts, trajectory))
        images = SampledImages(0, ROWS, trajectory.transitions, trajectory.sigmas)
        train_batch = make_train_batch(system, prompts, images, ADVANTAGES)
        state = system.trainer.init(tuned)
        totals = system.trainer.accumulate(state, system.base, train_batch, None)
        gradient = jax.tree.map(lambda g: g / totals.sums["weight"], totals.gradient)
        ratio = float(totals.sums["ratio_deviation"] / totals.sums["weight"])
        return (*jax.device_get((clips, gradient)), ratio, prompts, trajectory)

    return of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tuning", "mesh"),
    [
        ("klein", "full", "time x tensor x sequence"),
        ("wan", "full", "time x tensor x sequence"),
        ("wan", "lora", "data x fsdp x tensor"),
        ("hunyuan", "full", "time x tensor x sequence"),
        ("hunyuan", "lora", "data x fsdp x tensor"),
        *(
            (family, "lora" if family == "image" else "full", f"two of {axes}")
            for family in sorted(STARTED)
            for axes in ("fsdp", "tensor and sequence")
        ),
    ],
)
def test_images_and_gradients_are_those_of_one_device(result, family, tuning, mesh):
    """The fifteen image tokens of klein are divided by no axis. Ratios are to the log-probabilities of one device."""
    clips, gradient, deviation, *_ = result(tuning, mesh, family)
    assert deviation < 1e-4
    expected_clips, expected, *_ = result(tuning, "one device", family)
    np.testing.assert_allclose(clips, expected_clips, rtol=0, atol=2e-5)
    assert np.ptp(clips) > 0.1
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def close(path, found, leaf):
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        np.testing.assert_allclose(found, leaf, rtol=0, atol=5e-5 * largest, err_msg=where)

    jax.tree.map_with_path(close, gradient, expected)


def results(program, operation):
    """The shapes of an operation's results in a compiled program."""
    return set(re.findall(rf"= f32\[([\d,]*)\]\S* {operation}\(", program))


def sampling(base, mesh):
    """The compiled program that samples eight images."""
    train_config, system = outlined(config(base, "full", mesh))
    return trace_generate(system, system.sampler, train_config, 8).lower().compile().as_text()


def test_over_sequence_tokens_are_split_and_exchanged_for_heads(base):
    """Sixteen rows with guidance, of 16 image tokens, of which a device has four, and of its four heads one."""
    program = sampling(base, "sequence")
    products = results(program, "dot")
    assert {"64,64", "64,16"} <= products
    assert not any(shape.startswith("256,") for shape in products)
    assert "16,29,29" in products  # scores of 16 + 13 tokens
    assert "all-to-all" in program


def test_over_tensor_heads_and_inner_widths_are_split_and_over_fsdp_parameters_are_gathered(base):
    """On a mesh of 2 x 2 x 2: eight images are sixteen rows with guidance, four of a device; 16 tokens each."""
    program = sampling(base, "data x fsdp x tensor")
    gathered, products = results(program, "all-gather"), results(program, "dot")
    # The width is 16, and 64 inside a feed-forward layer, of which a device has half the columns, or rows.
    assert {"16,32", "32,16", "16,8", "8,16"} <= gathered
    assert not {"16,64", "64,16"} & gathered
    assert {"64,8", "64,32", "64,16"} <= products
    assert not any(int(shape.split(",")[0]) > 64 for shape in products)
