"""README and docs/: every command and link works, and README stays short."""

import importlib
import itertools
import pathlib
import re
import runpy
import sys
import tomllib
import types

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from digen_jax.algorithms.algorithm import Algorithm, MatchingSamples, Velocities
from digen_jax.config import train_config
from digen_jax.config.load import fit_config, load_config
from digen_jax.models.family import Family
from tests import documents
from tests.documents import page
from tests.pipelines import ROOT

PAGES = {
    str(path.relative_to(ROOT)): page(path.read_text())
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
}
COMMANDS = [command for found in PAGES.values() for command in found.commands]
OVERRIDES = [command for found in PAGES.values() for command in found.overrides]
MODULE = "my_rewards"  # a user's own module in the texts


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """A user's own files and values: prompt files, the texts' module of rewards, numbers of processes."""
    files = {name: tmp_path / name for name in ("my_prompts.txt", "train.txt", "test.txt")}
    for file in files.values():
        file.write_text('a photo of a red star that says "star"\n')
    data = ROOT / "tests" / "data"
    edits = {name: str(data / "edits.jsonl") for name in ("train.jsonl", "test.jsonl")}
    edits["runs/pairs-data/pairs.jsonl"] = str(data / "pairs.jsonl")
    blocks = [text for found in PAGES.values() for _, text in found.fences]
    blocks = [text for text in blocks if text.startswith(f"# {MODULE}.py\n")]
    (tmp_path / f"{MODULE}.py").write_text("\n".join(blocks))
    monkeypatch.syspath_prepend(tmp_path)
    numbers = {"N": "2", "I": "0", "$OMPI_COMM_WORLD_SIZE": "2", "$OMPI_COMM_WORLD_RANK": "0"}
    yield {name: str(file) for name, file in files.items()} | edits | numbers
    sys.modules.pop(MODULE, None)
    importlib.invalidate_caches()


def test_there_are_commands_of_every_script():
    scripts = {word for words in COMMANDS for word in words if word.startswith("launch/")}
    assert scripts == {f"launch/{name}" for name in documents.SCRIPTS}
    assert len(COMMANDS) > 30 and len(OVERRIDES) > 5


@pytest.mark.parametrize(
    "command", {str(c): c for c in COMMANDS + OVERRIDES}.values(), ids=" ".join
)
def test_every_command_is_accepted(command, stand_ins):
    documents.check_command(command, stand_ins)


def check(found: documents.Page, place: pathlib.Path) -> None:
    documents.check_fields(found.spans)
    documents.check_flags(found.spans)
    documents.check_names(found.spans)
    documents.check_links(found, place)


@pytest.mark.parametrize("name", PAGES)
def test_every_field_flag_file_and_link_exists(name):
    check(PAGES[name], ROOT / name)


@pytest.mark.parametrize("name", PAGES)
def test_every_python_block_runs(name):
    for language, text in PAGES[name].fences:
        if language == "python":
            exec(compile(text, name, "exec"), {"__name__": name})


def test_the_example_of_an_algorithm_is_one(monkeypatch):
    (source,) = [text for _, text in PAGES["docs/adding-an-algorithm.md"].fences if "class" in text]
    monkeypatch.setitem(sys.modules, "example", types.ModuleType("example"))
    exec(source, vars(sys.modules["example"]))
    kind = sys.modules["example"].RewardWeighted
    monkeypatch.setitem(train_config.ALGORITHMS, kind.name, "example:RewardWeighted")
    ode = dict(kind="ode", noise_level=0.0, window=dict(length=0))
    section = dict(name=kind.name, temperature=2.0, adv_clip=1.0)
    monkeypatch.chdir(ROOT)
    algorithm = fit_config(
        load_config(ConfigDict(dict(sampler=ode, algorithm=section))), 8
    ).algorithm

    v, target = np.random.default_rng(0).normal(size=(2, 3, 4, 4, 2)).astype(np.float32)
    advantages, trained = np.float32([0.5, 7.0, np.nan]), np.array([True, True, False])
    given = v, v, target, np.ones(3, np.float32), advantages, trained
    samples = MatchingSamples(*map(jnp.asarray, given))
    terms = algorithm.loss(samples, Velocities(jnp.asarray(v), None, None, None))
    assert tuple(terms) == algorithm.terms
    error = ((v - target).astype(np.float64) ** 2).mean((1, 2, 3)) * trained
    np.testing.assert_allclose(terms["matching_error"], error, rtol=1e-6)
    expected = error * np.exp([0.25, 0.5, 0.0])
    np.testing.assert_allclose(terms["loss"], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("docs/adding-a-family.md", Family), ("docs/adding-an-algorithm.md", Algorithm)],
)
def test_a_page_names_all_that_may_be_answered(name, protocol):
    members = {m for m in {**vars(protocol), **protocol.__annotations__} if m[0] != "_"}
    text = (ROOT / name).read_text()
    assert {member for member in members if not re.search(rf"\b{member}\b", text)} == set()


