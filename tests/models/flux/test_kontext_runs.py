"""Runs that tune FLUX.1 Kontext to edit pictures: what they store, report, export, and continue from."""

import functools
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from PIL import Image

from digen_jax import precompute
from digen_jax.assemble import build, open_parts
from digen_jax.config.load import fit_config, load_config
from digen_jax.data import embedding_cache
from digen_jax.data.prompt_files import read_prompt_file
from digen_jax.diffusion.sampling import image_keys
from digen_jax.errors import ConfigError
from digen_jax.families import editing, load_family, read_parts
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import edited, open_model
from digen_jax.inference.sampling import sample_to_folder
from digen_jax.models.family import Size
from digen_jax.models.qwen_image import edit
from digen_jax.parallel.encoding import jit_encoder
from digen_jax.precompute import reached
from digen_jax.prompt_store import stored_prompts
from digen_jax.train import train
from tests.metrics import metrics
from tests.models.flux.kontext_folders import (
    SOURCE,
    edit_config,
    edit_prompts,
    kontext_folder,
    picture,
)
from tests.models.folders import flux_folder, qwen_edit_folder
from tests.parallel import toy
from tests.parallel.test_axes import ROWS, config, system_of
from tests.scripts import run_forked, run_script
from tests.tiny_runs import once

STEPS, SIZE = 3, Size(16, 12)


def trained(base):
    """The workdir of two steps of two passes, whose prompts, some with a negative one, were encoded before."""
    run = functools.partial(train, load_config(guided_config(base, "precomputed")))
    return once(base / "tiny-kontext-run", run)


def guided_config(base, encoding):
    c = edit_config(base, encoding=encoding, cache=str(base / "tiny-edits-store"))
    c.prompts.file = c.evaluation.prompts = str(once(base / "guided-edits.jsonl", write_guided))
    c.sampler.true_cfg_scale, c.evaluation.true_cfg_scale = 3.0, 2.0
    return c


def write_guided(file):
    records = read_prompt_file(edit_prompts(file.parent))
    for record, negative in zip(records[1:], ("four shapes", ""), strict=False):
        record["negative_prompt"] = negative
    file.write_text("\n".join(map(json.dumps, records)))


def test_equal_texts_with_other_pictures_stay_apart(base, tmp_path, capsys):
    """What is stored is what the model encodes; a changed picture is encoded again, a moved one is not."""
    folder = shutil.copytree(edit_prompts(base).parent, tmp_path / "edits")
    c = edit_config(base, encoding="precomputed", cache=str(tmp_path / "store"))
    c.prompts.file = c.evaluation.prompts = str(folder / "prompts.jsonl")
    config = fit_config(load_config(c), 1)

    def prepared():
        parts = open_parts(config, jax.devices()[:1])
        return precompute.find_missing(config, parts, reached(config))

    found = prepared()
    found.run()
    assert "of 4 prompts 4 are to be encoded" in capsys.readouterr().out
    (model,) = embedding_cache.models(tmp_path / "store")
    assert model["source"] == [*SOURCE, 1]
    records = read_prompt_file(folder / "prompts.jsonl")
    assert {**records[0], "image": ""} == {**records[1], "image": ""}
    made = stored_prompts(config, found.folder, found.family).conditioning(records)
    assert np.array_equal(made.context[0], made.context[1])
    assert np.abs(made.source[0] - made.source[1]).max() > 0.1
    assert np.array_equal(made.source[1], made.source[2])
    family, group = found.family, found.group
    params = read_parts(family, found.folder, family.encoders, group)
    expected = jit_encoder(family, group)(params, family.tokenize(records))
    jax.tree.map(np.testing.assert_array_equal, made, expected)

    folder = folder.rename(tmp_path / "moved")
    c.prompts.file = c.evaluation.prompts = str(folder / "prompts.jsonl")
    config = fit_config(load_config(c), 1)
    assert prepared().missing == []
    (folder / "c.jpg").write_bytes((folder / "photos" / "a.png").read_bytes())
    (missing,) = prepared().missing
    assert missing.startswith("two green squares")


