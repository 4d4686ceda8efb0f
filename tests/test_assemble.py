"""A whole system from a folder; mistakes are refused before any weight is read."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from digen_jax import assemble, policies
from digen_jax.checkpoints.folder import open_tensors
from digen_jax.config.load import fit_config, load_config
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family
from digen_jax.models.family import Size
from tests.parallel import toy
from tests.pipelines import write_tiny_pipeline

TARGETS = r"transformer_blocks\..*\.attn\.to_[qkv]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_pipeline(tmp_path_factory.mktemp("assemble") / "pipeline")


@pytest.fixture(scope="module")
def bare(folder):
    """The pipeline's configs and tokenizers, without any weights."""
    copy = folder.parent / "bare"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    return copy


@pytest.fixture(scope="module")
def family(bare):
    """One system for all tests: its shapes take a second."""
    return load_family(bare)


@pytest.fixture(scope="module")
def prompts(folder):
    file = folder.parent / "prompts.jsonl"
    records = [
        {"prompt": f"a photo of a {name}", "include": [{"class": name, "count": 1}]}
        for name in ("circle", "star")
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def make(prompts):
    """A config for a folder; "__" is the dot of a field's name."""

    def config(folder, **fields):
        c = dict(
            model=dict(folder=str(folder)),
            prompts=dict(file=prompts),
            batch=dict(groups=2, images=4),
            sampler=dict(chunk=8),
            trainer=dict(micro_batch=4),
            placement=dict(trainer=dict(data=2, fsdp=2)),
            evaluation=dict(prompts=prompts, batch=4, steps=5, guidance=2.5),
        )
        for name, value in fields.items():
            group, field = name.split("__")
            c.setdefault(group, {})[field] = value
        return ConfigDict(c)

    return config


def refused(config, devices=8):
    with pytest.raises(ConfigError) as caught:
        assemble.build(fit_config(load_config(config), devices), jax.devices()[:devices])
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            dict(model__height=36),
            "config.model.height, config.model.width and config.model.frames: an image of 36x32",
        ),
        (
            dict(model__width=8000),
            "config.model.height, config.model.width and config.model.frames: an image of 32x8000",
        ),
        (dict(model__attention="splash"), "config.model.attention = 'splash' cannot be used"),
        (dict(sampler__window=dict(first=4, length=4)), "config.sampler.window: step 7"),
        (
            dict(sampler__window=dict(mode="random", length=2, end=8)),
            "config.sampler.window: step 7 of the window [6, 8) has no noise",
        ),
        (dict(lora__rank=4, lora__targets="nothing"), "config.lora.targets: "),
        (dict(lora__rank=4, lora__targets="to_(q"), "config.lora.targets: "),
        (dict(lora__rank=10**6, lora__targets=TARGETS), "config.lora.rank = 1000000"),
        (
            dict(placement__rules=(("transformer_blocks", "fsdp"),)),
            "config.placement.rules has no rule that matches the parameter transformer/context_embedder/",
        ),
        (dict(placement__rollout=dict(data=8, fsdp=1)), "config.placement.rollout wants 8"),
        (
            dict(placement__trainer=dict(data=1, tensor=2, sequence=2)),
            "config.placement.trainer.sequence x config.placement.trainer.tensor = 4",
        ),
        (dict(placement__rollout=dict(data=1, tensor=3)), "config.placement.rollout.tensor = 3"),
        (
            dict(placement__rollout=dict(data=1, sequence=4)),
            "config.placement.rollout.sequence = 4",
        ),
        ({}, "config.model.folder: "),
    ],
)
def test_what_does_not_fit_is_refused_before_weights_are_read(
    make, bare, family, monkeypatch, fields, sentence
):
    monkeypatch.setattr(assemble, "load_family", lambda *_: family)
    found = refused(make(bare, **fields))
    assert found.startswith(sentence)
    assert ("holds no weights" in found) == (not fields)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nowhere", "'nowhere' is neither an existing folder"),
        ("nobody/nothing", "'nobody/nothing' is not an existing folder"),
        (
            "SDXL",
            "SDXL is a StableDiffusionXLPipeline; supported are StableDiffusion3Pipeline, Flux",
        ),
        ("EMPTY", "EMPTY/model_index.json is missing"),
        ("BROKEN", "BROKEN/model_index.json is not JSON"),
    ],
)
def test_a_folder_that_is_no_supported_pipeline_is_refused(make, tmp_path, name, sentence):
    indices = {"BROKEN": "{", "EMPTY": None}
    indices["SDXL"] = json.dumps({"_class_name": "StableDiffusionXLPipeline"})
    if name in indices:
        (tmp_path / name).mkdir()
        if indices[name] is not None:
            (tmp_path / name / "model_index.json").write_text(indices[name])
        sentence, name = f"{tmp_path}/{sentence}", str(tmp_path / name)
    assert refused(make(name)).startswith(f"config.model.folder: {sentence}")


