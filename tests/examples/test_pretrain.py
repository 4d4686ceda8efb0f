"""Pretraining of a tiny model by the script, read by diffusers."""

import functools
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.numpy import load_file

from digen_jax.errors import ConfigError
from digen_jax.models.autoencoders.autoencoder_kl import scale_latents
from digen_jax.models.autoencoders.autoencoder_wan import (
    AutoencoderKLWan,
    AutoencoderKLWanConfig,
    inputs,
)
from examples.shapes import pretrain
from examples.shapes.networks import PIPELINES
from examples.shapes.pool import Pool, cached_pool
from tests.cases import said
from tests.examples.clips import both
from tests.examples.tiny_config import get_config
from tests.metrics import metrics
from tests.pipelines import ROOT, environment, shipped_config

PARTS = ("transformer", "vae", "text_encoder", "text_encoder_2")


def run_script(base: pathlib.Path, name: str = "shapes") -> subprocess.CompletedProcess:
    """The script, with its folders "workdir" and "output" in `base`."""
    command = ["launch/pretrain.py", f"--config=tests/examples/tiny_config.py:{name}"]
    return subprocess.run(
        [sys.executable, *command, f"--workdir={base / 'workdir'}", f"--output={base / 'output'}"],
        cwd=ROOT,
        env=environment(1, PYTHONPATH=str(ROOT)),
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> pathlib.Path:
    """A folder with "workdir" and the pipeline "output"."""
    base = tmp_path_factory.mktemp("pretraining")
    done = run_script(base)
    assert done.returncode == 0, done.stderr
    return base


@pytest.mark.slow
def test_a_workdir_of_other_settings_is_refused(trained, tmp_path):
    other = get_config()
    other.transformer.batch = 8
    with pytest.raises(ConfigError, match=r"config\.transformer\.batch: 16 -> 8"):
        pretrain.pretrain(other, trained / "workdir", tmp_path / "output")


@pytest.fixture(scope="module")
def oracle(trained) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(
        trained / "output", text_encoder_3=None, tokenizer_3=None
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


@functools.cache
def ours(folder: pathlib.Path):
    """The family and all its parameters, read from the folder."""
    from digen_jax.models.sd3.family import StableDiffusion3

    family = StableDiffusion3.from_folder(folder)
    return family, {part: family.read(folder, part) for part in PARTS}


def the_pool(trained: pathlib.Path) -> Pool:
    config = get_config()
    return cached_pool(
        trained / "workdir" / "pool.npz", config.images, config.image_size, config.seed
    )


@pytest.mark.slow
def test_both_stages_learn(trained):
    for stage, name, share in (("autoencoder", "mse", 0.6), ("transformer", "loss", 0.9)):
        lines = metrics(trained / "workdir" / stage)
        assert [line["step"] for line in lines] == list(range(2, 26, 2))
        values = [line[name] for line in lines]
        assert np.mean(values[-5:]) < share * np.mean(values[:5]), (stage, values)


@pytest.mark.slow
def test_latents_have_mean_zero_and_variance_one(trained, oracle):
    images = torch.from_numpy(the_pool(trained).images.astype(np.float32) / 127.5 - 1)
    with torch.no_grad():
        latents = oracle.vae.encode(images.permute(0, 3, 1, 2)).latent_dist.mean
    config = oracle.vae.config
    scaled = (latents - config.shift_factor) * config.scaling_factor
    assert abs(float(scaled.mean())) < 1e-4
    assert float(scaled.std()) == pytest.approx(1, abs=1e-3)
    assert abs(float(latents.mean())) > 1e-3  # tests the shift, too
    ours_scaled = scale_latents(
        ours(trained / "output")[0].vae.config, jnp.asarray(latents.permute(0, 2, 3, 1))
    )
    np.testing.assert_allclose(ours_scaled, scaled.permute(0, 2, 3, 1), atol=1e-4)


@pytest.mark.slow
def test_autoencoder_loss_is_diffusers(trained, oracle):
    family, params = ours(trained / "output")
    images = the_pool(trained).images[:4].astype(np.float32) / 127.5 - 1
    key = jax.random.key(5)
    with jax.default_matmul_precision("highest"):
        loss, parts = pretrain.autoencoder_loss(
            family, 0.3, 0.7, params["vae"], jnp.asarray(images), key
        )

    wanted = torch.from_numpy(images).permute(0, 3, 1, 2)
    noise = np.asarray(jax.random.normal(key, (4, 8, 8, 4))).transpose(0, 3, 1, 2)
    with torch.no_grad():
        posterior = oracle.vae.encode(wanted).latent_dist
        latents = posterior.mean + posterior.std * torch.from_numpy(noise.copy())
        error = oracle.vae.decode(latents).sample - wanted
        mse, mae = (error**2).mean(), error.abs().mean()
        kl = posterior.kl().mean() / posterior.mean[0].numel()  # diffusers sums over a latent
        expected = mse + 0.7 * mae + 0.3 * kl
    for name, value in {"mse": mse, "mae": mae, "kl": kl}.items():
        assert float(parts[name]) == pytest.approx(float(value), rel=1e-4), name
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
def test_flow_matching_loss_is_diffusers(trained, oracle):
    family, params = ours(trained / "output")
    prompts = ["a photo of a red circle", "", "two blue stars"]
    latents = np.random.default_rng(0).normal(size=(3, 8, 8, 4)).astype(np.float32)
    batch = jax.tree.map(jnp.asarray, (latents, family.tokenize(said(*prompts))))
    key = jax.random.key(5)
    with jax.default_matmul_precision("highest"):
        found, _ = pretrain.flow_matching_loss(family, params, batch, key)

    noise_key, sigma_key = jax.random.split(key)
    draw = functools.partial(np.array, copy=True)
    noise = torch.from_numpy(draw(jax.random.normal(noise_key, latents.shape)))
    logit = torch.from_numpy(draw(jax.random.normal(sigma_key, (3,))))
    sigma = torch.sigmoid(logit)
    s, x0 = sigma[:, None, None, None], torch.from_numpy(latents)
    with torch.no_grad():
        context, _, pooled, _ = oracle.encode_prompt(
            prompts, prompts, prompts, do_classifier_free_guidance=False
        )
        v = oracle.transformer(
            ((1 - s) * x0 + s * noise).permute(0, 3, 1, 2), context, pooled, sigma * 1000
        ).sample.permute(0, 2, 3, 1)
    expected = ((v - (noise - x0)) ** 2).mean()
    assert float(found) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.slow
def test_captions_are_dropped_by_chance_and_rows_are_sampled_by_the_step(trained, monkeypatch):
    family, params = ours(trained / "output")
    pool, config = the_pool(trained), get_config()
    config.transformer.batch, config.transformer.caption_dropout = 2000, 0.25
    seen = []
    monkeypatch.setattr(
        pretrain, "fit", lambda params, loss, batch, *_: seen.append((params, batch)) or params
    )
    latents = np.arange(len(pool.images), dtype=np.float32)[:, None, None, None]
    pretrain.train_transformer(family, params, latents, pool, config, trained / "unused")
    ((tuned, batch),) = seen
    assert sorted(tuned) == ["text_encoder", "text_encoder_2", "transformer"]
    rows, ids = batch(7)
    empty, given = family.tokenize_null([]), family.tokenize(said(*pool.captions))
    assert ids.third is None  # there is no T5
    for part, none, all_ids in zip(*map(jax.tree.leaves, (ids, empty, given)), strict=True):
        dropped = (part == none).all(1)
        assert 0.2 < dropped.mean() < 0.3
        np.testing.assert_array_equal(part[~dropped], all_ids[rows[~dropped, 0, 0, 0].astype(int)])
    again, other = batch(7), batch(8)
    jax.tree.map(np.testing.assert_array_equal, (rows, ids), again)
    assert (other[0] != rows).any()


@pytest.mark.slow
def test_a_model_of_clips_is_pretrained_for_diffusers(tmp_path):
    done = run_script(tmp_path, "moving")
    assert done.returncode == 0, done.stderr
    for stage, name in (("autoencoder", "mse"), ("transformer", "loss")):
        values = [line[name] for line in metrics(tmp_path / "workdir" / stage)]
        assert np.mean(values[-5:]) < np.mean(values[:5]), (stage, values)
    for part in ("transformer", "vae"):
        weights = load_file(tmp_path / "output" / part / "diffusion_pytorch_model.safetensors")
        assert {value.dtype for value in weights.values()} == {np.dtype("float16")}
    found, expected = both(tmp_path / "output")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)
    assert found.shape == (2, 9, 32, 32, 3) and found.std() > 0.01


def test_autoencoder_of_clips_starts_as_one_of_images():
    """The first frame is an image, and so is the last of every four, which the decoder repeats."""
    pipeline, config = PIPELINES["WanPipeline"], get_config("moving")
    network = config.autoencoder.network.to_dict() | {"dim_mult": (1, 1, 1)}
    vae = AutoencoderKLWan(AutoencoderKLWanConfig.from_config(network))
    rng = np.random.default_rng(0)

    def sample(path, leaf):
        kernel = jax.tree_util.keystr(path, simple=True, separator="/").endswith("kernel")
        values = rng.normal(size=leaf.shape) / np.prod(leaf.shape[:-1]) ** 0.5
        return jnp.asarray(values if kernel else jnp.ones(leaf.shape) * (leaf.ndim > 1), leaf.dtype)

    initialize = functools.partial(vae.init, method="reconstruct")
    shapes = jax.eval_shape(initialize, jax.random.key(0), *inputs(vae.config))["params"]
    random = jax.tree_util.tree_map_with_path(sample, shapes)
    params = pipeline.start_autoencoder(random)

    @jax.jit
    def reconstruct(clips):
        mean, logvar = vae.apply({"params": params}, clips, method="encode", at_once=9)
        return vae.apply({"params": params}, mean, method="decode", at_once=9), logvar

    clip = rng.uniform(-1, 1, (1, 9, 16, 16, 3)).astype(np.float32)
    results = reconstruct(clip), reconstruct(clip[0, :, None])
    (found, logvar), (images, _) = jax.tree.map(np.asarray, results)
    np.testing.assert_allclose(found[0], images[[0, 4, 4, 4, 4, 8, 8, 8, 8], 0], atol=1e-5)
    assert np.abs(np.diff(images, axis=0)).mean() > 0.01
    assert -7 < logvar.mean() < -5
    start, block = (tree["decoder"]["mid_block"]["resnets_0"] for tree in (random, params))
    assert not block["conv2"]["kernel"].any()
    # Two of three frames are zeros, and the variance is kept.
    stds = (float(np.std(tree["conv1"]["kernel"])) for tree in (start, block))
    assert next(stds) == pytest.approx(next(stds), rel=0.2)


def test_autoencoder_of_clips_is_trained_on_images_first(monkeypatch, tmp_path):
    config = get_config("moving")
    config.autoencoder.update(image_steps=3, image_batch=40, batch=5)
    batches = []
    monkeypatch.setattr(pretrain, "fit", lambda params, loss, batch, *_: batches.append(batch))
    frames = np.arange(48 * 9).reshape(48, 9, 1, 1, 1) / 3
    pool = Pool(np.broadcast_to(frames, (48, 9, 2, 2, 3)), [])
    params = {"vae": {"quant_conv": {"bias": jnp.zeros(4)}}}
    pretrain.train_autoencoder(None, params, pool, config, tmp_path)
    (batch,) = batches
    images, clips = batch(2), batch(3)
    assert images.shape == (40, 1, 2, 2, 3) and clips.shape == (5, 9, 2, 2, 3)
    numbers = np.round((images[:, 0, 0, 0, 0] + 1) * 127.5 * 3).astype(int)
    assert len(set(numbers // 9)) > 15 and len(set(numbers % 9)) > 5
    np.testing.assert_allclose(np.diff(clips, axis=1), 1 / 3 / 127.5, atol=1e-5)


@pytest.mark.parametrize("name", ["shapes_pretrain", "moving_shapes_pretrain"])
def test_the_shipped_configs_are_valid(name):
    pretrain.check_config(shipped_config(name))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", -1),
        ("pipeline", "FluxPipeline"),
        ("autoencoder.kl_weight", float("nan")),
        ("transformer.fit.stepz", 3),
        ("text.max_length", None),
    ],
)
def test_invalid_fields_are_named(name, value):
    config = shipped_config("shapes_pretrain")
    *groups, field = name.split(".")
    section = functools.reduce(lambda section, group: section[group], groups, config)
    if value is None:
        del section[field]
    else:
        section[field] = value
    with pytest.raises(ConfigError, match=f"^config.{name} "):
        pretrain.check_config(config)
