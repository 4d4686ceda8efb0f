"""Opening a model and drawing prompts by it: pictures in a folder, the same whatever the batch."""

import json
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from digen_jax.assemble import build
from digen_jax.config.load import complete, read_config
from digen_jax.errors import ConfigError
from digen_jax.inference.export import export
from digen_jax.inference.model import is_run, open_model, read_run_config
from digen_jax.inference.sampling import sample_clips, sample_to_folder, slug
from digen_jax.logging.workdir import record_start
from tests.cases import said
from tests.pipelines import ROOT
from tests.scripts import run_forked
from tests.tiny_runs import pipeline, tiny_config, trained

PROMPTS = ["a red circle", "two blue stars", "a green square above a red circle"]
SLUGS = ["a-red-circle", "two-blue-stars", "a-green-square-above-a-red-circle"]
NAMES = [*(f"0000{number}_{name}.png" for number, name in enumerate(SLUGS)), "grid.png"]


@pytest.fixture(scope="module")
def plain(base):
    """The pipeline and its sampler, whose programs most tests here use."""
    model = open_model(str(pipeline(base)), jax.devices()[:1])
    return model, model.sampler(dict(steps=3, guidance=2.0))


def draw(model, sampler, folder, prompts=PROMPTS, seed=7, images=1, negative_prompt=None):
    records = said(*prompts)
    for record in records if negative_prompt is not None else ():
        record["negative_prompt"] = negative_prompt
    sample_to_folder(model, sampler, records, folder, 2, seed, images)
    return pictures(folder)


def pictures(folder):
    """The images of a folder in their order, without the grid, as numbers."""
    return np.stack([np.asarray(Image.open(f), int) for f in sorted(folder.glob("0*.png"))])


