"""Learned rewards on the meshes of runs, against the same runs with them in the pool, and against torch."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from digen_jax import assemble
from digen_jax.config.load import load_config, read_config
from digen_jax.errors import ConfigError, DivergedError
from digen_jax.learned_rewards import on_mesh
from digen_jax.logging.metrics import read_metrics
from digen_jax.parallel.mesh import ShardingRules, make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.reward_model import RewardModel
from digen_jax.planning.costs import Calibration
from digen_jax.planning.estimate import compile_programs
from digen_jax.planning.memory import model_footprint
from digen_jax.planning.plan import make_problem, with_temporaries
from digen_jax.planning.programs import step_programs
from digen_jax.rewards import RewardSettings, built_in
from digen_jax.rewards.built_in import on_mesh as on_mesh_of
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.pool import RewardPool
from digen_jax.scheduling import layouts
from digen_jax.scheduling.settings import Costs
from digen_jax.train import train
from tests.learned_rewards.folders import PROMPTS, Files, pictures
from tests.learned_rewards.test_scores import by_pickscore
from tests.parallel import toy
from tests.tiny_runs import tiny_config

STEPS = 2
JPEG = dict(name="jpeg_compressibility", weight=0.5)
# Of the prompts in turn: both rewards, one of them, the other.
NAMED = (None, ["pickscore"], ["jpeg_compressibility"])


@pytest.fixture(autouse=True)
def exact(exact_and_split):
    yield


def pickscore(files: Files, **fields) -> RewardSettings:
    return RewardSettings("pickscore", settings={"folder": str(files.clip), "batch": 2}, **fields)


def group(**sizes: int) -> DeviceGroup:
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return DeviceGroup(make_mesh(devices, **sizes), ShardingRules(((".*", "fsdp"),)))


def scored(found: RewardModel, count: int) -> np.ndarray:
    images, prompts = np.tile(pictures(), (4, 1, 1, 1))[:count], (PROMPTS * 4)[:count]
    return found(images, prompts, [{}] * count)


def by_torch(files: Files, count: int) -> np.ndarray:
    with torch.no_grad():
        return np.tile(by_pickscore(files, pictures()).numpy(), 4)[:count]


def test_scores_of_a_mesh_are_those_of_torch(files):
    (found,) = on_mesh.read({0: pickscore(files)}, group(data=2, fsdp=2))
    split = {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found.params)}
    assert split == {True, False} and [found.rows(count) for count in (2, 5, 11)] == [4, 8, 16]
    assert np.abs(scored(found, 11) - by_torch(files, 11)).max() < 1e-5


@pytest.mark.slow
def test_scores_are_the_same_on_any_mesh(files):
    sizes = dict(data=1, tensor=3)
    (found,) = on_mesh.read({0: pickscore(files)}, group(data=2, fsdp=2))
    moved = found.moved(group(**sizes))
    assert moved.group.images == group(**sizes).mesh.size
    for count in (11, 2):
        assert np.abs(scored(moved, count) - by_torch(files, count)).max() < 1e-5


def batches(groups: int):
    """Records that name their rewards."""
    for records in toy.batches(groups):
        yield [
            record | ({"rewards": named} if named else {})
            for record, named in zip(records, NAMED, strict=True)
        ]


def config(files: Files, where: str, layout: tuple, **fields):
    """A run with a learned reward and one of the host."""
    asked = dict(name="pickscore", where=where, settings=dict(folder=str(files.clip), batch=2))
    fields.setdefault("rewards", (asked, JPEG))
    return toy.config(
        steps=STEPS,
        advantages=dict(combine="advantages", std="group"),
        batch=dict(groups=3, images=4),
        sampler__chunk=4,
        evaluation=dict(every=1, batch=4),
        **toy.meshes(*layout),
        **fields,
    )


def driven(c, devices: int = 8):
    """(metrics of each step, evaluations by version, the timeline's intervals)."""
    config = toy.opened(c)
    system = toy.system(c, devices)
    system = system.with_scorers(assemble.read_scorers(config, system.placement.rollout))
    seen, spans, lines = {}, [], []
    held_out = list(itertools.chain(*itertools.islice(batches(3), 2)))[:5]
    options = dict(batches=batches(3), held_out=held_out, evaluated=seen.__setitem__)
    found = resolve(config.rewards, meshes=True)
    with toy.driver(system, c, found, **options) as driver:
        for _ in range(STEPS):
            lines.append(driver.step())
            spans += driver.intervals
        driver.finish()
    return lines, seen, spans


@pytest.mark.slow
def test_a_run_has_the_scores_that_the_rewards_have_on_the_host(files, monkeypatch):
    """On a rollout worker, and on the trainer's when it samples, too."""
    c = config(files, "", ((1, 2), (2, 1), 1, True))
    found, host, submit = [], resolve(toy.opened(c).rewards), RewardPool.submit

    def noted(pool, images, prompts, metadata, known):
        future = submit(pool, images, prompts, metadata, known)
        found.append((images, prompts, metadata, future))
        return future

    monkeypatch.setattr(RewardPool, "submit", noted)
    lines, seen, spans = driven(c)
    assert sum(line["assisted"] for line in lines) > 0 and len(found) == STEPS * 3 + 3 * 2
    for *batch, future in found:
        columns = host.score(*batch).columns
        np.testing.assert_allclose(future.result().scores.columns, columns, atol=1e-5)
        both = [np.isnan(row).tolist() for row in columns]
        named = [record.get("rewards") for record in batch[2]]
        applies = {None: [False, False], "p": [False, True], "j": [True, False]}
        assert both == [applies[own and own[0][0]] for own in named]
    on_meshes = [one for one in spans if one.kind == "score" and one.worker != "reward"]
    assert len(on_meshes) == STEPS * 3
    assert {"trainer"} < {one.worker for one in on_meshes}
    assert all(line["seconds/rollout"] > 0 for line in lines)
    assert set(seen) == {0, 1, 2}
    assert all(np.isfinite(one.scores).all() and len(one.scores) == 5 for one in seen.values())


class Judge:
    """Replaces a scorer by a function of images."""

    def __init__(self, function):
        self.function, self.calls = function, []

    def __call__(self, images, prompts, metadata):
        self.calls.append(images)
        return self.function(images, len(self.calls))

    def moved(self, group):
        return self


def judged(function, **fields):
    """The driver of a run in which `function` replaces PickScore on the meshes, and the judge."""
    c = toy.config(
        rewards=(dict(name="pickscore", settings=dict(folder="x")),),
        sampler__chunk=4,
        **toy.meshes((1, 1), (1, 1)),
        **fields,
    )
    judge = Judge(function)
    system = toy.system(c, 2).with_scorers((judge,))
    return toy.driver(system, c, resolve(toy.opened(c).rewards, meshes=True)), judge, system


def brightness(images, calls):
    return toy.brightness(images, [], [])


def test_a_score_that_is_not_finite_stops_a_run():
    driver, judge, _ = judged(lambda images, calls: np.full(len(images), np.nan))
    with driver as found, pytest.raises(RewardError, match=r"'pickscore' returned nan"):
        found.step()
    assert len(judge.calls) == 1


def test_a_failure_on_a_mesh_is_computed_again(capsys):
    def fails_once(images, calls):
        if calls == 1:
            raise RuntimeError("a device is lost")
        return brightness(images, calls)

    driver, judge, _ = judged(fails_once)
    with driver as found:
        assert np.isfinite(found.step()["reward"])
    assert len(judge.calls) >= 3 and "a device is lost" in capsys.readouterr().err


def test_images_with_nan_are_not_scored():
    driver, judge, system = judged(brightness)
    system.rollouts[0].frozen["vae"]["kernel"] *= np.nan
    with driver as found, pytest.raises(DivergedError, match="NaN"):
        found.step()
    assert not judge.calls


@pytest.mark.parametrize(
    ("section", "field"),
    [
        (dict(name="ocr", where="mesh"), "'where'"),
        (dict(name="x:y", where="mesh"), "'where'"),
        (dict(name="pickscore", settings=dict(folder="x"), limit=1.0), "'limit'"),
    ],
)
def test_sections_that_no_mesh_can_compute_are_refused(section, field):
    with pytest.raises(ConfigError, match=rf"\[0\]: .*{section['name']}.*{field}"):
        resolve([RewardSettings(**section)])


def test_invalid_settings_name_the_reward(files):
    pool = RewardSettings("pickscore", settings=dict(folder="x"), limit=1.0, where="pool")
    assert not resolve([pool], meshes=True).members[0].on_mesh
    with pytest.raises(ConfigError, match=r"rewards\[0\].where"):
        toy.opened(toy.config(rewards=(dict(name="ocr", where="gpu"),)))
    for settings, message in (
        (dict(folder="x/none"), "x/none"),
        (dict(folder=str(files.clip), batch=0), "batch"),
    ):
        asked = RewardSettings("pickscore", settings=settings)
        with pytest.raises(ConfigError, match=rf"rewards\[3\]: .*'pickscore': .*{message}"):
            on_mesh.read({3: asked}, group(data=1))


# The towers of openai/clip-vit-large-patch14, and of PickScore; the aesthetic score has no text tower.
@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("clip_score", "float32", 427_616_513),
        ("pickscore", "float32", 986_109_441),
        ("aesthetic", "bfloat16", 304_894_177),
    ],
)
def test_without_files_the_published_networks_are_planned_with(name, dtype, size):
    settings = dict(folder="o/x", dtype=dtype) | ({"head": "x"} if name == "aesthetic" else {})
    asked = RewardSettings(name, settings=settings)
    (found,) = on_mesh.read({0: asked}, group(data=1), weights=False)
    leaves = jax.tree.leaves(found.params)
    assert sum(leaf.size for leaf in leaves) == size
    assert {leaf.dtype.name for leaf in leaves if leaf.size > 2**20} == {dtype}