TRAIN = "python launch/train.py --config configs/shapes_demo.py --workdir x"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"```\n{TRAIN} --stepps=3\n```", "Unknown command line flag 'stepps'"),
        (f"```\n{TRAIN} \\\n    --config.trainer.lerning_rate=1\n```", "config.trainer"),
        (f"```\n{TRAIN} --config.rewards=my_rewards:none\n```", "has no function 'none'"),
        ("Try `--config.sampler.chunk=7` alone.", "config.sampler.chunk = 7 must divide"),
        ("```\nmake dem\n```", "no target dem"),
        ("Run `pytest tests/test_doc.py` then.", "there is no tests/test_doc.py"),
        ("```\nsudo make demo\n```", "'sudo make demo' runs is not known"),
        (f"```\nsh -c 'exec {TRAIN} --stepps=3'\n```", "Unknown command line flag 'stepps'"),
        ("`advantages.sdt=1`", "config.advantages.sdt is not a field"),
        ("`--pictues=x`", "no script has an option --pictues"),
        ("`digen_jax.errors.ConfigMistake`", "there is no digen_jax.errors.ConfigMistake"),
        ("[more](docs/nothing.md)", "there is no file docs/nothing.md"),
        ("[there](docs/running.md#nowhere)", "there is no heading docs/running.md#nowhere"),
    ],
)
def test_a_mistake_in_a_text_is_found(text, sentence, stand_ins):
    found = page(text)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        for command in found.commands + found.overrides:
            documents.check_command(command, stand_ins)
        check(found, ROOT / "README.md")


def recipes():
    """Every recipe of configs/, as "config: name", or "config" where there is one."""
    found = set()
    for path in sorted((ROOT / "configs").glob("*.py")):
        config = runpy.run_path(str(path))
        lengths = ("short", "long") if path.stem == "shapes_flow_grpo" else ()
        names = config.get("RECIPES") or config.get("ALGORITHMS") or lengths
        found |= {f"{path.stem}: {name}" for name in names} or {path.stem}
    return found


def test_the_evidence_is_of_every_recipe_and_its_tests_exist():
    text = (ROOT / "docs" / "evidence.md").read_text()
    named, labels = [], set()
    for row in re.findall(r"^\| `(.+) \|$", text, re.M):
        recipe, *cells = row.split(" | ")
        config, _, names = recipe.partition("`")
        named += [f"{config}{': ' * bool(name)}{name}" for name in names[2:].split(", ")]
        labels |= set(re.findall(r"\b[A-Z]\d+\b", " ".join(cells))) - {"H100"}
        assert len(cells) == 8
    assert len(named) == len(set(named)) and set(named) == recipes()
    defined = dict(re.findall(r"^\| ([A-Z]\d+) \| .+ \| (.+) \|$", text, re.M))
    assert labels == defined.keys()
    for tests in defined.values():
        for path, name in re.findall(r"`([\w/.]+)::(\w+)`", tests):
            assert f"def {name}(" in (ROOT / path).read_text(), (path, name)
        assert "::" in tests


def test_the_table_of_packages_is_complete_and_in_the_order_of_imports():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    floors = [re.findall(r"\w+", floor) for floor in contract["contracts"][0]["layers"]]
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"^\| `digen_jax/(\w+)(?:/|\.py)` \|", page, re.M)
    assert sorted(named) == sorted(itertools.chain(*floors))
    places = [next(i for i, floor in enumerate(floors) if name in floor) for name in named]
    assert places == sorted(places)
