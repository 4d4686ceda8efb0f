"""Runs with precomputed prompt embeddings, on a tiny Stable Diffusion 3 with its T5."""

import gc
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from diffusers import StableDiffusion3Pipeline
from ml_collections import ConfigDict

from digen_jax import policies, precompute
from digen_jax.assemble import build, open_parts
from digen_jax.config.load import fit_config, load_config
from digen_jax.data import embedding_cache
from digen_jax.errors import ConfigError
from digen_jax.families import load_family
from digen_jax.inference.export import export, how_to_load
from digen_jax.inference.model import open_model
from digen_jax.models.sd3.family import StableDiffusion3
from digen_jax.parallel.encoding import NULL
from digen_jax.precompute import reached
from digen_jax.process.shutdown import Stopped
from digen_jax.runtime import opening
from digen_jax.train import train
from tests.cases import quick, said
from tests.metrics import assert_same_metrics, metrics
from tests.models.folders import flux_folder, qwen_image_folder
from tests.models.sd3.t5_folders import add_t5
from tests.scripts import run_script
from tests.tiny_runs import PROMPTS, pipeline, tiny_config

TEXTS = [json.loads(line)["prompt"] for line in PROMPTS]
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def encode(config, records, devices: int = 1) -> None:
    parts = open_parts(config, jax.devices()[:devices])
    precompute.find_missing(config, parts, records).run()


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory) -> pathlib.Path:
    target = tmp_path_factory.mktemp("precomputed") / "pipeline"
    return add_t5(pipeline(base), target, TEXTS)


@pytest.fixture(scope="module")
def config(base, folder):
    """A small run; "__" is the dot of a field's name."""

    def make(**fields):
        c = tiny_config(base, "lora")
        c.model.update(folder=str(folder), max_sequence_length=9)
        c.prompts.encoding = "precomputed"
        c.trainer.eps = 1.0  # with less, Adam would enlarge rounding
        c.rewards = ("tests.data.test_precompute:redness",)
        c.reward_pool = ConfigDict(dict(processes=0))
        for name, value in fields.items():
            group, _, field = name.partition("__")
            if field:
                c[group][field] = value
            else:
                c[group] = value
        return c

    return make


LIVE = []  # shapes of the run's arrays while a reward is given
OTHERS = []  # arrays of other tests


def redness(images, prompts, metadata):
    others = set(map(id, OTHERS))
    LIVE.append({array.shape for array in jax.live_arrays() if id(array) not in others})
    return (images[..., 0].mean((1, 2)) - images[..., 1:].mean((1, 2, 3))) / 255


def trained(config, workdir: pathlib.Path) -> list[dict]:
    """The metrics of a complete run."""
    assert train(load_config(config), workdir) is None
    return metrics(workdir)


@pytest.fixture(scope="module")
def runs(config, tmp_path_factory):
    """The same run with prompts encoded in each step, and ahead: workdir, metrics and what was live, by encoding."""
    folder, found = tmp_path_factory.mktemp("runs"), {}
    for kind in ("each_step", "precomputed"):
        gc.collect()
        LIVE.clear()
        OTHERS[:] = jax.live_arrays()
        c = config(prompts__encoding=kind, prompts__cache=str(folder / "store"))
        found[kind] = folder / kind, trained(c, folder / kind), list(LIVE)
    OTHERS.clear()
    return found


@pytest.fixture(scope="module")
def store(runs) -> str:
    """The prompts that the run encoded."""
    return str(runs["precomputed"][0].parent / "store")


@pytest.mark.slow
def test_a_run_with_precomputed_embeddings_is_the_same(runs):
    (_, each, _), (_, before, _) = runs["each_step"], runs["precomputed"]
    assert len(each) == 3 and each[1]["gradient_norm"] > 0.001
    # Other programs round otherwise, which makes other bytes of some pixels, and so other rewards.
    assert_same_metrics(before, each, rel=1e-2)


@pytest.mark.slow
def test_text_encoders_leave_the_devices_before_it_samples(runs, folder):
    (*_, each), (*_, before) = runs["each_step"], runs["precomputed"]
    shapes = load_family(folder).shapes()
    of = {part: {leaf.shape for leaf in jax.tree.leaves(tree)} for part, tree in shapes.items()}
    own = set.union(*(of[part] for part in ENCODERS)) - of["transformer"] - of["vae"]
    own = {shape for shape in own if len(shape) == 2}
    assert shapes["text_encoder_3"]["shared"]["embedding"].shape in own and len(own) > 5
    # The reward is tried out before the model is read, and evaluates twice.
    assert len(each) == len(before) > 6 and all(own <= live for live in each[-4:])
    assert not any(own & live for live in before)


