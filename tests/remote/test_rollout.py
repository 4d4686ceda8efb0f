"""A real sampling mesh in a process of its own makes, bit for bit, what one in this process does."""

import contextlib
import functools
import pathlib
import queue

import jax
import numpy as np
import pytest

from digen_jax.images import stills
from digen_jax.remote.failures import NotDone
from digen_jax.remote.identity import Identity
from digen_jax.remote.opening import lead, open_pulls
from digen_jax.remote.wire import Wire
from digen_jax.rewards.pool import RewardPool
from digen_jax.runtime.link import ConditioningOf, LocalLink, SamplesOf, ScoresOf
from digen_jax.runtime.training import shardings
from digen_jax.scheduling.commands import TRAINER, Fragment, Publication, Score
from tests.engine import toy
from tests.processes import begin  # noqa: F401
from tests.remote.mesh_process import TOKEN
from tests.remote.rollout_process import NAME, Parts, config, judging
from tests.remote.test_link import assert_same, assert_same_on_host

pytestmark = pytest.mark.slow
FRAGMENT, EVALUATED = Fragment(0, 0), Fragment(0, 0, evaluation=True)
WEIGHTS = Publication(0)


@functools.cache
def parts(kind: str, folder: pathlib.Path) -> Parts:
    return Parts(kind, folder)


@contextlib.contextmanager
def remote(
    kind: str, folder: pathlib.Path, link: str, start, keepalive=None, reward="two", processes=0
):
    """(the executor of a mesh in another process, this process's link, the process, who was lost)."""
    wire = Wire(Identity.of({"kind": kind}, TOKEN))
    joined, lost = queue.Queue(), queue.Queue()
    known, pulls = parts(kind, folder).known, open_pulls(link, "127.0.0.1")
    options = dict(joined=joined.put, lost=lambda member, why: lost.put((member.name, why)))
    options["keepalive"] = keepalive
    with lead(wire, "127.0.0.1:0", known, pulls, **options) as (_, here, address):
        variables = dict(KIND=kind, LINK=link, LEADER=address, FOLDER=str(folder))
        variables |= dict(REWARD=reward, PROCESSES=str(processes))
        process = start("tests.remote.rollout_process", devices=3, **variables)
        said = process.line(120)
        way = "bytes over gRPC, at most 16 MiB in flight" if link == "bytes" else "jax.exp"
        assert said.startswith(f"{NAME} joins {address}: weights come as {way}"), said
        yield joined.get(timeout=60), here, process, lost


def made(sampler, link, of: Parts, weights, judge=None) -> dict:
    """What a fragment's path leads to: conditioning and samples on the trainer, scores on this host."""
    link.offer(WEIGHTS, weights)
    sampler.encode(0)
    sampler.receive(WEIGHTS)
    link.withdraw(WEIGHTS)
    sampler.generate(FRAGMENT, WEIGHTS)
    sampler.decode(FRAGMENT)
    sampler.generate(EVALUATED, WEIGHTS)
    sampler.decode(EVALUATED)
    group = of.system.placement.trainer

    def everywhere(tree):
        return jax.tree.map(lambda _: group.replicated, tree)

    found = {
        "prompts": link.take(ConditioningOf(NAME, 0), everywhere, TRAINER),
        "samples": link.take(
            SamplesOf(NAME, FRAGMENT), lambda tree: shardings(tree, group), TRAINER
        ),
        "judged": [sampler.score(f, judge).result(60) for f in (FRAGMENT, EVALUATED)],
    }
    assert found["prompts"] is not None and found["samples"] is not None
    return found


def check_judged(shown: bool, judged, executor) -> None:
    """What of the pictures is there to send: of a step the extremes, of an evaluation the first ones, if due."""
    step, evaluation = judged
    images, count = stills(executor.images[FRAGMENT]), 2
    assert len(step.values) == len(images) == len(step.looks.result().sharpness) == 8
    ranked = np.argsort(step.values, kind="stable")
    places = sorted({*ranked[:count], *ranked[-count:]}) if shown else []
    if len(set(step.values)) == len(step.values):
        assert step.kept.places.tolist() == places
    assert np.array_equal(step.kept.pictures, images[step.kept.places])
    assert step.clips is None and evaluation.kept is None
    assert np.array_equal(evaluation.clips, executor.images[EVALUATED][:count])
    assert len(evaluation.values) == 3 and step.scores.columns.shape == (8, 2)
    assert list(step.scores.shown) == ["edges/longest"]


