"""Programs compiled for GPUs without one: plan.py, and every published recipe."""

import json
import re

import pytest

from tests.planning.gpus import BEGIN, DOC, END, PROGRAMS, published
from tests.planning.test_tpu_slices import TINY, run
from tests.tiny_runs import pipeline

SIZES = {"h100:4": 4, "b200:2x2": 4}


def rows():
    """The rows of the table in docs/performance.md: (config, recipes, GPUs, cells)."""
    text = DOC.read_text().partition(BEGIN)[2].partition(END)[0]
    for row in re.findall(r"^\| `(.+) \|$", text, re.M):
        name, gpus, *cells = row.split(" | ")
        config, _, recipes = name.partition("`")
        yield config, recipes.removeprefix(": ").split(", "), gpus, cells


def test_the_table_has_every_published_recipe():
    found = [
        f"{config}:{f'{name},' if name else ''}{gpus}"
        for config, names, gpus, _ in rows()
        for name in names
    ]
    assert sorted(found) == sorted(published())


@pytest.mark.gpu
@pytest.mark.parametrize("name", published())
def test_every_published_recipe_compiles_and_fits(name):
    done = run(None, "-m", "tests.planning.gpus", name)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)[name]
    assert "error" not in found, found
    assert found["fits"], found
    for program in PROGRAMS:
        assert max(found["programs"][program][kind] for kind in ("arguments", "temporaries")) > 0
    for program in ("generate", "train"):
        assert found["programs"][program]["arguments"] > 0
        assert found["programs"][program]["seconds"] > 0


# Recipes on a GPU of 24 or 48 GB with int8 weights below a LoRA, and whether the planner reduces what they do at once.
SMALL = [
    ("sd35_medium.py:geneval,1", "rtx4090", False),
    ("zimage_turbo.py:1", "rtx4090", False),
    ("flux2_klein.py:base_lora,1", "rtx4090", False),
    ("flux_dev.py:pickscore,1", "a6000", False),
    ("qwen_image.py:ocr,1", "a6000", True),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "gpu", "reduced"), SMALL)
def test_recipes_fit_one_small_gpu_in_int8(tmp_path, config, gpu, reduced):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle\n")
    files = (f"--config.{name}={prompts}" for name in ("prompts.file", "evaluation.prompts"))
    given = (f"--config=configs/{config}", f"--topology={gpu}:1", "--config.precision.frozen=int8")
    done = run(None, "launch/plan.py", *given, *files, "--config.rewards=jpeg_compressibility")
    assert done.returncode == 0, done.stderr
    assert "it fits (estimated)" in done.stdout
    assert ("it fits (estimated) with" in done.stdout) == reduced


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIZES)
def test_gpus_are_planned_for(base, tmp_path, name):
    model = f"--config.model.folder={pipeline(base)}"
    given = (*TINY, "--config.placement.trainer.data=2", model)
    done = run(tmp_path, "launch/plan.py", f"--topology={name}", *given)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert f"{name}: 4 devices" in text and "not run" in text
    for program in ("generate", "train"):
        _, devices, peak, seconds, needed, counted, _, _ = next(
            line.split() for line in text.splitlines() if re.match(rf"{program} +\d+ ", line)
        )
        assert int(devices) == 4 and 0 < float(peak) < 1 and 0 < float(seconds) < 1
        assert 0.95 < float(counted) / float(needed) < 1.05
    assert "it fits (estimated)" in text
    # Between hosts at the network's rate.
    assert f"between meshes at 80% of {50 if 'x' in name else 450} GB/s" in text


@pytest.mark.gpu
def test_what_does_not_fit_is_refused(base, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.00001")
    model = f"--config.model.folder={pipeline(base)}"
    given = (*TINY, "--config.placement.trainer.data=2", model)
    done = run(tmp_path, "launch/plan.py", "--topology=h100:4", *given)
    assert done.returncode == 2
    assert "h100:4 is too small for this config" in done.stderr
