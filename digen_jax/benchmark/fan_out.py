"""How long published weights take to all rollout meshes: measured on this host, and computed for many hosts.

What is measured is a recipe's LoRA, which a process offers and others take at the same time, as in a run. What is
computed is what links permit, from the trainer alone and by a tree. The other processes are this module, too.
"""

import dataclasses
import functools
import io
import math
import os
import queue
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from digen_jax.assemble import parameter_shapes, recipe_model
from digen_jax.benchmark import load
from digen_jax.config.recipe import Recipe
from digen_jax.errors import ConfigError, check_positive
from digen_jax.planning.slices import configured
from digen_jax.policies import trained_of
from digen_jax.remote.fanout import MOST as AT_ONCE
from digen_jax.remote.identity import TOKEN, Identity, job_token
from digen_jax.remote.link import RemoteLink
from digen_jax.remote.opening import join, lead
from digen_jax.remote.outline import nodes
from digen_jax.remote.relay import Relay
from digen_jax.remote.sampling import RemoteSampler
from digen_jax.remote.serving import serve
from digen_jax.remote.wire import FRAME, Wire
from digen_jax.scheduling.commands import Command, DropVersion, Publication, Publish

HOST = "127.0.0.1"
LONGEST = 120.0  # seconds for the other processes to start
MANY = (1, 4, 16, 64, 256, 1024)  # takers of the computed table
GIB, GB = 2**30, 1e9
Tree = Any


# ------------------------------------------------------------------------------------- computed


def star(size: float, takers: int, rate: float) -> float:
    """Seconds until all have `size` bytes that the trainer alone gives, at `rate` bytes a second in all."""
    return takers * size / rate


def whole_tree(size: float, takers: int, rate: float, at_once: int = AT_ONCE) -> float:
    """The same where every host that has all bytes gives them to others, to `at_once` at the same time.

    Every host sends `rate` bytes a second in all, and takes as many at the same time.
    """
    seconds, having = 0.0, 1
    while having < takers + 1:
        new = min(at_once * having, takers + 1 - having)
        seconds += math.ceil(new / having) * size / rate
        having += new
    return seconds


def piped_tree(
    size: float, takers: int, rate: float, at_once: int = AT_ONCE, chunk: float = FRAME
) -> float:
    """The same where every host gives a chunk as soon as it has it, always to the same `at_once` others."""
    at_once = min(at_once, takers)
    level, below = 0, 0
    while below < takers:
        level += 1
        below += at_once**level
    return at_once * (size + (level - 1) * min(chunk, size)) / rate


SCHEMES: dict[str, Callable[[float, int, float], float]] = {
    "from the trainer alone": star,
    f"tree, whole, {AT_ONCE} at a time": whole_tree,
    "tree, whole, 1 at a time": functools.partial(whole_tree, at_once=1),
    f"tree, {FRAME // 2**20} MiB at a time, {AT_ONCE} at a time": piped_tree,
}