def test_a_folder_without_a_tensor_is_refused_by_its_name(make, folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    config = json.loads((broken / "transformer" / "config.json").read_text())
    config["num_layers"] += 1
    (broken / "transformer" / "config.json").write_text(json.dumps(config))
    sentence = refused(make(broken))
    assert sentence.startswith("config.model.folder: ") and "transformer_blocks." in sentence


# ------------------------------------------------------------------------------ what is built


@pytest.fixture(scope="module")
def tensors(folder):
    """The number of values in each component's files."""
    return {
        part: sum(np.prod(tensor.shape) for tensor in open_tensors(folder / part).values())
        for part in ("transformer", "vae", "text_encoder", "text_encoder_2")
    }


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def devices(tree):
    (where,) = {frozenset(leaf.devices()) for leaf in jax.tree.leaves(tree)}
    return where


def test_full_tuning_on_two_meshes(make, folder, tensors):
    config = make(folder, placement__rules=(("kernel$", "fsdp"), (".*", "replicate")))
    system = assemble.build(fit_config(load_config(config), 8), jax.devices())
    rollout, trainer = frozenset(jax.devices()[:4]), frozenset(jax.devices()[4:])
    assert devices((system.start, system.base)) == trainer
    assert devices((system.rollouts[0].base, system.rollouts[0].frozen)) == rollout
    assert devices(system.rollout_weights(system.start)) == rollout

    assert {"/".join(path) for path in flatten_dict(system.base)} == {
        "transformer/pos_embed/pos_embed"
    }
    assert ("transformer", "pos_embed", "pos_embed") not in flatten_dict(system.start)
    assert size((system.start, system.base)) == tensors["transformer"]
    assert {part: size(tree) for part, tree in system.rollouts[0].frozen.items()} == {
        part: count for part, count in tensors.items() if part != "transformer"
    }
    assert system.sampler.settings.length == 4 and system.rng.window.first == 0
    assert len(system.sampler.sigmas) == 9 and system.policy.guidance == 1.0
    evaluator = system.evaluator
    assert evaluator.settings.step == Ode() and len(evaluator.sigmas) == 6
    assert evaluator.policy.guidance == 2.5
    assert system.trainer.settings.micro_batch == 4


@pytest.mark.parametrize(
    ("fields", "guidance", "warnings"),
    [
        ({}, "classifier-free", ["evaluation.height=64 --config.evaluation.width=64"]),
        (dict(evaluation__height=64, evaluation__width=64), "classifier-free", []),
        (dict(evaluation__height=64, algorithm__name="awm"), "none", ["algorithm.name = 'awm'"]),
        (
            dict(
                evaluation__height=64,
                algorithm__name="diffusion_nft",
                algorithm__times=dict(count=4),
                model__folder="a/B-Turbo",
            ),
            "classifier-free",
            ["algorithm.name = 'diffusion_nft'"],
        ),
        (
            dict(algorithm__name="diffusion_dpo", model__folder="x/FLUX.1-schnell/"),
            "both",
            ["algorithm.name = 'diffusion_dpo'", "evaluation.height=64"],
        ),
    ],
)
def test_what_has_spoiled_runs_elsewhere_is_warned_of(make, folder, fields, guidance, warnings):
    @dataclasses.dataclass(frozen=True)
    class Made(toy.ToyFamily):
        def default_size(self):
            return Size(64, 64)

    if "algorithm__name" in fields:
        fields |= dict(
            sampler__kind="ode", sampler__noise_level=0.0, sampler__window=dict(length=0)
        )
    found = policies.start_warnings(load_config(make(folder, **fields)), Made(guidance=guidance))
    assert len(found) == len(warnings)
    for sentence, part in zip(found, warnings, strict=True):
        assert f"config.{part}" in sentence and "\n" not in sentence


@pytest.mark.parametrize("targets", ["", TARGETS])
def test_lora_is_of_the_familys_layers_where_the_config_names_none(make, folder, family, targets):
    config = fit_config(load_config(make(folder, lora__rank=4, lora__targets=targets)), 1)
    policy = policies.make_policy(config, family)
    assert policy.lora.targets == (targets or family.lora_targets)
    tuned, _ = jax.eval_shape(
        lambda key, params: policy.split(key, params, reference=False),
        jax.random.key(0),
        policies.trained_of(family, family.shapes()),
    )
    names = {path[-2] for path in flatten_dict(tuned)}
    added = {"to_out_0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"}
    assert names == {"to_q", "to_k", "to_v"} | (set() if targets else added)


def test_lora_on_one_device(make, folder, tensors):
    config = make(folder, lora__rank=4, lora__targets=TARGETS, algorithm__kl_coefficient=0.1)
    system = assemble.build(fit_config(load_config(config), 1), jax.devices()[:1])
    assert system.placement.colocated
    names = {path[-2:] for path in flatten_dict(system.start)}
    assert names == {(layer, factor) for layer in ("to_q", "to_k", "to_v") for factor in "ab"}
    assert size(system.base) == size(system.rollouts[0].base) == tensors["transformer"]
    assert system.policy.lora == system.evaluator.policy.lora
