"""Seconds of a step without a simulation: a lower bound, and an estimate to rank candidates by.

Both are of the steady state, where all steps are alike. A step cannot be shorter than the trainer's
own work; than the generation of its fragments by all who may do it; than the rewards' work; nor than
the way of the fragments that are not begun early: from the publication of their weights through
generation and rewards to the update.
"""

import dataclasses
import math
from collections.abc import Callable

from digen_jax.scheduling.planner import candidate as of
from digen_jax.scheduling.planner.candidate import Candidate
from digen_jax.scheduling.planner.problem import Problem


def lower_bound(problem: Problem, candidate: Candidate) -> float:
    """No step of the steady state takes less on average."""
    step = StepEstimate.of(problem, candidate)
    if not step.workers:
        return step.colocated
    return max(step.generation, step.scoring, step.best_share(step.way))


def estimate(problem: Problem, candidate: Candidate) -> float:
    """About what a simulation will say, never below `lower_bound`."""
    step = StepEstimate.of(problem, candidate)
    if not step.workers:
        return lower_bound(problem, candidate)
    return max(step.generation, step.scoring, step.best_share(step.played))


@dataclasses.dataclass(frozen=True)
class StepEstimate:
    """A candidate's step in a few numbers: fragments, and seconds. `share` is the trainer's, by TAG."""

    fragments: int
    early: int  # that may begin before the step is on
    gate: int  # that are scored before the first of them can be trained
    tags: int  # that the trainer may generate
    workers: int
    generate: float  # a fragment by a worker, decoding included
    assist: float  # the same by the trainer
    train: float  # a fragment
    updates: float  # all of a step
    last_update: float  # those that follow on the last fragment
    start: float  # until a worker can generate by new weights; early fragments need prompts before
    score: float  # a fragment, or its delivery beside that, if it takes longer
    scoring: float  # all of a step by the scorers there are
    turn: float  # of the trainer's role, each way
    switch: float  # both ways, and its own weights and prompts

    @classmethod
    def of(cls, problem: Problem, candidate: Candidate) -> "StepEstimate":
        """Of a candidate."""
        costs, settings = of.costs(problem, candidate), of.settings(problem, candidate)
        layout, images = of.layout(problem, candidate), settings.fragment_images
        making = (costs.generate + costs.decode) * images
        score = costs.seconds("score", images, 1.0)
        count, early = settings.fragments, settings.stale_units * settings.unit_fragments
        gates = {"group": settings.unit_fragments, "step": count}
        return cls(
            fragments=count,
            early=early,
            gate=1 if settings.early else gates[settings.readiness],
            tags=min(settings.tag_fragments, count),
            workers=candidate.workers,
            generate=making / layout.rollout[0].speed if candidate.workers else 0.0,
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
        """All is generated, then trained in turn as it is scored; the last gate is the last to open."""
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
        """Work that the trainer takes over, divisible, leaves it as busy as each worker."""
        a_fragment = self.generate / self.workers
        share = (self.fragments * a_fragment - self.busy) / max(1e-12, self.assist + a_fragment)
        return (self.fragments - min(max(share, 0.0), self.tags)) * a_fragment

    def best_share(self, others: Callable[[int], float]) -> float:
        """The least over the trainer's share, with which its work rises and what `others` do falls."""
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
        """From the publication to the update behind the last fragment that is not begun early."""
        return self.generated(share) + self.gate * self.train + self.last_update

    def generated(self, share: int) -> float:
        """When the last fragment of the workers is scored, none being begun early out of turn."""
        late = max(0, self.fragments - self.early - share)
        return (
            self.start + math.ceil(late / self.workers) * self.generate + self.score
            if late
            else 0.0
        )

    def played(self, share: int) -> float:
        """The same, with the training of a whole last round, and of all behind the first gate that opens."""
        late = max(0, self.fragments - self.early - share)
        last = late - (math.ceil(late / self.workers) - 1) * self.workers if late else 0
        rest = max(last, self.gate) * self.train + self.last_update
        end = self.generated(share) + rest
        ready = self.early // self.gate * self.gate
        if share or ready == self.fragments:
            return end
        # What began early is trained first; then the next gate has to open.
        rounds = math.ceil((self.gate + ready - self.early) / self.workers)
        opened = self.start + rounds * self.generate + self.score
        return max(end, opened + self.busy - ready * self.train)
