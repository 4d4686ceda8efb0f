"""Training on image files instead of samples: SFT and DPO of pairs, whose loss is that of float64 numpy."""

import dataclasses
import hashlib
import itertools
import json

import jax
import numpy as np
import pytest
from PIL import Image, ImageOps

from digen_jax.assemble import open_parts, train_prompts
from digen_jax.config.load import fit_config, load_config
from digen_jax.diffusion.noising import forward_noise
from digen_jax.diffusion.sampling import image_keys
from digen_jax.distributed import launch
from digen_jax.errors import ConfigError
from digen_jax.families import read_parts
from digen_jax.parallel.system import GivenImages
from digen_jax.planning.flops import RunFlops
from digen_jax.precompute import find_missing_latents, precompute_all
from digen_jax.prompt_store import stored_latents
from digen_jax.train import train
from tests.config.cases import ODE
from tests.metrics import assert_same_metrics, metrics
from tests.parallel import toy
from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures("exact_and_split")

FIELDS = {"sft": ("chosen",), "dpo": ("chosen", "rejected")}
ALGORITHMS = {
    "sft": dict(algorithm__name="sft"),
    "dpo": dict(algorithm__name="diffusion_dpo", algorithm__from_files=True, algorithm__beta=3.0),
}
GROUPS, BETA = 4, 3.0


