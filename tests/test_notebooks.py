"""The notebooks: stored clean, and executed as a reader would on a machine with one device."""

import os
import pathlib

import nbclient
import nbformat
import pytest

from tests.compiling import quick_flags
from tests.tiny_runs import pipeline

ROOT = pathlib.Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def executed(name, flags="", **replaced):
    """The cells' outputs as {cell id: [output]} after a run in its own folder; some cells have other code.

    `flags` are XLA's: by default programs are compiled as a reader's are, for one device.
    """
    path = ROOT / "notebooks" / name
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    for cell in notebook.cells:
        cell.source = replaced.get(cell.id, cell.source)
    resources = {"metadata": {"path": str(path.parent)}}
    client = nbclient.NotebookClient(notebook, timeout=600, resources=resources)
    client.execute(env={**os.environ, "XLA_FLAGS": flags})
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def printed(outputs, stream="stdout"):
    return [o.text for o in outputs if o.output_type == "stream" and o.name == stream]


def rewards(outputs):
    """The number after each "reward" in the output."""
    lines = "".join(printed(outputs)).splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    return [float(line.split("reward ")[1].split(",")[0]) for line in steps]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_it_takes_from_the_package_is_there(path):
    """Here, because executing a notebook takes a minute."""
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    lines = [line for line in code.splitlines() if line.startswith("from digen_jax")]
    assert "import digen_jax" in code
    exec("\n".join(lines), {})


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_stored_valid_and_without_outputs(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


def test_the_package_is_found_beside_its_clone(tmp_path):
    # As in Colab after a restart of its runtime: the folder is taken for a package without __init__.
    (tmp_path / "digen_jax").symlink_to(ROOT)
    notebook = nbformat.read(ROOT / "notebooks" / "quickstart.ipynb", nbformat.NO_CONVERT)
    notebook.cells = [cell for cell in notebook.cells if cell.id == "install"]
    notebook.cells.append(
        nbformat.v4.new_code_cell("import digen_jax.config.train_config\ndigen_jax.__file__")
    )
    resources = {"metadata": {"path": str(tmp_path)}}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute(env=environment)
    (shown,) = notebook.cells[-1].outputs
    assert pathlib.Path(eval(shown.data["text/plain"])).parents[1].samefile(ROOT)


@pytest.mark.slow
def test_quickstart_trains_on_one_device_and_warns_of_nothing():
    """With fewer steps than a reader's."""
    cell = source("quickstart.ipynb", "tune")
    outputs = executed("quickstart.ipynb", tune=cell.replace("range(14)", "range(3)"))
    assert outputs["install"] == []
    assert "".join(printed(outputs["load"])).startswith("1 CPU device for ")
    for name in ("sample", "reward", "look", "curve"):
        assert ["image/png" in output.data for output in outputs[name]] == [True]
    shown = rewards(outputs["tune"])
    assert len(shown) == 3 and all(0 < reward < 1 for reward in shown)
    alarms = [text for found in outputs.values() for text in printed(found, "stderr")]
    # Without ipywidgets, tqdm warns that its bars will be plain.
    assert [alarm for alarm in alarms if "ipywidgets" not in alarm] == []


@pytest.mark.slow
def test_your_model_is_sampled_tuned_and_exported(base, tmp_path):
    chosen = f"""
model, size, steps, guidance, arithmetic = {str(pipeline(base))!r}, 32, 4, 2.0, "float32"
prompts, held_out = ["a red circle", "two blue stars in the rain"], ["a green ring"]
"""
    folder, config = (source("your_model.ipynb", cell) for cell in ("folder", "config"))
    folder = folder.replace("runs/your_model", str(tmp_path / "work"))
    config = config.replace("steps=20", "steps=2, reward_pool=dict(processes=0)")
    cells = dict(choose=chosen, folder=folder, config=config)
    outputs = executed("your_model.ipynb", quick_flags(devices=1), **cells)
    pictures = [
        ["image/png" in output.data for output in outputs[name][-1:]]
        for name in ("before", "after")
    ]
    assert pictures == [[True], [True]]
    assert "step 2 of 2" in "".join(printed(outputs["tune"]))
    assert (tmp_path / "work" / "lora" / "pytorch_lora_weights.safetensors").exists()


def source(name, cell):
    """The code of a notebook's cell."""
    notebook = nbformat.read(ROOT / "notebooks" / name, nbformat.NO_CONVERT)
    return next(one.source for one in notebook.cells if one.id == cell)
