"""A run's exported files in diffusers' own pipeline against our sampler with the run's own weights."""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest
import torch

from digen_jax.assemble import build
from digen_jax.checkpoints.checkpointer import Checkpointer, template_of
from digen_jax.config.load import fit_config, load_config
from digen_jax.diffusion.sampling import image_keys, start_noise
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.inference.export import export, first_average, how_to_load
from digen_jax.logging.metrics import read_metrics
from digen_jax.models.family import Size
from digen_jax.parallel.sampler import Sampler, SamplerSettings
from digen_jax.parallel.trainer import TrainerSettings
from digen_jax.train import train
from tests.cases import said
from tests.pipelines import decode_floats
from tests.scripts import run_forked
from tests.tiny_runs import oracle, pipeline, tiny_config, trained

PROMPTS = ["a photo of a red circle", "two blue stars", "a green square", "a photo of a circle"]
STEPS, SIDE = 6, 32


@functools.cache
def _keys():
    return image_keys(jax.random.key(5), np.arange(len(PROMPTS)), np.zeros(len(PROMPTS), int))


@functools.cache
def by_our_sampler(base, kind):
    """Images from the run's own parts, with its LoRA unmerged, and the weights that it evaluates."""
    config = fit_config(load_config(tiny_config(base, kind)), 1)
    system = build(config, jax.devices()[:1])
    state = system.trainer.init(system.start)
    arrays = {name: tree for name, tree in state._asdict().items() if tree is not None}
    reader = Checkpointer(trained(base, kind) / "checkpoints", every=1, keep=9)
    found = reader.restore_latest(template_of(arrays))
    reader.close()
    assert found.step == config.steps
    policy = dataclasses.replace(system.policy, guidance=3.5)
    settings = SamplerSettings(Size(SIDE, SIDE), STEPS, Ode())
    sampler = Sampler(policy, system.placement.rollout, settings)
    weights = system.rollout_weights(found.arrays["ema" if kind == "full" else "tuned"])
    rows = np.arange(len(PROMPTS), dtype=np.int32)
    with jax.default_matmul_precision("highest"):
        prompts = sampler.encode(weights, said(*PROMPTS))
        trajectory = sampler.generate(weights, prompts, rows, _keys())
        return np.asarray(decode_floats(sampler, weights, trajectory))[:, 0]


def by_diffusers(pipe):
    noise = np.asarray(start_noise(_keys(), (SIDE // 4, SIDE // 4, 4))).transpose(0, 3, 1, 2)
    return pipe(
        PROMPTS,
        height=SIDE,
        width=SIDE,
        num_inference_steps=STEPS,
        guidance_scale=3.5,
        latents=torch.tensor(noise),
        output_type="np",
    ).images


def loaded_by(code):
    """The images of the pipeline that these lines load."""
    scope: dict = {}
    exec(code, scope)
    scope["pipe"].set_progress_bar_config(disable=True)
    return by_diffusers(scope["pipe"])


def check_same_but_not_the_base(images, base, kind):
    ours = by_our_sampler(base, kind)
    before = by_diffusers(oracle(pipeline(base)))
    np.testing.assert_allclose(images, ours, rtol=0, atol=2 / 255)
    assert (np.abs(images - before).max((1, 2, 3)) > 20 / 255).all()


@pytest.mark.slow
def test_a_pipeline_with_the_lora_merged_gives_the_images_of_the_run(base, tmp_path):
    export(trained(base, "lora"), tmp_path / "tuned", lora=False)
    check_same_but_not_the_base(by_diffusers(oracle(tmp_path / "tuned")), base, "lora")


def test_a_lora_gives_the_images_of_the_run_by_the_lines_that_load_it(base, tmp_path):
    run = export(trained(base, "lora"), tmp_path / "lora")
    assert [file.name for file in (tmp_path / "lora").iterdir()] == [
        "pytorch_lora_weights.safetensors"
    ]
    check_same_but_not_the_base(loaded_by(how_to_load(run, tmp_path / "lora")), base, "lora")


@pytest.mark.slow
def test_a_run_continues_an_exported_lora(base, tmp_path, capsys):
    """Its first pictures are the tuned ones, bit for bit; its KL is to the base model, so above 0 at once."""
    tuned, workdir = trained(base, "lora"), tmp_path / "run"
    export(tuned, tmp_path / "lora")
    config = tiny_config(base, "lora")
    config.steps = 1
    config.lora.path = str(tmp_path / "lora")
    config.algorithm.kl_coefficient = 0.1
    train(load_config(config), workdir)
    assert f"LoRA of rank 4 on the layers {config.lora.targets}\n" in capsys.readouterr().out
    before = np.load(workdir / "images" / "before.npz")
    after = np.load(tuned / "images" / "after.npz")
    np.testing.assert_array_equal(before["images"], after["images"])
    np.testing.assert_array_equal(before["scores"], after["scores"])
    assert read_metrics(workdir / "metrics.jsonl")[1]["kl"] > 1e-3


def test_what_cannot_be_exported_is_one_sentence(base, tmp_path):
    with pytest.raises(ConfigError, match=r"trains all weights .* remove --lora"):
        export(trained(base, "full"), tmp_path / "new", lora=True)
    with pytest.raises(ConfigError, match="not the workdir of a training run, as it has no config"):
        export(tmp_path, tmp_path / "new")
    with pytest.raises(ConfigError, match="exists already: choose another folder or delete it"):
        export(trained(base, "full"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_lines_that_the_script_prints_load_what_it_wrote(base, tmp_path):
    run, output = trained(base, "full"), tmp_path / "tuned"
    done = run_forked("export.py", f"--workdir={run}", f"--output={output}")
    assert done.returncode == 0, done.stderr
    first, _, code = done.stdout.partition("\n")
    assert first == f"{run} after step 2 is in {output}; to load it:"
    check_same_but_not_the_base(loaded_by(code), base, "full")


@pytest.mark.parametrize(
    ("step", "ema", "every", "updates", "first"),
    [
        (3, 0.9, 8, 2, 4),
        (4, 0.9, 8, 2, None),
        (1, 0.9, 5, 2, 2),
        (2, 0.9, 5, 2, None),
        (1, 0.0, 8, 2, None),
        (1, 0.9, 1, 1, None),
    ],
)
def test_a_run_whose_average_is_still_the_start_says_when_it_will_not_be(
    step, ema, every, updates, first
):
    trainer = TrainerSettings(ema=ema, ema_every=every, updates=updates)
    run = types.SimpleNamespace(step=step, config=types.SimpleNamespace(trainer=trainer))
    assert first_average(run) == first