def planned(files: Files, base, where: str = ""):
    c = tiny_config(base, "lora")
    settings = dict(folder=str(files.clip), batch=2)
    c.rewards = (dict(name="pickscore", settings=settings, where=where), "jpeg_compressibility")
    c.placement.rules = ((".*", "fsdp"),)
    return read_config(c)


def test_predicted_memory_has_the_weights(files, base):
    config = planned(files, base)
    found = model_footprint(config)
    stored = load_file(files.clip / "model.safetensors")
    assert found.rewards(1, 1) == sum(array.nbytes for array in stored.values())
    assert found.rewards(1, 1) / 2 <= found.rewards(2, 1) < 0.6 * found.rewards(1, 1)
    problem = make_problem(config, 2, Calibration(Costs(1.0, 1.0), "", ()), found)
    layout = layouts.PoolLayout(1, 1, samples=False, rollout=1, rollout_devices=1)
    held = layouts.device_bytes(problem, layout)
    assert held.worker["rewards"] == found.rewards(1, 1) and "rewards" not in held.trainer
    colocated = layouts.device_bytes(problem, layouts.PoolLayout(1, 2)).trainer
    assert colocated["rewards"] == found.rewards(1, 1)
    assert (
        on_mesh.read(on_mesh_of(planned(files, base, "pool").rewards), group(data=1), False) == ()
    )