def test_the_script_draws_every_prompt_and_the_batch_makes_no_difference(base, plain, tmp_path):
    file, negative = tmp_path / "prompts.txt", "a blue star"
    file.write_text("\n".join(PROMPTS))
    done = run_forked(
        "sample.py",
        f"--model={pipeline(base)}",
        f"--prompts={file}",
        f"--negative_prompt={negative}",
        f"--output={tmp_path / 'script'}",
        "--batch=3",
        "--steps=3",
        "--guidance=2",
        "--seed=7",
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"3 images and grid.png are in {tmp_path / 'script'}\n"
    assert sorted(file.name for file in (tmp_path / "script").iterdir()) == NAMES
    # Three images on two devices, two of them together on one, and one after the other.
    found = pictures(tmp_path / "script")
    assert found.shape == (3, 32, 32, 3)
    two = draw(*plain, tmp_path / "two", negative_prompt=negative)
    assert abs(found - two).max() <= 1
    assert abs(found[0] - found[1]).max() > 20
    assert Image.open(tmp_path / "two" / "grid.png").width > 3 * 160


def test_a_repeated_prompt_is_another_image_and_another_seed_too(plain, tmp_path):
    first, second = draw(*plain, tmp_path / "7", prompts=["a red circle"] * 2)
    third, _ = draw(*plain, tmp_path / "8", prompts=["a red circle"] * 2, seed=8)
    assert abs(first - second).max() > 20 and abs(first - third).max() > 20


def test_images_of_a_prompt_are_numbered_and_the_first_is_that_of_one_alone(plain, tmp_path):
    one = draw(*plain, tmp_path / "one", prompts=PROMPTS[:2])
    three = draw(*plain, tmp_path / "three", prompts=PROMPTS[:2], images=3)
    names = [f"0000{i}_0{j}_{name}.png" for i, name in enumerate(SLUGS[:2]) for j in range(3)]
    assert sorted(file.name for file in (tmp_path / "three").iterdir()) == [*names, "grid.png"]
    assert abs(three[::3] - one).max() <= 1
    assert abs(three[0] - three[1]).max() > 20 and abs(three[1] - three[2]).max() > 20


def test_the_embedded_model_is_sampled_as_its_own_file_says():
    model = open_model(str(ROOT / "assets" / "shapes-sd3"), jax.devices()[:1])
    assert model.defaults == (32, 32, 8, 2.0, 1.0, 1, 0.0)


@pytest.mark.slow
def test_an_evaluation_is_sampling_at_its_size_steps_and_guidance(base, plain):
    model, _ = plain
    evaluation = dict(height=40, width=48, steps=3, guidance=3.5)
    config = complete(tiny_config(base, "full"))
    config.placement.rollout.data = 0
    config.evaluation.update(evaluation)
    system = build(read_config(config), jax.devices()[:1])
    records = said(*PROMPTS[:2])
    made = system.evaluator, system.rollout_weights(system.start)
    found = sample_clips(*made, records, 0, 2).astype(int)
    assert found.shape == (2, 1, 40, 48, 3) and abs(found[0] - found[1]).max() > 20
    for changes, same in (({}, True), (dict(steps=4), False), (dict(guidance=2.0), False)):
        sampler = model.sampler(evaluation | changes)
        sampled = sample_clips(sampler, model.weights, records, 0, 2)
        assert (abs(found - sampled).max() <= 1) == same


def test_an_exported_model_is_sampled_as_its_run_evaluated(base, tmp_path):
    export(trained(base, "full"), tmp_path / "tuned")
    exported = open_model(str(tmp_path / "tuned"), jax.devices()[:1])
    assert exported.defaults == (32, 32, 5, 2.0, 1.0, 1, 0.0)
    (tmp_path / "tuned" / "sampling.json").write_text('{"steps": 2.5}')
    with pytest.raises(
        ConfigError, match=r"sampling.json has 'steps': 2.5; it may have integers for steps"
    ):
        open_model(str(tmp_path / "tuned"), jax.devices()[:1])
    (tmp_path / "tuned" / "sampling.json").write_text('{"max_sequence_length": 0}')
    with pytest.raises(ConfigError, match="max_sequence_length must be a positive integer"):
        open_model(str(tmp_path / "tuned"), jax.devices()[:1])


@pytest.mark.slow
def test_a_run_is_drawn_as_its_lora_on_the_model_it_started_from(base, plain, tmp_path):
    run = open_model(str(trained(base, "lora")), jax.devices()[:1])
    assert run.defaults == (32, 32, 5, 2.0, 1.0, 1, 0.0), "as the run's own evaluation samples"
    export(trained(base, "lora"), tmp_path / "lora")
    with_lora = open_model(str(pipeline(base)), jax.devices()[:1], lora=str(tmp_path / "lora"))
    assert with_lora.defaults == (32, 32, 28, 7.0, 1.0, 1, 0.0), "as diffusers' pipeline samples"
    assert (run.fps, plain[0].fps) == (8, 16)
    drawn = draw(run, run.sampler(dict(steps=3)), tmp_path / "run")
    # The networks are of one form, as the LoRA is merged into its weights.
    with_it = draw(with_lora, plain[1], tmp_path / "with")
    assert abs(drawn - with_it).max() <= 1
    assert abs(drawn - draw(*plain, tmp_path / "plain")).max() > 20


def test_the_compute_type_is_the_runs_or_the_given_one(base):
    folder = str(pipeline(base))
    assert open_model(folder, jax.devices()[:1]).family.transformer.dtype == np.float32
    half = open_model(folder, jax.devices()[:1], dtype="bfloat16")
    assert half.family.transformer.dtype == jax.numpy.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(half.weights)} == {np.dtype("float32")}


def test_a_batch_is_a_multiple_of_the_devices(base):
    model = open_model(str(pipeline(base)), jax.devices()[:3])
    batches = [model.batch(wanted, images) for wanted, images in [(8, 100), (8, 2), (1, 9), (6, 6)]]
    assert batches == [9, 3, 3, 6]
    with pytest.raises(ConfigError, match="batch must be above 0, not 0"):
        model.batch(0, 9)


def test_what_does_not_fit_is_refused_before_weights_are_read(base, tmp_path):
    folder = shutil.copytree(pipeline(base), tmp_path / "pipeline")
    shutil.copytree(trained(base, "lora"), tmp_path / "run")
    for file in folder.glob("*/*.safetensors"):
        file.unlink()
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    config["model"]["folder"] = str(folder)
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    for name in ("pipeline", "run"):
        with pytest.raises(ConfigError, match="30x32 does not fit"):
            open_model(
                str(tmp_path / name),
                jax.devices()[:1],
                options=[dict(height=30, width=32)],
            )
        one, two = dict(guidance=1.0), dict(guidance=2.0)
        for asked, words in (
            ([one], r"^p\.txt is given, but --guidance is not above 1"),
            ([one, two], "holds no weights"),
        ):
            with pytest.raises(ConfigError, match=words):
                open_model(
                    str(tmp_path / name),
                    jax.devices()[:1],
                    options=asked,
                    negative="p.txt is given",
                )
        with pytest.raises(ConfigError, match="holds no weights"):
            open_model(
                str(tmp_path / name),
                jax.devices()[:1],
                options=[dict(height=32, width=32)],
            )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("empty", "neither a pipeline folder .* nor the workdir of a run"),
        ("broken", "config.json is not JSON"),
        ("transformer", "not the workdir of a training run: config.patch_size is not a field"),
        ("begun", "begun has not saved a checkpoint yet"),
    ],
)
def test_a_name_that_cannot_be_opened_is_one_sentence(base, tmp_path, name, sentence):
    config = json.loads((trained(base, "lora") / "config.json").read_text())
    files = {
        "broken/config.json": "{",
        "transformer/config.json": '{"patch_size": 2}',
        "begun/config.json": json.dumps(config),
    }
    (tmp_path / "empty").mkdir()
    for file, content in files.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        open_model(str(tmp_path / name), jax.devices()[:1])


