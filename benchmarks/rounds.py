"""Rounds in which two sides do the same work in turn, and their ratios; only quiet rounds have a ratio of times."""

import dataclasses
from statistics import median
from typing import Any

from benchmarks.load import Load
from benchmarks.processes import Seconds

PHASES = "sampling", "training"
SIDES = "ours", "eager"


@dataclasses.dataclass(frozen=True)
class Round:
    """One step of each side; `times` are by phase, then by side.

    Attributes:
      average: the machine's load average over the minute before the round, which also counts the round before.
      load: what others took of the cores during the round.
      times: of this round.
    """

    average: float
    load: Load
    times: dict[str, dict[str, Seconds]]

    def describe(self) -> str:
        """The round in a line."""
        parts = []
        for phase in PHASES:
            ours, other = (self.times[phase][side] for side in SIDES)
            parts.append(f"{phase} {ours.wall:.2f} s and {other.wall:.2f} s")
        words = "" if self.load.quiet else ": not quiet, so it does not count"
        return (
            f"load average {self.average:.2f}, others took {self.load.others:.0%} and the host "
            f"{self.load.stolen:.0%} of the cores{words}; {', '.join(parts)}"
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """All rounds, and the number of trained parameters and the distance of velocities, which both sides share."""

    parameters: int
    distance: float
    rounds: tuple[Round, ...]

    def ratio(self, phase: str) -> float | None:
        """The eager loop's time over ours of a phase or of the "step", the median of quiet rounds; None without any."""
        quiet = [r for r in self.rounds if r.load.quiet]
        return median(_ratio(r, phase, "wall") for r in quiet) if quiet else None

    def cpu_ratio(self, phase: str) -> float:
        """The same of CPU time, over all rounds."""
        return median(_ratio(r, phase, "cpu") for r in self.rounds)

    def describe(self) -> str:
        """A table of medians; only quiet rounds have a ratio of times."""
        quiet = [r for r in self.rounds if r.load.quiet]
        lines = [
            f"{'':10}{'ours':>10}{'eager':>10}{'ratio':>8}   {'CPU: ours':>10}{'eager':>10}{'ratio':>8}"
        ]
        for phase in (*PHASES, "step"):
            wall = "".join(
                f"{median(_seconds(r, phase, side, 'wall') for r in quiet):8.2f} s"
                if quiet
                else f"{'-':>10}"
                for side in SIDES
            )
            cpu = "".join(
                f"{median(_seconds(r, phase, side, 'cpu') for r in self.rounds):8.2f} s"
                for side in SIDES
            )
            ratio = self.ratio(phase)
            shown = "-" if ratio is None else f"{ratio:.2f}x"
            lines.append(f"{phase:10}{wall}{shown:>8}   {cpu}{self.cpu_ratio(phase):>7.2f}x")
        end = f"{len(quiet)} of {len(self.rounds)} rounds were quiet; the others only count for CPU time."
        if not quiet:
            end = (
                "No round was quiet, so there is no ratio of times: other programs slow both sides differently. "
                "Run it on a machine that does nothing else."
            )
        return "\n".join([*lines, end])

    def record(self) -> dict[str, Any]:
        """All numbers as JSON values."""
        rounds = [
            {
                "load_average": r.average,
                **dataclasses.asdict(r.load),
                "quiet": r.load.quiet,
                "seconds": {
                    phase: {side: s._asdict() for side, s in sides.items()}
                    for phase, sides in r.times.items()
                },
            }
            for r in self.rounds
        ]
        ratios = {
            phase: {"wall": self.ratio(phase), "cpu": self.cpu_ratio(phase)}
            for phase in (*PHASES, "step")
        }
        return {
            "parameters": self.parameters,
            "velocity_distance": self.distance,
            "ratios": ratios,
            "rounds": rounds,
        }


def _seconds(r: Round, phase: str, side: str, kind: str) -> float:
    phases = PHASES if phase == "step" else (phase,)
    return sum(getattr(r.times[each][side], kind) for each in phases)


def _ratio(r: Round, phase: str, kind: str) -> float:
    ours, other = (_seconds(r, phase, side, kind) for side in SIDES)
    return other / ours
