"""Finds the best proposal by simulating a few of them.

Estimates rank all proposals. The search simulates the most promising one, and corrects with the result
the estimates of the proposals that differ from it only in the split of the devices. It repeats this
until no remaining estimate is better, or until the number of simulations is used up. At the end it
switches off tactics that gain nothing.
"""

import dataclasses
import heapq
from collections.abc import Sequence

from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.estimate import estimate
from digen_jax.scheduling.planner.predict import Prediction, memory_of, predict
from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.proposal import Proposal

SHARE = 0.05  # of the proposals: how many may be simulated
LEAST, MOST = 12, 60  # bounds of the number of simulations
PROMISING = 1000  # proposals that are ranked again after every simulation
NOTHING = 2e-3  # of a step: a tactic that gains less is left out
LITTLE = 5e-3  # of a step: a proposal whose estimate gains less is not simulated


class Simulations:
    """All predictions made so far. Proposals that are equal for the scheduler are simulated once.

    `count` is the number of simulations.
    """

    def __init__(self, problem: Problem):
        self.problem, self.count = problem, 0
        self._made: dict[tuple, Prediction] = {}

    def predict(self, proposal: Proposal) -> Prediction:
        """The prediction of a proposal."""
        make = (of.layout, of.costs, of.settings)
        key = tuple(part(self.problem, proposal) for part in make)
        if key not in self._made:
            self._made[key] = predict(self.problem, proposal)
            self.count += 1
        made = self._made[key]
        if made.proposal == proposal:
            return made
        memory = memory_of(self.problem, proposal)
        return dataclasses.replace(made, proposal=proposal, memory=memory)


def search(
    simulations: Simulations, proposals: Sequence[Proposal], most: int, simplify: bool = True
) -> Prediction:
    """The best of some proposals after at most `most` further simulations.

    `simplify` reserves some of them to test whether a tactic of the best one gains nothing.
    """
    last = simulations.count + most
    problem = simulations.problem
    estimates = {c: estimate(problem, c) for c in proposals}
    # The order is stable: among equal estimates the simplest proposal is the first.
    left = heapq.nsmallest(PROMISING, proposals, key=estimates.get)
    seen: list[Prediction] = []
    best = None
    simplifying = min(3, most // 4) if simplify else 0
    while left and simulations.count < last - simplifying:
        nearby = _corrections(seen, estimates)
        proposal = min(left, key=lambda c: estimates[c] * _nearest(nearby, c))
        left.remove(proposal)
        enough = best.step_seconds * (1 - LITTLE) if best else float("inf")
        if min(map(estimates.get, [proposal, *left])) >= enough:
            break
        if estimates[proposal] >= enough:
            continue
        seen.append(simulations.predict(proposal))
        best = min(seen, key=lambda p: p.step_seconds)
    return _simplest(simulations, best, set(proposals), last)


def budget(proposals: Sequence[Proposal]) -> int:
    """How many simulations may be made to choose from some proposals."""
    return min(max(int(SHARE * len(proposals)), LEAST), MOST)


def _corrections(
    seen: Sequence[Prediction], estimates: dict[Proposal, float]
) -> dict[tuple[bool, ...], list[tuple[int, float]]]:
    """By scheduling tactics: (trainer devices, simulated over estimated seconds) of all simulated proposals."""
    found: dict[tuple[bool, ...], list[tuple[int, float]]] = {}
    for made in seen:
        ratio = made.step_seconds / max(1e-12, estimates[made.proposal])
        found.setdefault(_scheduling(made.proposal), []).append((made.proposal.trainer, ratio))
    return found


def _nearest(corrections: dict[tuple[bool, ...], list[tuple[int, float]]], c: Proposal) -> float:
    """The correction from the nearest split; 1 if there is none, because estimates tend to be low."""
    found = corrections.get(_scheduling(c), [(c.trainer, 1.0)])
    return min(found, key=lambda pair: abs(pair[0] - c.trainer))[1]


def _scheduling(proposal: Proposal) -> tuple[bool, ...]:
    return proposal.gap, proposal.tag, proposal.asynchrony


def _simplest(
    simulations: Simulations, best: Prediction, allowed: set[Proposal], last: int
) -> Prediction:
    """The best proposal without the tactics that gain nothing, as far as simulations are left."""
    chosen = best
    for simpler in ({"asynchrony": False}, {"tag": False}, {"gap": False}):
        proposal = dataclasses.replace(chosen.proposal, **simpler)
        if proposal == chosen.proposal or proposal not in allowed or simulations.count >= last:
            continue
        without = simulations.predict(proposal)
        if without.step_seconds <= best.step_seconds * (1 + NOTHING):
            chosen = without
    return chosen
