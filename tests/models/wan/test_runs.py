"""A run on clips, from the command's config to the records."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from digen_jax.assemble import open_parts
from digen_jax.checkpoints import folder
from digen_jax.config.load import fit_config, load_config
from digen_jax.errors import ConfigError
from digen_jax.families import load_family
from digen_jax.images import Size
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.rewards import built_in
from digen_jax.train import train
from tests.learned_rewards.folders import write
from tests.models.hunyuan.folders import hunyuan15_folder, hunyuan_folder
from tests.models.wan.folders import wan_folder
from tests.rewards.service.test_serving import Server
from tests.tiny_runs import pipeline, tiny_config


@pytest.mark.parametrize(
    ("kind", "frames", "match"),
    [("wan", 8, "use 5 or 9"), ("wan", 0, "0"), ("image", 5, "set frames to 1")],
)
def test_frames_are_checked_before_weights_are_read(base, monkeypatch, kind, frames, match):
    monkeypatch.setattr(folder.safetensors, "read_tree", None)
    c = tiny_config(base, "full")
    c.model.folder = str(wan_folder(base) if kind == "wan" else pipeline(base))
    c.model.frames = frames
    with pytest.raises(ConfigError, match=rf"config\.model\.frames\b.*{match}"):
        open_parts(fit_config(load_config(c), 1), jax.devices()[:1])


def test_a_model_of_clips_that_start_with_images_needs_their_size(base):
    c = tiny_config(base, "full")
    c.model = dict(folder=str(wan_folder(base, "image experts")), height=16, width=32, frames=5)
    with pytest.raises(ConfigError, match=r"^this model .* set config\.model\.source_height"):
        open_parts(fit_config(load_config(c), 1), jax.devices()[:1])


@pytest.mark.parametrize(
    ("folder_of", "height", "width"),
    [
        (wan_folder, 32, 16),
        pytest.param(wan_folder, 24, 32, marks=pytest.mark.slow),
        pytest.param(hunyuan_folder, 64, 32, marks=pytest.mark.slow),
        pytest.param(hunyuan15_folder, 64, 32, marks=pytest.mark.slow),
    ],
)
def test_devices_of_sequence_decode_parts_of_a_clip(base, folder_of, height, width):
    """Of the height, or of the width where four do not divide the height's latents."""
    family, size = load_family(folder_of(base)), Size(height, width, 9)
    numbers = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: numbers.normal(0, 0.3, leaf.shape).astype(np.float32), family.shapes()["vae"]
    )
    latents = jax.random.normal(jax.random.key(1), (2, *family.latent_shape(size)))
    found, temporaries = [], []
    for sequence in (1, 4):
        group = DeviceGroup(make_mesh(jax.devices()[: 2 * sequence], data=2, sequence=sequence))
        sampler = Sampler(Policy(family), group, SamplerSettings(size, 2, family.solver))
        weights = Weights(None, None, {"vae": jax.device_put(params, group.replicated)})
        compiled = sampler.trace_decode(weights, 2).lower().compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        found.append(compiled(weights.frozen, jax.device_put(latents, group.batch)))
    whole, split = found
    assert split.clips.shape == (2, 9, height, width, 3) and not split.has_nan.any()
    # Sums in another order may round to another byte.
    assert np.abs(np.int16(split.clips) - np.int16(whole.clips)).max() <= 1
    assert temporaries[1] < 0.6 * temporaries[0]


@pytest.mark.slow
def test_clips_are_scored_on_the_mesh_and_by_a_server(base, tmp_path, monkeypatch):
    learned = tmp_path / "learned"
    learned.mkdir()
    pickscore = dict(folder=str(write(learned).clip), every=4, reduce="top")
    # Random weights prefer nothing.
    unchecked = dataclasses.replace(built_in.BUILT_IN["pickscore"], sanity_check="")
    monkeypatch.setitem(built_in.BUILT_IN, "pickscore", unchecked)
    server = Server(tmp_path, "--reward=jpeg_incompressibility", "--port=0").wait()
    c = tiny_config(base, "lora")
    c.model = dict(height=16, width=32, frames=9, max_sequence_length=21)
    c.model.folder = str(wan_folder(base))
    c.lora = dict(rank=4, alpha=8.0)
    names = "pickscore", "served"
    c.rewards = (
        dict(name="pickscore", settings=pickscore),
        dict(name="served", settings=dict(servers=[server.url])),
    )
    try:
        train(load_config(c), tmp_path / "run")
    finally:
        server.end()
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    rewards = [
        [line[f"{prefix}reward_of/{name}"] for name in names] + [line[f"{prefix}reward"]]
        for line in lines
        for prefix in ("", "evaluation/")
        if f"{prefix}reward" in line
    ]
    assert len(rewards) == 4  # two steps, and evaluations before and after
    np.testing.assert_allclose([a + b for a, b, _ in rewards], [c for *_, c in rewards], rtol=1e-5)
    (clip,) = (tmp_path / "run").glob("*/step_000002.webp")
    with Image.open(clip) as animation:
        assert animation.n_frames == 9
