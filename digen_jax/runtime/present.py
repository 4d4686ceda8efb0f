"""What every worker of a run does or waits for at present, for people who look at it."""

import time
from collections.abc import Mapping
from typing import Any

from digen_jax.runtime.summary import Summary
from digen_jax.scheduling.commands import TRAINER, Decode, Encode, Score
from digen_jax.scheduling.scheduler import Scheduler


def present(
    scheduler: Scheduler, summary: Summary, devices: Mapping[str, int], now: float
) -> dict[str, Any]:
    """The state of a run, as JSON.

    Args:
      scheduler: between two events.
      summary: has seen the same events.
      devices: the number of devices of each worker that is there.
      now: the time, in seconds of the run's clock.

    Returns:
      "step": how many are done, "steps": how many there are, "scoring": how many batches the rewards have, and
      "workers", by name: "devices"; "lost", since when it is, or None; "does", its present command in words, or
      None; "waits", for what it waits, one of `timeline.CAUSES`, or None; "since", when that began, or None;
      "holds" and "arrives", the versions of the weights. Times are those of the system's clock.
    """
    state, begun = scheduler.state, time.time() - now

    def at(when: float | None) -> float | None:
        return None if when is None else begun + when

    def of(name: str) -> dict[str, Any]:
        worker = state.workers.get(name)
        if worker is None:
            return {"lost": at(summary.lost[name][0] if name in summary.lost else now)}
        kept = scheduler.kept if name == TRAINER else worker.held
        command = state.in_flight.get(worker.busy)
        return {
            "lost": None,
            "does": None if command is None else _words(scheduler, command),
            "waits": None if scheduler.is_busy(name) else scheduler.waits_for(name),
            "since": at(summary.since(name)),
            "holds": sorted({publication.version for publication in kept}),
            "arrives": sorted({publication.version for publication in worker.arriving}),
        }

    lost = {name: count for name, (_, count) in summary.lost.items()}
    known = {**summary.devices, **lost, **devices}
    return {
        "step": state.step,
        "steps": state.settings.steps,
        "scoring": sum(isinstance(command, Score) for command in state.in_flight.values()),
        "workers": {name: {"devices": count, **of(name)} for name, count in known.items()},
    }


def _words(scheduler: Scheduler, command: Any) -> str:
    """A command in words: its piece of work, and which part of it."""
    part = f" ({command.kind})" if isinstance(command, Encode | Decode) else ""
    return scheduler.work(command) + part
