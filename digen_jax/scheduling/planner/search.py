"""The best candidate, found by simulating few of them.

All are ranked by estimates. The most promising one is simulated, and what it took corrects the
estimates of those that differ from it in the split of the devices only; so on until nothing left is
estimated to be better, or until as many are simulated as may be. At last, tactics that gain nothing
are switched off.
"""

import dataclasses
import heapq
from collections.abc import Sequence

from digen_jax.scheduling.planner import candidate as of
from digen_jax.scheduling.planner.candidate import Candidate
from digen_jax.scheduling.planner.estimate import estimate
from digen_jax.scheduling.planner.predict import Prediction, memory_of, predict
from digen_jax.scheduling.planner.problem import Problem

SHARE = 0.05  # of the candidates, that may be simulated
LEAST, MOST = 12, 60  # simulations where the share is fewer or more
PROMISING = 1000  # candidates that are ranked anew after every simulation
NOTHING = 2e-3  # of a step: a tactic that gains no more is left out
LITTLE = 5e-3  # of a step: what is estimated to gain no more is not simulated


class Simulations:
    """All predictions that were made. What is the same to the scheduler is simulated once.

    `count` is how many simulations there were.
    """

    def __init__(self, problem: Problem):
        self.problem, self.count = problem, 0
        self._made: dict[tuple, Prediction] = {}

    def predict(self, candidate: Candidate) -> Prediction:
        """The prediction of a candidate."""
        make = (of.layout, of.costs, of.settings)
        key = tuple(part(self.problem, candidate) for part in make)
        if key not in self._made:
            self._made[key] = predict(self.problem, candidate)
            self.count += 1
        made = self._made[key]
        if made.candidate == candidate:
            return made
        memory = memory_of(self.problem, candidate)
        return dataclasses.replace(made, candidate=candidate, memory=memory)


def search(
    simulations: Simulations, candidates: Sequence[Candidate], most: int, simplify: bool = True
) -> Prediction:
    """The best of some candidates after at most so many simulations more.

    `simplify` keeps some of them to see whether a tactic of the best one gains nothing.
    """
    last = simulations.count + most
    problem = simulations.problem
    estimates = {c: estimate(problem, c) for c in candidates}
    # Sorted stably: of equal ones the simplest is the first.
    left = heapq.nsmallest(PROMISING, candidates, key=estimates.get)
    seen: list[Prediction] = []
    best = None
    simplifying = min(3, most // 4) if simplify else 0
    while left and simulations.count < last - simplifying:
        nearby = _corrections(seen, estimates)
        candidate = min(left, key=lambda c: estimates[c] * _nearest(nearby, c))
        left.remove(candidate)
        enough = best.step_seconds * (1 - LITTLE) if best else float("inf")
        if min(map(estimates.get, [candidate, *left])) >= enough:
            break
        if estimates[candidate] >= enough:
            continue
        seen.append(simulations.predict(candidate))
        best = min(seen, key=lambda p: p.step_seconds)
    return _simplest(simulations, best, set(candidates), last)


def budget(candidates: Sequence[Candidate]) -> int:
    """How many of some candidates may be simulated to choose one."""
    return min(max(int(SHARE * len(candidates)), LEAST), MOST)


def _corrections(
    seen: Sequence[Prediction], estimates: dict[Candidate, float]
) -> dict[tuple[bool, ...], list[tuple[int, float]]]:
    """By scheduling tactics: (trainer devices, seconds over the estimated ones) of what was simulated."""
    found: dict[tuple[bool, ...], list[tuple[int, float]]] = {}
    for made in seen:
        ratio = made.step_seconds / max(1e-12, estimates[made.candidate])
        found.setdefault(_scheduling(made.candidate), []).append((made.candidate.trainer, ratio))
    return found


def _nearest(corrections: dict[tuple[bool, ...], list[tuple[int, float]]], c: Candidate) -> float:
    """The correction from the nearest split; 1 where there is none, as estimates are low, if at all."""
    found = corrections.get(_scheduling(c), [(c.trainer, 1.0)])
    return min(found, key=lambda pair: abs(pair[0] - c.trainer))[1]


def _scheduling(candidate: Candidate) -> tuple[bool, ...]:
    return candidate.gap, candidate.tag, candidate.asynchrony


def _simplest(
    simulations: Simulations, best: Prediction, allowed: set[Candidate], last: int
) -> Prediction:
    """The best one without the tactics that gain nothing, as far as simulations are left."""
    chosen = best
    for simpler in ({"asynchrony": False}, {"tag": False}, {"gap": False}):
        candidate = dataclasses.replace(chosen.candidate, **simpler)
        if candidate == chosen.candidate or candidate not in allowed or simulations.count >= last:
            continue
        without = simulations.predict(candidate)
        if without.step_seconds <= best.step_seconds * (1 + NOTHING):
            chosen = without
    return chosen