@pytest.mark.slow
def test_a_run_edits_in_two_passes_with_ratio_one_by_what_was_encoded_ahead(base, tmp_path):
    """Its reward reads the pictures by the paths in the metadata. What it exports is for the pipeline that edits."""
    run = export(trained(base), tmp_path / "tuned", True)
    assert "FluxKontextPipeline.from_pretrained" in how_to_load(run, tmp_path / "tuned")
    first = next(line for line in metrics(trained(base)) if "ratio" in line)
    assert first["ratio"] == pytest.approx(1, abs=1e-5) and first["gradient_norm"] > 0
    # A null conditioning of each negative prompt and picture, in addition to the prompts' own.
    (file,) = (base / "tiny-edits-store").rglob("*.safetensors")
    assert len(embedding_cache._open(file).checksums) == 8
    records, systems = read_prompt_file(base / "guided-edits.jsonl"), []
    for encoding in ("each_step", "precomputed"):
        config = fit_config(load_config(guided_config(base, encoding)), 2)
        systems.append(build(config, jax.devices()[:2]))
    each, read = (one.sampler.encode(one.rollout_weights(one.start), records) for one in systems)
    assert jax.tree.structure(each) == jax.tree.structure(read) and read.null is not None
    for found, expected in zip(jax.tree.leaves(read), jax.tree.leaves(each), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["missing", "size", "half", "plain", "pair", "count"])
def test_a_mistake_is_one_sentence_before_anything_slow(base, tmp_path, kind):
    c, folder = edit_config(base), edit_prompts(base).parent
    records = [json.loads(line) for line in edit_prompts(base).read_text().splitlines()]
    for record in records:
        record["image"] = str(folder / record["image"])
    if kind == "missing":
        records[2]["image"] = "gone.png"
        words = r"prompts.jsonl, line 3: there is no image at \S+gone.png"
    elif kind == "size":
        c.model.source_height = c.model.source_width = 0
        words = r"source_width are 0, but \S+prompts.jsonl, line 1, has an image to edit: set them"
    elif kind == "pair":
        records[1]["image"] = [records[1]["image"]] * 2
        words = 'line 2: "image" has 2 images, but config.model.source_images is 1'
    elif kind == "count":
        c.model.source_images = 2
        for record in records:
            record["image"] = [record["image"]] * 2
        words = "one source image per prompt, not 2: set config.model.source_images to 1"
    elif kind == "half":
        c.model.source_width = 0
        words = "source_height = 12 and config.model.source_width = 0 are no size: set both"
    else:
        c.model.folder = str(flux_folder(base, "dev"))
        words = "cannot edit images: set config.model.source"
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, records)))
    c.prompts.file = c.evaluation.prompts = str(tmp_path / "prompts.jsonl")
    with pytest.raises(ConfigError, match=words):
        train(fit_config(load_config(c), 1), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


# --------------------------------------------------------------------------------------- on meshes


@pytest.mark.slow
@pytest.mark.usefixtures("exact_and_split")
@pytest.mark.parametrize("family", ["flux", "klein", "qwen"])
def test_images_are_those_of_one_device(base, tmp_path, monkeypatch, family):
    """Fifteen tokens of the image and twelve of each source, together 27 or 39, which no axis divides."""
    monkeypatch.setattr(edit, "VISION_AREA", 32 * 64)
    prompts, found = str(edit_prompts(base)), []
    fields = dict(model__source_height=SOURCE[0], model__source_width=SOURCE[1])
    if family == "flux":
        fields |= dict(model__folder=str(kontext_folder(base)))
    else:
        records = read_prompt_file(prompts)
        pairs = zip(records, records[2:], strict=False)
        pairs = [one | {"image": [one["image"], other["image"]]} for one, other in pairs]
        prompts = str(tmp_path / "pairs.jsonl")
        pathlib.Path(prompts).write_text("\n".join(map(json.dumps, pairs)))
        fields |= dict(model__source_images=2)
        if family == "qwen":
            fields |= dict(model__folder=str(qwen_edit_folder(base, "2511")))
    fields |= dict(prompts__file=prompts, evaluation__prompts=prompts)
    for mesh in ("one device", "tensor x sequence"):
        system = system_of(config(base, "full", mesh, family.replace("qwen", "klein"), **fields))
        sampler, weights = system.sampler, system.rollout_weights(system.start)
        encoded = sampler.encode(weights, read_prompt_file(prompts)[:2])
        keys = image_keys(jax.random.key(1), ROWS, np.arange(8) % 4)
        found.append(jax.device_get(toy.draw_and_show(sampler, weights, encoded, ROWS, keys)[0]))
    np.testing.assert_allclose(*found, rtol=0, atol=2e-5)
    assert np.ptp(found[0]) > 0.1


# ------------------------------------------------------------------------------------ the scripts


def test_a_model_is_opened_for_the_pictures_of_its_prompts(base, tmp_path):
    """Without loading weights: what `launch/sample.py` asks of a model."""
    family = load_family(kontext_folder(base))
    wide, high = (tmp_path / f"{name}.png" for name in ("wide", "high"))
    picture(0, 32, 64).save(wide)
    picture(1, 64, 32).save(high)
    edit = {"prompt": "x", "image": str(wide)}
    other = {"prompt": "y", "image": str(high)}

    assert edited(family, [{"prompt": "x"}]) is family
    assert edited(family, [edit]).source == Size(720, 1456)
    assert edited(family, [edit, other], Size(12, 16)).source == Size(12, 16)
    of_run = editing(family, Size(16, 16))
    assert edited(of_run, [edit, other]).source == Size(16, 16)
    plain = load_family(flux_folder(base, "dev"))
    assert edited(plain, [edit]) is plain  # the picture may be for a reward
    for one, records, source, words in (
        (
            family,
            [edit, other],
            None,
            "images of 'x' and 'y' to 720x1456 and 1456x720: sample them",
        ),
        (family, [edit, {"prompt": "z"}], None, "the prompt 'z' has no image to edit: give each"),
        (of_run, [{"prompt": "z"}], None, "give each prompt one, as in the model's run"),
        (family, [edit], Size(18, 16), "an image of 18x16 does not fit this model"),
        (family, [edit | {"image": "gone.png"}], None, r"there is no image at gone\.png"),
        (plain, [edit], Size(12, 16), "a size of images is given"),
    ):
        with pytest.raises(ConfigError, match=words):
            edited(one, records, source)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--prompts=p.jsonl", "--image=a.png"], "--image is for --prompt; in a prompt file"),
        (["--prompt=x", "--source_height=8"], "--source_height and --source_width are one size"),
        (["--prompt=x", "--image=gone.png"], "there is no image at gone.png"),
    ],
)
def test_the_script_says_what_does_not_go_together(tmp_path, arguments, sentence):
    done = run_forked("sample.py", "--model=x", f"--output={tmp_path}", *arguments)
    assert done.returncode == 2
    assert re.fullmatch(f"sample.py: {sentence}.*\n", done.stderr)