def computed(size: float, name: str, gigabits: Sequence[float]) -> str:
    """A table in Markdown: seconds for `MANY` takers, for hosts with links of so many Gbit/s, by scheme."""
    lines = [
        f"| {name}, {size / GB:.2f} GB | {' | '.join(f'{n:,}' for n in MANY)} |",
        "| --- |" + " --- |" * len(MANY),
    ]
    for link in gigabits:
        for scheme, seconds in SCHEMES.items():
            cells = (_seconds(seconds(size, n, link * GB / 8)) for n in MANY)
            lines.append(f"| {link:.3g} Gbit/s, {scheme} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    """Three digits at most, but whole numbers from 100 on."""
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.2g}"


# ------------------------------------------------------------------------------------- measured


@dataclasses.dataclass(frozen=True)
class Fanned:
    """Medians of the rounds.

    Attributes:
      takers: their number.
      at_once: takers that one giver has at the same time; fewer than `takers`: a tree.
      seconds: until the last one has all.
      giver, taker: CPU-seconds of the process that gives, and of one that takes, for a GiB that one takes; in a tree
        the former are those of the first giver, and takers give, too.
      load: what other processes took of the cores.
    """

    takers: int
    at_once: int
    seconds: float
    giver: float
    taker: float
    load: load.Load

    @property
    def gigabits(self) -> float:
        """Gbit/s at which one processor of a host is busy, whatever its link."""
        return 8 * GIB / GB / max(self.giver, self.taker)

    def describe(self, size: float) -> str:
        """A line for the console."""
        rate = self.takers * size / self.seconds
        took = f"{self.seconds:.2f} s, {rate / 2**20:.0f} MiB/s in all"
        others = f"others had {self.load.others + self.load.stolen:.0%} of the cores"
        if self.at_once < self.takers:
            return f"{self.takers} takers, as a tree: {took}; {others}"
        return (
            f"{self.takers} takers: {took}; a GiB takes the giver {self.giver:.2f} s of a processor, a taker "
            f"{self.taker:.2f} s; {others}"
        )


def sizes(recipe: Recipe) -> tuple[Tree, float]:
    """(a LoRA in bfloat16, bytes of all trained components in bfloat16), by shapes alone.

    Raises:
      ConfigError: the recipe tunes no LoRA, or its model is neither here nor shipped as a configuration.
    """
    if not recipe.lora.rank:
        raise ConfigError("config.lora.rank = 0: give a recipe that tunes a LoRA, or set its rank")
    recipe = configured(recipe)
    _, family = recipe_model(recipe)
    tuned = parameter_shapes(recipe, family).tuned
    whole = jax.tree.leaves(trained_of(family, family.shapes()))
    lora = jax.tree.map(lambda leaf: jax.numpy.ones(leaf.shape, jax.numpy.bfloat16), tuned)
    return lora, 2.0 * sum(math.prod(leaf.shape) for leaf in whole)


def bytes_of(tree: Tree) -> int:
    """Of all arrays."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def check(takers: Sequence[int], rounds: int, gigabits: Sequence[float]) -> None:
    """Refuses what cannot be measured.

    Raises:
      ConfigError: names the flag and what to change.
    """
    check_positive("--rounds", rounds)
    for number in takers:
        check_positive("--takers", number)
    for link in gigabits:
        check_positive("--links", link)


def measure(tree: Tree, takers: int, rounds: int, at_once: int | None = None) -> Fanned:
    """Has so many processes take a tree at the same time, by bytes; after a first time.

    At most `at_once` of them take from one giver at the same time; None: all from this process.
    """
    at_once = at_once or takers
    cores, size = os.sched_getaffinity(0), bytes_of(tree)
    took, worked = [], []
    with (
        _others(takers, at_once) as (link, samplers, processes),
        ThreadPoolExecutor(takers) as threads,
    ):
        for version in range(rounds + 1):
            publication = Publication(version)
            link.offer(publication, tree)
            if version == 1:
                before, used = load.read(cores), _used(processes)
            begin, own = time.perf_counter(), _used(processes)
            list(threads.map(RemoteSampler.receive, samplers, [publication] * takers))
            took.append(time.perf_counter() - begin)
            worked.append(_used(processes) - own)
            link.settle(publication)
            for one in samplers:
                one.drop_weights(publication)
        after, used = load.read(cores), (_used(processes) - used).tolist()
    giver, *others = (np.median(worked[1:], axis=0) * GIB / size).tolist()
    return Fanned(
        takers,
        at_once,
        statistics.median(took[1:]),
        giver / takers,
        statistics.fmean(others),
        load.between(before, after, sum(used), len(cores)),
    )


def _used(processes: Sequence[subprocess.Popen]) -> np.ndarray:
    """CPU-seconds of this process and of the others so far."""
    return np.array([time.process_time(), *(load.used(one.pid) for one in processes)])


@contextmanager
def _others(
    count: int, at_once: int
) -> Iterator[tuple[RemoteLink, list[RemoteSampler], list[subprocess.Popen]]]:
    """(the link of this process, meshes in other processes, these)."""
    os.environ.setdefault(TOKEN, secrets.token_hex(16))
    joined: queue.Queue[RemoteSampler] = queue.Queue()
    options = dict(joined=joined.put, most=at_once)
    with (
        ExitStack() as stack,
        redirect_stdout(io.StringIO()),  # a line for each mesh
        lead(_wire(), f"{HOST}:0", nodes(None), **options) as (_, link, address),
    ):
        command = [sys.executable, "-m", __name__, address]
        processes = [
            subprocess.Popen([*command, f"rollout {i}"], stdout=subprocess.DEVNULL)
            for i in range(count)
        ]
        for one in processes:
            stack.callback(one.wait)
            stack.callback(one.kill)
        yield link, [joined.get(timeout=LONGEST) for _ in processes], processes


def _wire() -> Wire:
    return Wire(Identity.of({}, job_token()))


# --------------------------------------------------------------------------- in the other processes


class _Takes:
    """Takes published weights, which others may take from it until they are dropped."""

    def __init__(self, name: str, relay: Relay):
        self._name, self._relay = name, relay

    def do(self, command: Command) -> None:
        """See `serving.Executes`."""
        here = SingleDeviceSharding(jax.devices()[0])
        if isinstance(command, Publish):
            self._relay.take(
                command.publication, lambda tree: jax.tree.map(lambda _: here, tree), self._name
            )

    def drop(self, command: Command) -> None:
        """See `serving.Executes`."""
        if isinstance(command, DropVersion):
            self._relay.drop(command.publication)


def main(leader: str, name: str) -> None:
    """A rollout mesh."""
    with join(_wire(), leader, name, 1, HOST, nodes(None), None, LONGEST) as (following, link):
        serve(following, _Takes(name, Relay(link, link, following, gives=True)))


if __name__ == "__main__":
    main(*sys.argv[1:])