@pytest.mark.slow
def test_predicted_memory_has_the_programs(files, base):
    config = planned(files, base)
    made = {
        p.name: p for p in step_programs(config, jax.devices()[:2]) if p.name.startswith("score")
    }
    assert set(made) == {"score by pickscore", "score evaluated by pickscore"}
    score = made["score by pickscore"]
    assert (score.command, score.images, score.trace().out_info.shape) == ("decode", 8, (8,))
    problem = make_problem(config, 2, Calibration(Costs(1.0, 1.0), "", ()), model_footprint(config))
    found = compile_programs(config, jax.devices()[:2], lambda text: None)
    layout = layouts.PoolLayout(1, 1, samples=False, rollout=1, rollout_devices=1)
    sampling = with_temporaries(problem, config, layout, found).footprint.programs.sampling
    assert sampling["scoring"] > 2 * 9 * 32 * 4  # at least a layer of the tokens of two pictures
    assert model_footprint(planned(files, base, "pool")).rewards is None


@pytest.mark.slow
def test_a_run_of_a_pipeline_reads_checks_and_scores(files, base, tmp_path, monkeypatch):
    """From the command's config to the records."""
    named = dict(name="pickscore", settings=dict(folder=str(files.clip)), where="mesh")
    c = tiny_config(base, "lora")
    c.rewards, c.steps, c.reward_pool = (named, dict(JPEG)), 1, dict(processes=0)
    # Random weights prefer nothing: a run with them must not start.
    with pytest.raises(ConfigError, match="'pickscore' fails its sanity check"):
        train(load_config(dict(c, rewards=(named,))), tmp_path / "none")
    one = dataclasses.replace(built_in.BUILT_IN["pickscore"], sanity_check="")
    monkeypatch.setitem(built_in.BUILT_IN, "pickscore", one)
    assert train(load_config(c), tmp_path / "run") is None
    lines = read_metrics(tmp_path / "run" / "metrics.jsonl")
    for line, prefix in zip(lines, ("evaluation/", ""), strict=True):
        scores = [line[f"{prefix}reward_of/{name}"] for name in ("pickscore", JPEG["name"])]
        assert np.isfinite(scores).all()
