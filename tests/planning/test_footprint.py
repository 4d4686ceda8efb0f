import json

import jax
import pytest
from ml_collections import ConfigDict

from digen_jax.config.load import complete, read_config
from digen_jax.parallel.placement import RolloutAxes, TrainerAxes
from digen_jax.planning.compiled import programs
from digen_jax.planning.footprint import model_footprint
from digen_jax.planning.plan import make_problem, meshes
from digen_jax.scheduling.layouts import PoolLayout
from tests.planning.test_plan import calibration, shapes
from tests.tiny_runs import pipeline, tiny_config


def test_the_footprint_is_the_models(base, tmp_path):
    config = complete(tiny_config(base, "full"))
    config.placement.rules = ((".*", "replicate"),)
    found = model_footprint(read_config(config))
    from safetensors.numpy import load_file

    folder = pipeline(base)
    files = {part: next((folder / part).glob("*.safetensors")) for part in ("transformer", "vae")}
    total = {part: sum(a.nbytes for a in load_file(file).values()) for part, file in files.items()}
    assert found.tuned(1, 1) + found.base(1, 1) == total["transformer"]
    assert found.tuned(2, 1) == found.tuned(1, 1) and found.frozen(1, 1) > total["vae"]
    assert found.copies == 1
    lora = model_footprint(read_config(tiny_config(base, "lora")))
    assert lora.base(1, 1) == total["transformer"] and 0 < lora.tuned(1, 1) < found.tuned(1, 1) / 2
    assert (found.published(1, 1), found.sampler_base(1, 1)) == (
        found.tuned(1, 1),
        found.base(1, 1),
    )
    config.precision.rollout = "bfloat16"
    half = model_footprint(read_config(config))
    assert half.published(1, 1) == found.tuned(1, 1) / 2 and half.tuned(1, 1) == found.tuned(1, 1)
    # An autoencoder of three resolutions: 8 x 8 latents of 4 channels, twice, and the log-probability.
    side = 32 // 4
    assert found.trajectory == 2 * 4 * (2 * side * side * 4 + 1)
    config.precision.trajectory = "bfloat16"
    half = model_footprint(read_config(config)).trajectory
    assert half == 2 * (2 * 2 * side * side * 4 + 4)
    # Of two prompts, and of the empty one for both: 12 tokens of width 32, and a pooled vector of width 16.
    assert found.conditioning == 3 * 4 * (12 * 32 + 16)
    # And of two negative prompts; equal ones are kept once.
    for names, rows in ((("x", "y"), 4), (("x", "x"), 3)):
        lines = [{"prompt": "a", "negative_prompt": name} for name in names]
        (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
        config.prompts.file = str(tmp_path / "p.jsonl")
        own = model_footprint(read_config(config))
        assert own.conditioning == rows * 4 * (12 * 32 + 16)


def test_text_encoders_that_encode_ahead_are_not_in_a_step(base):
    config = complete(tiny_config(base, "lora"))
    config.placement.rules = ((".*", "replicate"),)
    found = {}
    for kind in ("each_step", "precomputed"):
        config.prompts.encoding = kind
        found[kind] = model_footprint(read_config(config))
    from safetensors.numpy import load_file

    files = [next((pipeline(base) / f"text_encoder{n}").glob("*.safetensors")) for n in ("", "_2")]
    encoders = sum(a.nbytes for file in files for a in load_file(file).values())
    each, ahead = found["each_step"], found["precomputed"]
    assert each.ahead is None and ahead.ahead(1, 1) == pytest.approx(encoders, rel=0.01)
    assert each.frozen(1, 1) - ahead.frozen(1, 1) == ahead.ahead(1, 1)
    assert each.conditioning == ahead.conditioning
    (encode,) = [p for p in programs(read_config(config), jax.devices()[:2]) if "encode" in p.name]
    assert (encode.command, encode.what) == ("", "64 prompts, before the run samples")
    shapes = jax.tree.leaves(encode.lower().out_info)
    assert {leaf.shape[0] for leaf in shapes} == {64}


def forward(config, **fields):
    """The config for AWM."""
    config.sampler.update(kind="ode", noise_level=0.0, window=dict(length=0))
    config.algorithm = ConfigDict(dict(name="awm", **fields))
    return config


def test_of_the_forward_process_noise_levels_are_trained_and_the_image_alone_is_stored(base):
    config = complete(forward(tiny_config(base, "lora"), times=dict(count=5)))
    assert make_problem(read_config(config), 4, calibration()).transitions == 5
    found = model_footprint(read_config(config))
    assert (found.trajectory, found.copies) == (4 * (8 * 8 * 4 + 2), 1)


def test_parts_of_parameters_are_split_by_the_rules():
    config = shapes()
    config.placement.rules = ((".*bias", "replicate"), (".*", "fsdp"))
    found = model_footprint(read_config(config))
    whole, half = found.tuned(1, 1), found.tuned(2, 1)
    assert whole / 2 < half < 0.75 * whole
    assert whole / 4 < found.tuned(2, 2) < found.tuned(1, 2) < whole
    problem = make_problem(read_config(config), 4, calibration(), found)
    rollout, trainer = meshes(problem, PoolLayout(1, 2, rollout=1, rollout_devices=2))
    assert trainer == TrainerAxes(data=1, fsdp=2, samples=True)
    assert rollout in (RolloutAxes(data=1, fsdp=2), RolloutAxes(data=2))
