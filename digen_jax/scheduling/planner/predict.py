"""Predicts a proposal by a run of the real scheduler on a virtual clock."""

import dataclasses

from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.memory import DeviceBytes, device_bytes
from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.planner.simulate import Disturbance, simulate

STEPS = 8  # simulated; the first fills the pipeline, and an alternation of up to 3 steps is visible


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A simulated proposal.

    Attributes:
      proposal: the simulated proposal.
      step_seconds: of the steady state.
      images_per_device_second: trained images.
      utilisation: the bound (G + T)/N, with perfect scaling, over the step's seconds.
      bubbles: device-seconds of waiting in a step, by cause.
      tag_share: the share of the fragments that the trainer generated.
      staleness: mean age of a trained fragment, in versions.
      memory: of a device; None if the footprint is not known.
    """

    proposal: Proposal
    step_seconds: float
    images_per_device_second: float
    utilisation: float
    bubbles: dict[str, float]
    tag_share: float
    staleness: float
    memory: DeviceBytes | None


def predict(problem: Problem, proposal: Proposal, steps: int = STEPS) -> Prediction:
    """Simulates `steps` steps."""
    report = simulate(
        of.layout(problem, proposal),
        of.costs(problem, proposal),
        of.settings(problem, proposal),
        steps,
        Disturbance(scorers=problem.scorers),
    )
    bubbles = report.bubbles()
    # Waiting for the end of the run does not belong to a step.
    bubbles.pop("end", None)
    return Prediction(
        proposal,
        report.step_seconds,
        report.images_per_device_second,
        problem.bound / report.step_seconds,
        {cause: seconds / steps for cause, seconds in bubbles.items()},
        report.tag_share,
        report.staleness,
        memory_of(problem, proposal),
    )


def memory_of(problem: Problem, proposal: Proposal) -> DeviceBytes | None:
    """Bytes on each device; None if the footprint is not known."""
    return device_bytes(problem, proposal) if problem.footprint else None