@pytest.mark.slow
def test_a_later_run_encodes_nothing_and_needs_no_weights(
    runs, store, config, folder, tmp_path, capsys
):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    for part in ENCODERS:
        for file in (bare / part).glob("*.safetensors"):
            file.unlink()
    c = config(prompts__cache=store, model__folder=str(bare))
    assert_same_metrics(trained(c, tmp_path / "run"), runs["precomputed"][1])
    assert f"all 6 prompts are encoded in {store}\n" in capsys.readouterr().out

    with pytest.raises(ConfigError, match=r"bare/text_encoder .* 0 models"):
        trained(config(prompts__cache=str(tmp_path), model__folder=str(bare)), tmp_path / "none")
    (tmp_path / "more.txt").write_text("a new prompt\n")
    c.evaluation.prompts = str(tmp_path / "more.txt")
    with pytest.raises(ConfigError, match=r"'a new prompt'.*text_encoder"):
        trained(c, tmp_path / "more")


@pytest.mark.slow
def test_an_exported_run_has_its_t5_in_diffusers(runs, folder, tmp_path):
    workdir, output = runs["precomputed"][0], tmp_path / "tuned"
    assert "None" not in how_to_load(export(workdir, output, lora=False), output)
    for name in ("text_encoder_3/model.safetensors", "tokenizer_3/tokenizer.json"):
        assert (output / name).read_bytes() == (folder / name).read_bytes()
    assert StableDiffusion3Pipeline.from_pretrained(output).text_encoder_3 is not None
    assert open_model(str(workdir), jax.devices()[:1]).family.text_encoder_3 is not None


def test_a_limit_that_is_too_small_is_refused_before_anything_slow(config, tmp_path, monkeypatch):
    LIVE.clear()
    monkeypatch.setattr(opening, "load_system", None)
    c = config(prompts__cache=str(tmp_path / "store"), prompts__cache_limit=1e-6)
    with pytest.raises(ConfigError, match=r"config.prompts.cache_limit = 1e-06 .* 1 or more"):
        trained(c, tmp_path / "run")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 1000))
    c = config(prompts__cache=str(tmp_path / "store"))
    with pytest.raises(ConfigError, match=r"config.prompts.cache = .*1.00kB"):
        trained(c, tmp_path / "run")
    assert not LIVE


def test_a_store_that_is_a_file_is_refused_before_anything_slow(config, tmp_path, monkeypatch):
    monkeypatch.setattr(precompute, "read_parts", None)
    (tmp_path / "file").write_text("")
    c = config(prompts__cache=str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"config.prompts.cache = '.*file'"):
        trained(c, tmp_path / "run")


@pytest.mark.slow
def test_a_prompt_that_is_removed_during_a_run_stops_it(config, store, tmp_path, monkeypatch):
    """It is read on a rollout worker's own thread."""
    monkeypatch.setattr(precompute, "reached", lambda *given: said(*TEXTS[:1]))
    with pytest.raises(Stopped, match="the same command"):
        trained(config(prompts__cache=str(tmp_path / "store")), tmp_path / "run")


@pytest.mark.parametrize("model", quick([("sd3",), ("flux",), ("qwen_image",)], 0, 1))
def test_stored_embeddings_are_those_of_the_mesh_bit_by_bit(base, folder, config, tmp_path, model):
    """In a block of the same size; a pass without the prompt is alone in a step, and FLUX has none by default.

    That of Stable Diffusion 3 has a negative prompt for each prompt, of which one is its own. Qwen-Image does not
    attend to padding, of which nothing is stored.
    """
    systems, flux, given = [], model == "flux", said(*TEXTS)
    if model == "sd3":
        negatives = ["", *TEXTS[:0:-1]]
        given = [r | {"negative_prompt": n} for r, n in zip(given, negatives, strict=True)]
    models = {"sd3": lambda: folder, "flux": lambda: flux_folder(base, "dev")}
    models["qwen_image"] = lambda: qwen_image_folder(base)
    for encoding_of in ("each_step", "precomputed"):
        c = config(
            prompts__encoding=encoding_of,
            prompts__cache=str(tmp_path),
            precision=ConfigDict(dict(arithmetic="bfloat16", frozen="bfloat16")),
            model__folder=str(models[model]()),
            lora__targets="",  # the family's own
            model__max_sequence_length=64,
        )
        train_config = fit_config(load_config(c), 2)
        if encoding_of == "precomputed":
            encode(train_config, given, 2)
        systems.append(build(train_config, jax.devices()[:2]))
    records = given * 2 if model == "sd3" else given if flux else [*given, given[-1]]
    on_mesh, stored = (
        one.sampler.encode(one.rollout_weights(one.start), records) for one in systems
    )
    assert (stored.null is None) == flux
    if model == "sd3":
        assert len(stored.null.context) == len(records)
        assert np.abs(np.diff(np.float32(stored.null.context[: len(TEXTS)]), axis=0)).max() > 0.01
    if model == "qwen_image":
        on_mesh, padded = (jax.tree.map(_without_padding, on_mesh, is_leaf=_is_masked), on_mesh)
        assert np.any(padded.conditioning.context != on_mesh.conditioning.context)
    assert jax.tree.structure(on_mesh) == jax.tree.structure(stored)
    for mine, theirs in zip(jax.tree.leaves(stored), jax.tree.leaves(on_mesh), strict=True):
        assert (mine.dtype, mine.sharding) == (theirs.dtype, theirs.sharding)
        if len(theirs) == 1:
            error = np.abs(np.float32(mine) - np.float32(theirs)).max()
            assert error <= np.abs(np.float32(theirs)).max() * 0.02
        else:
            np.testing.assert_array_equal(mine, theirs)


