"""Seconds of a step without a simulation: a lower bound, and an estimate to rank proposals by.

Both are for the steady state, where all steps are alike. A step cannot be shorter than the trainer's
work; the generation of its fragments by all workers that may do it; the rewards' work; or the critical
path of the fragments that are not begun early: from the publication of their weights through
generation and rewards to the update.
"""

import dataclasses
import math
from collections.abc import Callable

from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.proposal import Proposal


def lower_bound(problem: Problem, proposal: Proposal) -> float:
    """A lower bound of the mean seconds of a step in the steady state."""
    step = StepEstimate.of(problem, proposal)
    if not step.workers:
        return step.colocated
    return max(step.generation, step.scoring, step.best_share(step.way))


def estimate(problem: Problem, proposal: Proposal) -> float:
    """An estimate of the simulated seconds of a step, never below `lower_bound`."""
    step = StepEstimate.of(problem, proposal)
    if not step.workers:
        return lower_bound(problem, proposal)
    return max(step.generation, step.scoring, step.best_share(step.played))


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """A proposal's step in a few numbers: fragments, and seconds. `share`: fragments of the trainer, by TAG."""

    fragments: int
    early: int  # fragments that may begin before the previous step ends
    gate: int  # fragments that are scored before the first of them can be trained
    tags: int  # fragments that the trainer may generate
    workers: int
    generate: float  # a fragment by a worker, decoding included
    assist: float  # the same, by the trainer
    train: float  # a fragment
    updates: float  # all updates of a step
    last_update: float  # updates after the last fragment
    start: float  # until a worker can generate with new weights; early fragments have their prompts
    score: float  # a fragment, or its parallel delivery if that takes longer
    scoring: float  # all fragments of a step, by all scorers
    turn: float  # a change of the trainer's role, in one direction
    switch: float  # changes in both directions, and the trainer's own weights and prompts

    @classmethod
    def of(cls, problem: Problem, proposal: Proposal) -> "StepEstimate":
        """The estimate of a proposal."""
        costs, settings = of.costs(problem, proposal), of.settings(problem, proposal)
        layout, images = of.layout(problem, proposal), settings.fragment_images
        making = (costs.generate + costs.decode) * images
        score = costs.seconds("score", images, 1.0)
        count, early = settings.fragments, settings.stale_units * settings.unit_fragments
        gates = {"group": settings.unit_fragments, "step": count}
        return cls(
            fragments=count,
            early=early,
            gate=1 if settings.early else gates[settings.readiness],
            tags=min(settings.tag_fragments, count),
            workers=proposal.workers,
            generate=making / layout.rollout[0].speed if proposal.workers else 0.0,
            assist=making / layout.trainer.speed,
            train=costs.train * images,
            updates=costs.update * settings.updates,
            last_update=costs.update * (settings.updates if settings.step_first else 1),
            start=costs.publish + (0.0 if early else costs.encode),
            score=max(score, costs.seconds("deliver", images, 1.0)),
            scoring=score * count / problem.scorers if problem.scorers else 0.0,
            turn=costs.switch,
            switch=2 * costs.switch + costs.publish + costs.encode,
        )

    @property
    def colocated(self) -> float:
        """Seconds if all is generated, then trained in order of the scores; the last gate is the last to open."""
        generated = self.fragments * self.assist
        first = max(generated, self.gate * self.assist + self.score)
        scored = max(generated + self.score, self.assist + self.scoring)
        last = scored + self.gate * self.train + self.last_update
        return self.switch - self.turn + max(first + self.turn + self.busy, last)

    @property
    def busy(self) -> float:
        """The trainer's work on a step."""
        return self.fragments * self.train + self.updates

    @property
    def generation(self) -> float:
        """Seconds of generation if the trainer takes over as much as makes it as busy as each worker."""
        a_fragment = self.generate / self.workers
        share = (self.fragments * a_fragment - self.busy) / max(1e-12, self.assist + a_fragment)
        return (self.fragments - min(max(share, 0.0), self.tags)) * a_fragment

    def best_share(self, others: Callable[[int], float]) -> float:
        """The least seconds over the trainer's share; with it the trainer's work grows, and `others` falls."""
        low, high = 0, self.tags
        while low < high:
            middle = (low + high) // 2
            if self.trainer(middle) < others(middle):
                low = middle + 1
            else:
                high = middle
        return min(max(self.trainer(n), others(n)) for n in {0, max(0, low - 1), low})

    def trainer(self, share: int) -> float:
        """The trainer's work with its share of the generation."""
        return self.busy + (self.switch + share * self.assist if share else 0.0)

    def way(self, share: int) -> float:
        """Seconds from the publication to the update after the last fragment that is not begun early."""
        return self.generated(share) + self.gate * self.train + self.last_update

    def generated(self, share: int) -> float:
        """When the workers' last fragment is scored, if none is begun early out of turn."""
        late = max(0, self.fragments - self.early - share)
        return (
            self.start + math.ceil(late / self.workers) * self.generate + self.score
            if late
            else 0.0
        )

    def played(self, share: int) -> float:
        """`way`, plus the training of a whole last round and of everything after the first gate that opens."""
        late = max(0, self.fragments - self.early - share)
        last = late - (math.ceil(late / self.workers) - 1) * self.workers if late else 0
        rest = max(last, self.gate) * self.train + self.last_update
        end = self.generated(share) + rest
        ready = self.early // self.gate * self.gate
        if share or ready == self.fragments:
            return end
        # Fragments that began early are trained first; then the next gate has to open.
        rounds = math.ceil((self.gate + ready - self.early) / self.workers)
        opened = self.start + rounds * self.generate + self.score
        return max(end, opened + self.busy - ready * self.train)