@pytest.mark.parametrize(("kind", "way"), [("full", "transfer"), ("lora", "bytes")])
def test_another_process_makes_the_same_bits(kind, way, base, begin):  # noqa: F811
    of = parts(kind, base)
    weights, rewards = toy.moved(of.system.start), judging("two")
    local = LocalLink()
    here = of.executor(local, rewards[0])
    with contextlib.closing(RewardPool(rewards[0], 0)) as pool:
        expected = made(here, local, of, weights, of.judge(pool, rewards[1]))
    check_judged(of.settings.is_shown(1), expected["judged"], here)
    with remote(kind, base, way, begin) as (sampler, link, process, lost):
        fetched, fetch = [], link.fetch
        link.fetch = lambda key, taker: fetched.append(key) or fetch(key, taker)
        found = made(sampler, link, of, weights)
        assert fetched == [ScoresOf(NAME, FRAGMENT), ScoresOf(NAME, EVALUATED)]
        assert_same(found["prompts"], expected["prompts"])
        assert_same(found["samples"], expected["samples"])
        for judged, other in zip(found["judged"], expected["judged"], strict=True):
            assert_same_on_host(*(one._replace(looks=one.looks.result(), seconds=0.0)
                                  for one in (judged, other)))  # fmt: skip
            assert judged.seconds > 0
        # Once more, it is gone there.
        again = sampler.mesh.ask_first(functools.partial(Score, fragment=FRAGMENT, maker=NAME))
        with pytest.raises(NotDone, match="KeyError"):
            again.result(30)
        # A fragment that is dropped is gone there, too, and a step that ends.
        sampler.generate(FRAGMENT, WEIGHTS)
        sampler.drop_fragment(FRAGMENT)
        sampler.decode(FRAGMENT)
        assert link.take(SamplesOf(NAME, FRAGMENT), lambda tree: tree, TRAINER) is None
        sampler.end_step(0)
        sampler.encode(1)
        sampler.drop_weights(WEIGHTS)
        with pytest.raises(NotDone, match=r"KeyError|NoneType"):
            sampler.generate(EVALUATED, WEIGHTS)
    code, errors = process.ends(20)
    assert code == 0 and lost.empty(), errors


@contextlib.contextmanager
def driven(of: Parts, reward, **elsewhere):
    """(a driver, the evaluations by version); `elsewhere` are a mesh in another process, in place of its own one."""
    system = of.system._replace(rollouts=()) if elsewhere else of.system
    found = {}
    options = dict(held_out=of.held_out, evaluated=found.__setitem__, **elsewhere)
    with toy.driver(system, config("toy", None), reward, **options) as driver:
        yield driver, found


def never(*_):
    raise AssertionError("the leader's own rewards are asked")


def test_a_step_has_the_scores_and_pictures_of_one_process(base, begin, capfd):  # noqa: F811
    of = parts("toy", base)
    with driven(of, toy.brightness) as (driver, seen):
        expected = [(driver.step(), driver.executor.extremes) for _ in range(2)]
    with (
        remote("toy", base, "bytes", begin, reward="fails once") as (sampler, link, _, lost),
        driven(of, never, samplers=[sampler], link=link) as (driver, found),
    ):
        steps = [(driver.step(), driver.executor.extremes) for _ in range(2)]
        assert lost.empty() and len(driver._workers) == 1
    for (metrics, extremes), (others, ends) in zip(steps, expected, strict=True):
        names = [n for n in others if n.startswith(("reward", "images/", "loss", "gradient"))]
        assert len(names) > 8 and {n: metrics[n] for n in names} == {n: others[n] for n in names}
        for one, other in zip(extremes, ends, strict=True):
            assert one.records == other.records and len(one.images) == 2
            assert_same_on_host((one.images, one.values), (other.images, other.values))
    for version in (0, 1):
        assert_same_on_host(found[version][1:], seen[version][1:])
        assert found[version].metrics() == seen[version].metrics()
        assert len(found[version].clips) == 2
    assert capfd.readouterr().err.count("it is asked again") == 2