def test_prompts_of_large_text_encoders_are_precomputed_by_default(config, folder, monkeypatch):
    family, train_config = load_family(folder), load_config(config(prompts__encoding="auto"))
    assert not policies.is_precomputed(train_config, family)
    monkeypatch.setattr(policies, "LARGE", policies.encoder_bytes(train_config, family) - 1)
    assert policies.is_precomputed(train_config, family)
    half = load_config(
        config(prompts__encoding="auto", precision=ConfigDict(dict(frozen="bfloat16")))
    )
    assert not policies.is_precomputed(half, family)


def test_what_a_run_reaches(base, config, tmp_path):
    """Two prompts a step in an order of its own, and the first prompts of evaluations."""
    c = config(evaluation__images=1, steps=1)
    (tmp_path / "held_out.txt").write_text("one\ntwo\n")
    c.evaluation.prompts = str(tmp_path / "held_out.txt")

    def texts(first=0):
        return [record["prompt"] for record in reached(load_config(c), first)]

    first = texts()
    assert first[0] == "one" and len(first) == 3 and {*first[1:]} < {*TEXTS}
    c.steps = 2
    second = texts(first=1)
    assert len(second) == 3 and not {*second[1:]} & {*first[1:]}
    c.steps = 1000
    assert {*texts()} == {"one", *TEXTS}
    (tmp_path / "more.txt").write_text("three\nfour\n")
    c.prompts.files = (c.prompts.file, str(tmp_path / "more.txt"))
    assert {*texts()} == {"one", "three", "four", *TEXTS}
    c.prompts.weights, c.steps = (1.0, 1000.0), 2
    assert {*texts(first=1)} <= {"one", "three", "four"}
    c.prompts.files, c.prompts.weights, c.steps = (), (), 1000
    lines = [{"prompt": "one"} | n for n in ({}, {"negative_prompt": ""}, {"negative_prompt": "b"})]
    c.evaluation.update(prompts=str(tmp_path / "held_out.jsonl"), images=0)
    (tmp_path / "held_out.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert reached(load_config(c))[:3] == lines


def _is_masked(tree) -> bool:
    return hasattr(tree, "mask")


def _without_padding(found):
    return found._replace(context=jnp.where(found.mask[..., None], found.context, 0))


SCRIPT = """
import atexit, sys
from ml_collections import ConfigDict

unwanted = ("torch", "tensorflow", "diffusers")
atexit.register(lambda: print("imported:", [name for name in unwanted if name in sys.modules]))

def get_config():
    return ConfigDict({config})
"""


@pytest.mark.slow
def test_an_interrupted_encoding_continues_where_it_stopped_in_the_script(
    base, config, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(StableDiffusion3, "encoded_prompts", 2)
    monkeypatch.setattr(precompute, "FILE_PROMPTS", 2)
    c = config(prompts__cache=str(tmp_path / "store"))
    stored_apart = fit_config(load_config(config(prompts__cache=str(tmp_path / "all"))), 1)
    encode(stored_apart, said(*TEXTS))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"of 6 prompts 6 are to be encoded, \d+\.\dkB in \S+all", lines[0])
    assert re.fullmatch(r"2 blocks of 2 prompts are left, about 00:\d\d", lines[1])
    assert re.fullmatch(r"encoded 6 prompts, 16.5kB, in 00:\d\d", lines[2])
    added, add = [], embedding_cache.EmbeddingCache.add

    def interrupted(store, rows):
        if added:
            raise KeyboardInterrupt
        added.extend(rows)
        add(store, rows)

    monkeypatch.setattr(embedding_cache.EmbeddingCache, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        encode(fit_config(load_config(c), 1), said(*TEXTS))
    assert len(added) == 3 and added[0] == NULL  # it is a block of its own

    (tmp_path / "config.py").write_text(SCRIPT.replace("{config}", repr(c.to_dict())))
    done = run_script("encode_prompts.py", f"--config={tmp_path / 'config.py'}")
    assert done.returncode == 0, done.stderr
    assert re.match(r"of 6 prompts 3 are to be encoded, \S+B in \S+store\n", done.stdout)
    assert "encoded 3 prompts, " in done.stdout
    assert done.stdout.endswith("imported: []\n")
    with pytest.raises(ConfigError, match="set it to 'precomputed' here and in training"):
        precompute.precompute_all(load_config(config(prompts__encoding="each_step")))