@pytest.mark.slow
def test_the_script_edits_a_picture(base, tmp_path):
    """The same pixels as from Python, and a refusal by a model that edits none."""
    path = edit_prompts(base).parent / "c.jpg"
    arguments = ["--prompt=two green squares", f"--image={path}", "--source_height=12", "--seed=7"]
    arguments += ["--source_width=16", "--height=16", "--width=12", f"--steps={STEPS}"]
    arguments += [f"--output={tmp_path / 'script'}"]
    done = run_script("sample.py", f"--model={kontext_folder(base)}", *arguments)
    assert done.returncode == 0, done.stderr
    found = np.asarray(Image.open(tmp_path / "script" / "00000_two-green-squares.png"), int)
    records = [{"prompt": "two green squares", "image": str(path)}]
    model = open_model(str(kontext_folder(base)), jax.devices()[:1])
    own = model._replace(family=edited(model.family, records, Size(*SOURCE)))
    sampler = own.sampler(dict(steps=STEPS, height=SIZE.height, width=SIZE.width))
    sample_to_folder(own, sampler, records, tmp_path / "own", 1, 7)
    drawn = np.asarray(Image.open(tmp_path / "own" / "00000_two-green-squares.png"), int)
    assert abs(found - drawn).max() <= 1
    done = run_forked(
        "sample.py",
        f"--model={flux_folder(base, 'dev')}",
        *arguments[:2],
        f"--output={tmp_path / 'refused'}",
    )
    assert done.returncode == 2
    assert "--image is given, but" in done.stderr and "only: remove it" in done.stderr
