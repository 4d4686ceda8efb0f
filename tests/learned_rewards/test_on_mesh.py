"""Learned rewards on the meshes of runs, against the same runs with them in the pool, and against torch."""

import dataclasses

import jax
import numpy as np
import pytest
import torch

from digen_jax import assemble
from digen_jax.engine.axes import make_mesh
from digen_jax.engine.placement import DeviceGroup
from digen_jax.engine.scoring import Scoring
from digen_jax.engine.sharding import Layout
from digen_jax.errors import ConfigError
from digen_jax.learned_rewards import on_mesh
from digen_jax.rewards import built_in
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.mistakes import RewardMistake
from digen_jax.rewards.settings import RewardSettings
from tests.engine import toy
from tests.learned_rewards.folders import PROMPTS, Files, pictures, write
from tests.learned_rewards.test_scores import by_pickscore

STEPS = 2
JPEG = dict(name="jpeg_compressibility", weight=0.5)
# Of the prompts in turn: both rewards, one of them, the other.
NAMED = (None, ["pickscore"], ["jpeg_compressibility"])
MESHES = {
    "one device": ((0, 1), (1, 1)),
    "colocated": ((0, 1), (2, 2)),
    "two workers": ((1, 2), (2, 1), 2),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Files:
    return write(tmp_path_factory.mktemp("on_mesh"))


@pytest.fixture(autouse=True)
def exact(exact_and_split):
    yield


def pickscore(files: Files, **fields) -> RewardSettings:
    return RewardSettings("pickscore", settings={"folder": str(files.clip), "batch": 2}, **fields)


def group(**sizes: int) -> DeviceGroup:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return DeviceGroup(make_mesh(devices, **sizes), Layout(((".*", "fsdp"),)))


def scored(found: Scoring) -> np.ndarray:
    images, prompts = np.tile(pictures(), (4, 1, 1, 1))[:11], (PROMPTS * 4)[:11]
    return np.concatenate([found(images, prompts, [{}] * 11), found(images[:2], prompts[:2])])


def test_scores_of_a_mesh_are_those_of_torch(files):
    with torch.no_grad():
        expected = by_pickscore(files, pictures()).numpy()
    (found,) = on_mesh.read({0: pickscore(files)}, group(data=2, fsdp=2))
    split = {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found.params)}
    assert split == {True, False} and found.rows(11) == 16 and found.rows(2) == 4
    whole = np.concatenate([np.tile(expected, 4)[:11], expected[:2]])
    assert np.abs(scored(found) - whole).max() < 1e-5
    for other in (group(data=1), group(data=1, tensor=3), group(fsdp=4)):
        moved = found.moved(other)
        assert moved.group.images == other.mesh.size
        assert np.abs(scored(moved) - whole).max() < 1e-5


def batches(groups: int):
    """Records that name their rewards."""
    for records in toy.batches(groups):
        yield [
            record | ({"rewards": named} if named else {})
            for record, named in zip(records, NAMED, strict=True)
        ]


def driven(files: Files, where: str, layout: tuple, **fields):
    """(metrics of each step, evaluations by version, what is shown in the timeline, commands)."""
    asked = dict(name="pickscore", where=where, settings=dict(folder=str(files.clip), batch=2))
    held_out = dict(name="aesthetic", where=where, weight=0.0)
    held_out["settings"] = dict(folder=str(files.clip), head=str(files.head))
    c = toy.config(
        rewards=(asked, JPEG, held_out),
        advantages__combine="advantages",
        advantages__std="group",
        batch=dict(groups=3, images=4),
        sampler__fragment=4,
        evaluation__every=1,
        evaluation__batch=4,
        **toy.meshes(*layout),
        **fields,
    )
    recipe = toy.opened(c)
    devices = 1 if layout == MESHES["one device"] else 8
    system = toy.system(c, devices)
    system = system.with_scorers(assemble.read_scorers(recipe, jax.devices()[:devices]))
    seen, log, spans = {}, [], []
    records = [record for _, batch in zip(range(2), batches(3), strict=False) for record in batch]
    options = dict(batches=batches(3), held_out=records[:5], evaluated=seen.__setitem__, log=log)
    found = resolve(recipe.rewards, meshes=True)
    with toy.driver(system, c, found, **options) as driver:
        lines = []
        for _ in range(STEPS):
            lines.append(driver.step())
            spans += driver.intervals
        driver.finish()
    return lines, seen, spans, log


@pytest.fixture(scope="module")
def pooled(files):
    with jax.default_matmul_precision("highest"):
        return driven(files, "pool", MESHES["one device"])


TIMED = ("seconds", "images_per", "utilisation", "staleness", "tag_share", "queue")


@pytest.mark.parametrize("layout", MESHES)
def test_a_run_has_the_scores_of_the_pool(files, pooled, layout):
    lines, seen, spans, _ = driven(files, "", MESHES[layout])
    for found, expected in zip(lines, pooled[0], strict=True):
        assert {"reward_of/pickscore", "reward_of/aesthetic", "reward_std"} <= set(found)
        for name, value in expected.items():
            if not name.startswith(TIMED):
                assert found[name] == pytest.approx(value, rel=2e-4, abs=1e-5), name
    assert set(seen) == set(pooled[1]) == {0, 1, 2}
    for version, found in seen.items():
        assert len(found.scores) == 5
        np.testing.assert_allclose(found.scores, pooled[1][version].scores, atol=1e-5)
        for name, own in found.each.items():
            np.testing.assert_allclose(own, pooled[1][version].each[name], atol=1e-5)
    shown = [one for one in spans if one.kind == "score" and one.worker != "reward"]
    assert len(shown) == STEPS * 3
