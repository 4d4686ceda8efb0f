"""A real sampling mesh in a process of its own makes, bit for bit, what one in this process does."""

import contextlib
import functools
import pathlib
import queue
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from digen_jax.process.ending import STOPPED
from digen_jax.remote.failures import NotDone
from digen_jax.remote.identity import Identity
from digen_jax.remote.link import LinkError
from digen_jax.remote.member import Gone, Keepalive
from digen_jax.remote.opening import lead, open_pulls
from digen_jax.remote.wire import Wire
from digen_jax.runtime.link import ConditioningOf, LocalLink, SamplesOf
from digen_jax.runtime.training import shardings
from digen_jax.scheduling.commands import TRAINER, Fragment, Publication
from tests.engine import toy
from tests.remote.mesh_process import TOKEN
from tests.remote.processes import begin  # noqa: F401
from tests.remote.rollout_process import NAME, Parts
from tests.remote.test_link import assert_same

pytestmark = pytest.mark.slow
FRAGMENT, EVALUATED = Fragment(0, 0), Fragment(0, 0, evaluation=True)
WEIGHTS = Publication(0)


@functools.cache
def parts(kind: str, folder: pathlib.Path) -> Parts:
    return Parts(kind, folder)


@contextlib.contextmanager
def remote(kind: str, folder: pathlib.Path, link: str, begin, keepalive=None):  # noqa: F811
    """(the executor of a mesh in another process, this process's link, the process, who was lost)."""
    wire = Wire(Identity.of({"kind": kind}, TOKEN))
    joined, lost = queue.Queue(), queue.Queue()
    known, pulls = parts(kind, folder).known, open_pulls(link, "127.0.0.1")
    options = dict(joined=joined.put, lost=lambda member, why: lost.put((member.name, why)))
    options["keepalive"] = keepalive
    with lead(wire, "127.0.0.1:0", known, pulls, **options) as (_, here, address):
        variables = dict(KIND=kind, LINK=link, LEADER=address, FOLDER=str(folder))
        process = begin("tests.remote.rollout_process", devices=3, **variables)
        said = process.line(120)
        way = "bytes over gRPC, at most 16 MiB in flight" if link == "bytes" else "jax.exp"
        assert said.startswith(f"{NAME} joins {address}: weights come as {way}"), said
        yield joined.get(timeout=60), here, process, lost


def made(sampler, link, of: Parts, weights) -> dict:
    """What a fragment's path leads to: conditioning and samples on the trainer, images on this host."""
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
        "images": [sampler.images.pop(f) for f in (FRAGMENT, EVALUATED)],
        "answers": [sampler.answers.pop(f) for f in (FRAGMENT, EVALUATED)],
    }
    assert found["prompts"] is not None and found["samples"] is not None
    return found


@pytest.mark.parametrize("kind", ["full", "lora", "toy"])
@pytest.mark.parametrize("way", ["bytes", "transfer"])
def test_another_process_makes_the_same_bits(kind, way, base, begin):  # noqa: F811
    of = parts(kind, base)
    weights = toy.moved(of.system.start)
    local = LocalLink()
    expected = made(of.executor(local), local, of, weights)
    with remote(kind, base, way, begin) as (sampler, link, process, lost):
        found = made(sampler, link, of, weights)
        assert_same(found["prompts"], expected["prompts"])
        assert_same(found["samples"], expected["samples"])
        for images, others in zip(found["images"], expected["images"], strict=True):
            assert images.dtype == np.uint8 and np.array_equal(images, others)
        for ((number, places, answer),), ((other, others, expectation),) in zip(
            found["answers"], expected["answers"], strict=True
        ):
            assert number == other == 0 and np.array_equal(places, others)
            assert np.array_equal(answer.columns, expectation.columns) and len(places)
        # A fragment that is dropped is gone there, too, and a step that ends.
        sampler.generate(FRAGMENT, WEIGHTS)
        sampler.drop_fragment(FRAGMENT)
        sampler.decode(FRAGMENT)
        assert FRAGMENT not in sampler.images
        assert link.take(SamplesOf(NAME, FRAGMENT), lambda tree: tree, TRAINER) is None
        sampler.end_step(0)
        sampler.encode(1)
        sampler.drop_weights(WEIGHTS)
        with pytest.raises(NotDone, match=r"KeyError|NoneType"):
            sampler.generate(EVALUATED, WEIGHTS)
    code, errors = process.ends(20)
    assert code == 0 and lost.empty(), errors


@pytest.mark.parametrize("way", ["bytes", "transfer"])
def test_a_mesh_that_is_killed_with_samples_is_lost_and_nobody_waits(way, base, begin):  # noqa: F811
    of = parts("toy", base)
    with remote("toy", base, way, begin) as (sampler, link, process, lost):
        made(sampler, link, of, of.system.start)
        process.signal(signal.SIGKILL)
        assert lost.get(timeout=10) == (NAME, "has lost its connection")
        with pytest.raises(Gone):
            sampler.encode(2)
        with pytest.raises(LinkError):
            link.take(ConditioningOf(NAME, 0), lambda tree: tree, TRAINER)
        sampler.give_up()
        link.give_up(NAME)
        assert link.take(ConditioningOf(NAME, 0), lambda tree: tree, TRAINER) is None
        assert link.settle(WEIGHTS)


@pytest.mark.parametrize("way", ["bytes", "transfer"])
def test_a_mesh_that_is_stopped_with_samples_keeps_nobody_waiting(way, base, begin):  # noqa: F811
    of = parts("toy", base)
    quick = Keepalive(ping=0.2, silence=2.0)
    with remote("toy", base, way, begin, quick) as (sampler, link, process, lost):
        sampler.encode(0)
        process.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            replicated = of.system.placement.trainer.replicated
            taking = threads.submit(
                link.take,
                ConditioningOf(NAME, 0),
                lambda tree: jax.tree.map(lambda _: replicated, tree),
                TRAINER,
            )
            asking = threads.submit(sampler.encode, 1)
            assert lost.get(timeout=10) == (NAME, "has been silent for 2 seconds")
            sampler.give_up()
            link.give_up(NAME)
            assert isinstance(taking.exception(5), LinkError)
            assert isinstance(asking.exception(5), Gone)
        assert time.monotonic() - stopped < 8
        process.signal(signal.SIGCONT)
        code, errors = process.ends(10)
        assert code == STOPPED and "Traceback" not in errors, errors
