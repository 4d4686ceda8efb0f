"""FLOPs that programs need, against those that the compiled programs do."""

import json
import shutil

import jax
import pytest

from digen_jax.config.load import complete, load_config
from digen_jax.models.published import published_folder
from digen_jax.planning.compiled import programs
from digen_jax.planning.counting import products, repeated
from digen_jax.planning.hlo import parse
from tests.tiny_runs import once, tiny_config

# Wide enough that what is not counted, elementwise operations aside, is small: the ends of the network.
SMALL = {
    "transformer": dict(
        num_layers=12,
        num_attention_heads=4,
        caption_projection_dim=256,
        joint_attention_dim=256,
        pooled_projection_dim=64,
        dual_attention_layers=[0, 1, 2, 3],
    ),
    "text_encoder": dict(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, projection_dim=32
    ),
    "text_encoder_2": dict(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, projection_dim=32
    ),
    "text_encoder_3": dict(d_model=256, d_kv=16, d_ff=32, num_layers=2, num_heads=2),
    "vae": dict(block_out_channels=[32, 32, 32, 32]),
}


def small_model(folder):
    """Stable Diffusion 3.5 Medium's configuration, smaller."""
    shutil.copytree(published_folder("stabilityai/stable-diffusion-3.5-medium"), folder)
    for part, fields in SMALL.items():
        path = folder / part / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def recipe_of(base, kind, **changes):
    config = complete(tiny_config(base, kind))
    config.model.update(folder=str(once(base / "small-sd35", small_model)), height=256, width=256)
    config.batch.update(groups=1, images=2)
    config.sampler.chunk = config.trainer.micro_batch = config.evaluation.batch = 2
    config.placement.rollout.data = 0
    config.update_from_flattened_dict(changes)
    return load_config(config)


CHANGES = {
    "algorithm.kl_coefficient": 0.1,
    "sampler.guidance": 4.0,
    "algorithm.old_log_probs": "recomputed",
    "lora.rank": 1,
    "model.remat": "blocks",
}


@pytest.mark.slow
def test_a_program_does_what_is_needed_and_what_remat_repeats(base):
    recipe = recipe_of(base, "lora", **CHANGES)
    made = {program.name: program for program in programs(recipe, jax.devices()[:1])}
    for name in ("generate", "train"):
        module = parse(made[name].lower().compile().as_text())
        done, again = products(module), products(module, repeated)
        needed = sum(made[name].work.values())
        assert done - again == pytest.approx(needed, rel=0.02), name
        assert (again > 0.15 * needed) == (name == "train")
