"""Finds the best candidate by simulating a few of them.

Estimates rank all candidates. The search simulates the most promising one, and corrects with the result
the estimates of the candidates that differ from it only in the split of the devices. It repeats this
until no remaining estimate is better, or until the number of simulations is used up. At the end it
switches off tactics that gain nothing.
"""

import dataclasses
import heapq
from collections.abc import Sequence

from digen_jax.scheduling.planner import candidate as of
from digen_jax.scheduling.planner.candidate import Candidate
from digen_jax.scheduling.planner.estimate import estimate
from digen_jax.scheduling.planner.predict import Prediction, memory_of, predict
from digen_jax.scheduling.planner.problem import Problem

SHARE = 0.05  # of the candidates: how many may be simulated
LEAST, MOST = 12, 60  # bounds of the number of simulations
PROMISING = 1000  # candidates that are ranked again after every simulation
NOTHING = 2e-3  # of a step: a tactic that gains less is left out
LITTLE = 5e-3  # of a step: a candidate whose estimate gains less is not simulated


class Simulations:
    """All predictions made so far. Candidates that are equal for the scheduler are simulated once.

    `count` is the number of simulations.
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
    """The best of some candidates after at most `most` further simulations.

    `simplify` reserves some of them to test whether a tactic of the best one gains nothing.
    """
    last = simulations.count + most
    problem = simulations.problem
    estimates = {c: estimate(problem, c) for c in candidates}
    # The order is stable: among equal estimates the simplest candidate is the first.
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
    """How many simulations may be made to choose from some candidates."""
    return min(max(int(SHARE * len(candidates)), LEAST), MOST)


def _corrections(
    seen: Sequence[Prediction], estimates: dict[Candidate, float]
) -> dict[tuple[bool, ...], list[tuple[int, float]]]:
    """By scheduling tactics: (trainer devices, simulated over estimated seconds) of all simulated candidates."""
    found: dict[tuple[bool, ...], list[tuple[int, float]]] = {}
    for made in seen:
        ratio = made.step_seconds / max(1e-12, estimates[made.candidate])
        found.setdefault(_scheduling(made.candidate), []).append((made.candidate.trainer, ratio))
    return found


def _nearest(corrections: dict[tuple[bool, ...], list[tuple[int, float]]], c: Candidate) -> float:
    """The correction from the nearest split; 1 if there is none, because estimates tend to be low."""
    found = corrections.get(_scheduling(c), [(c.trainer, 1.0)])
    return min(found, key=lambda pair: abs(pair[0] - c.trainer))[1]


def _scheduling(candidate: Candidate) -> tuple[bool, ...]:
    return candidate.gap, candidate.tag, candidate.asynchrony


def _simplest(
    simulations: Simulations, best: Prediction, allowed: set[Candidate], last: int
) -> Prediction:
    """The best candidate without the tactics that gain nothing, as far as simulations are left."""
    chosen = best
    for simpler in ({"asynchrony": False}, {"tag": False}, {"gap": False}):
        candidate = dataclasses.replace(chosen.candidate, **simpler)
        if candidate == chosen.candidate or candidate not in allowed or simulations.count >= last:
            continue
        without = simulations.predict(candidate)
        if without.step_seconds <= best.step_seconds * (1 + NOTHING):
            chosen = without
    return chosen