def test_a_lora_that_is_none_is_refused(base, tmp_path):
    sentence = (
        r"holds no LoRA: neither adapter_model\.safetensors nor pytorch_lora_weights\.safetens"
    )
    with pytest.raises(ConfigError, match=sentence):
        open_model(str(pipeline(base)), jax.devices()[:1], lora=str(tmp_path))
    without_weights = shutil.copytree(
        pipeline(base), tmp_path / "pipeline", ignore=shutil.ignore_patterns("*.safetensors")
    )
    with pytest.raises(ConfigError, match=sentence):
        open_model(str(without_weights), jax.devices()[:1], lora=str(tmp_path))


def test_a_run_is_known_by_its_config(base):
    assert is_run(trained(base, "lora")) and not is_run(pipeline(base)) and not is_run("a/hub-id")
    assert read_run_config(trained(base, "lora")).lora.rank == 4


def test_relative_paths_of_a_run_are_found_from_another_folder(base, tmp_path, monkeypatch):
    run = shutil.copytree(trained(base, "lora"), tmp_path / "run")
    for name in ("start", "elsewhere"):
        shutil.copytree(pipeline(base), tmp_path / name / "own" / "model")
        (tmp_path / name / "p.txt").write_text("a\n")
    config = json.loads((run / "config.json").read_text())
    config["model"]["folder"] = "own/model"
    config["prompts"] |= {"file": "gone.txt", "files": ["p.txt", "gone.txt"]}
    config["evaluation"]["prompts"] = "p.txt"
    config["rewards"] = [{"name": "clip_score", "settings": {"folder": "own", "threads": 2}}]
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path / "start")
    record_start(run, 0, [])
    assert read_run_config(run).model.folder == "own/model"
    monkeypatch.chdir(tmp_path / "elsewhere")
    start, train_config = tmp_path / "start", read_run_config(run)
    assert train_config.model.folder == str(start / "own" / "model")
    assert train_config.prompts.paths == (str(start / "p.txt"), "gone.txt")
    assert train_config.evaluation.prompts == str(start / "p.txt")
    assert train_config.rewards[0].settings == {"folder": str(start / "own"), "threads": 2}
    shutil.rmtree(start)
    assert read_run_config(run).model.folder == "own/model"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        open_model(str(run), jax.devices()[:1])
    assert "'own/model'" in str(refused.value) and str(tmp_path) in str(refused.value)


def test_a_negative_prompt_changes_the_images_of_its_prompt_alone(base, plain, tmp_path):
    file = tmp_path / "prompts.jsonl"
    own = [{}, {"negative_prompt": "four shapes"}, {}]
    records = [record | more for record, more in zip(said(*PROMPTS), own, strict=True)]
    found = {}
    for name, given in dict(plain=said(*PROMPTS), own=records).items():
        sample_to_folder(*plain, given, tmp_path / name, 2, 7)
        found[name] = pictures(tmp_path / name)
    changed = abs(found["own"] - found["plain"]).max((1, 2, 3))
    assert changed[1] > 4 and changed[[0, 2]].max() <= 1
    file.write_text("\n".join(map(json.dumps, records)))
    arguments = f"--model={pipeline(base)}", f"--prompts={file}", "--guidance=1"
    done = run_forked("sample.py", *arguments, f"--output={tmp_path / 'none'}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"sample.py: {file}, line 2, has a negative prompt, but --guid")


def test_names_of_files_are_the_words_of_a_prompt():
    assert slug("A photo of: 2 ROTE  Kreise, schräg!") == "a-photo-of-2-rote-kreise-schräg"
    assert slug("../../etc") == "etc"
    assert slug("") == slug("?!") == "empty"
    assert len(slug("猫 " * 99).encode()) < 200