def of_path(path):
    seed = int.from_bytes(hashlib.sha256(path.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).normal(size=(4, 4, 4)).astype(np.float32)


def records(step):
    """Prompts of a step, each with two image files."""
    return [
        record | {field: f"{record['serial']}-{field}" for field in FIELDS["dpo"]}
        for record in next(itertools.islice(toy.batches(GROUPS), step, None))
    ]


def built(name, layout=((0, 1), (1, 1)), workers=1, trainers=1, micro=4, **fields):
    """(system, config) of a run of `GROUPS` groups; its images are those of `of_path`."""
    images = len(FIELDS[name])
    shape = dict(batch__groups=GROUPS, batch__images=images, sampler__chunk=4)
    meshes = toy.meshes(*layout, workers=workers, trainers=trainers)
    c = toy.config(
        **ODE | ALGORITHMS[name] | shape | meshes | dict(trainer__micro_batch=micro) | fields
    )
    given = GivenImages(FIELDS[name], lambda paths: np.stack([of_path(path) for path in paths]))
    return toy.system(c)._replace(given=given), c


def error(params, serial, image, record, field, conditioning):
    """The flow-matching error of an image file: its key gives the noise level and the noise."""
    keys = image_keys(jax.random.key(0), np.array([serial]), np.array([image]))
    z = float(jax.random.normal(jax.random.fold_in(keys[0], 3), (1,))[0])
    sigma = 1 / (1 + np.exp(-z))
    sigma = 3 * sigma / (1 + 2 * sigma)  # the shift of Stable Diffusion 3
    noise = np.float64(forward_noise(keys, np.zeros(1, np.int32), (4, 4, 4))[0])
    x0 = np.float64(of_path(record[field]))
    v = toy.in_float64(params, (1 - sigma) * x0 + sigma * noise, sigma, *conditioning)
    return ((v - (noise - x0)) ** 2).mean()


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_the_loss_of_a_step_is_that_of_its_files_by_hand(name):
    parts, c = built(name)
    state = parts.updater.init(toy.moved(parts.start, 0.3))
    tuned, family = jax.device_get(state.tuned)["transformer"], toy.ToyFamily()
    start, table = (family.params()[part] for part in ("transformer", "text_encoder"))
    tuned = start | tuned  # with what is never trained
    _, (found,), _ = toy.drive(parts, c, 1, state=state, batches=iter([records(0)]))
    losses, errors = [], []
    for record in records(0):
        context = np.float64(table["table"])[family.tokenize([record])[0]]
        conditioning = context, context.sum(0)
        # A pair has the noise and the noise level of its first image.
        given = record["serial"], 0, record
        errors.append([error(tuned, *given, field, conditioning) for field in FIELDS[name]])
        if name == "sft":
            losses.append(errors[-1][0])
            continue
        before = [error(start, *given, field, conditioning) for field in FIELDS[name]]
        margin = (errors[-1][0] - before[0]) - (errors[-1][1] - before[1])
        losses.append(np.log1p(np.exp(BETA / 2 * margin)))
    assert found["loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    if name == "dpo":
        for number, term in enumerate(("preferred_error", "dispreferred_error")):
            assert found[term] == pytest.approx(np.mean(np.array(errors)[:, number]), rel=1e-4)
    assert not any(metric.startswith("reward") for metric in found)
    assert RunFlops.of(toy.opened(c), parts.policy).image == 0


def test_the_result_does_not_depend_on_the_layout():
    results = []
    for options in (dict(), dict(layout=((1, 2), (1, 2)), workers=2, trainers=2)):
        parts, c = built("dpo", micro=4, trainer__eps=1.0, trainer__learning_rate=1.0, **options)
        batches = map(records, itertools.count())
        state, history, _ = toy.drive(parts, c, 2, batches=batches)
        results.append((jax.device_get(state.tuned), history[-1]["loss"]))
    start = jax.device_get(built("dpo")[0].start)
    changes = [jax.tree.map(np.subtract, tuned, start) for tuned, _ in results]
    assert toy.difference(changes[1], changes[0]) < 1e-4
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-5)


# ------------------------------------------------------------------------------ files


@pytest.fixture
def pairs(tmp_path):
    """Six pairs of images of different sizes; the last line has the images of the first, exchanged."""
    rng, lines = np.random.default_rng(0), []
    for number in range(5):
        line = {"prompt": ["a photo of a red circle", "a photo of a blue star"][number % 2]}
        for field in FIELDS["dpo"]:
            pixels = rng.integers(0, 256, (20 + number, 48, 3), np.uint8)
            line[field] = f"{number}-{field}.png"
            Image.fromarray(pixels).save(tmp_path / line[field])
        lines.append(line)
    first = lines[0]
    lines.append(first | {"chosen": first["rejected"], "rejected": first["chosen"]})
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def config(base, pairs, name="dpo", **fields):
    c = tiny_config(base, "lora")
    c.prompts.update(file=str(pairs), cache=str(pairs.with_name("cache")))
    c.algorithm = dict(name="sft") if name == "sft" else dict(name="diffusion_dpo", from_files=True)
    c.sampler = dict(steps=4, kind="ode", noise_level=0.0, window=dict(length=0), chunk=4)
    c.batch = dict(groups=4 // len(FIELDS[name]), images=len(FIELDS[name]))
    c.placement = dict(rollout=dict(data=0), trainer=dict(data=1))
    c.trainer.micro_batch = 4
    c.rewards = ()
    c.checkpoint = dict(every=1)
    for field, value in fields.items():
        section, _, last = field.partition("__")
        c[section][last] = value
    return load_config(c)


def test_latents_are_those_of_the_files_centers_and_are_stored_once(base, pairs):
    asked = config(base, pairs)
    parts = open_parts(asked, jax.devices()[:1])
    found = find_missing_latents(asked, parts)
    assert (len(found.records), len(found.missing)) == (10, 10)
    found.run()
    precompute_all(asked)  # again, with the command that encodes prompts elsewhere
    assert find_missing_latents(asked, parts).missing == []
    given = stored_latents(asked, parts.folder, parts.family)
    first, second = train_prompts(asked).steps[0]
    latents = given.latents([first, first, second, second])
    files = [record[field] for record in (first, second) for field in FIELDS["dpo"]]
    images = [ImageOps.fit(Image.open(file), (32, 32), Image.Resampling.LANCZOS) for file in files]
    family, group = parts.family, parts.placement.rollout
    vae = read_parts(family, parts.folder, family.decoders, group)
    expected = jax.jit(family.encode_images)(vae, np.float32(np.stack(images)) / 255)
    np.testing.assert_allclose(latents, expected, atol=1e-4 * np.abs(expected).max())
    other = config(base, pairs, model__height=16)
    assert len(find_missing_latents(other, open_parts(other, jax.devices()[:1])).missing) == 10


@pytest.mark.slow
def test_a_run_without_rewards_is_resumed_at_the_same_example(base, pairs, tmp_path):
    asked = config(base, pairs)
    assert train(asked, tmp_path / "straight") is None
    for steps in (1, asked.steps):
        assert train(dataclasses.replace(asked, steps=steps), tmp_path / "resumed") is None
    straight, resumed = (metrics(tmp_path / run) for run in ("straight", "resumed"))
    assert len(straight) == 2 and straight[0]["gradient_norm"] > 1e-4
    assert_same_metrics(resumed, straight)


LINE = {"prompt": "a", "chosen": "0-chosen.png", "rejected": "0-rejected.png"}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("dpo", dict(rejected=None), ("line 2", '"rejected"')),
        ("dpo", dict(chosen=3), ("line 2", '"chosen"')),
        ("sft", dict(chosen="missing.png"), ("line 2", "missing.png")),
        ("sft", dict(chosen="pairs.jsonl"), ("line 2", "pairs.jsonl")),
        ("sft", dict(prompt=None), ("line 2", '"prompt"')),
        ("sft", None, ("holds no prompt",)),
    ],
)
def test_a_file_that_cannot_be_trained_is_refused_by_its_line(base, pairs, name, changed, message):
    line = {field: one for field, one in (LINE | (changed or {})).items() if one is not None}
    lines = [LINE, line] if changed else []
    pairs.write_text("".join(json.dumps(one) + "\n" for one in lines))
    with pytest.raises(ConfigError) as caught:
        fit_config(config(base, pairs, name), 1)
    assert "\n" not in str(caught.value)
    assert all(part in str(caught.value) for part in ("config.prompts.file", *message))


def test_sft_needs_no_rejected_images_and_ray_is_refused(base, pairs):
    line = {"prompt": "a", "chosen": "0-chosen.png"}
    pairs.write_text(json.dumps(line))
    fit_config(asked := config(base, pairs, "sft"), 1)
    with pytest.raises(ConfigError, match=r"algorithm\.name"):
        launch.check(asked, (None, None, None), one_job=False)
