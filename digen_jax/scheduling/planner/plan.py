"""A plan: the choice, the best proposal of every kind, and the reasons, as text."""

import dataclasses
import itertools
import textwrap
from collections.abc import Callable, Sequence

from digen_jax.errors import ConfigError
from digen_jax.scheduling.planner import proposal as of
from digen_jax.scheduling.planner.predict import Prediction
from digen_jax.scheduling.planner.problem import Problem
from digen_jax.scheduling.planner.proposal import Proposal
from digen_jax.scheduling.planner.search import NOTHING, Simulations, budget, search
from digen_jax.scheduling.planner.space import proposals

EACH = 4  # simulations for the best split of a kind


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of the search.

    Attributes:
      problem: the problem.
      choice: the best placement with its tactics.
      best: the best prediction of every kind of proposal (see `Proposal.kind`), the fastest first.
      proposals: the number of proposals.
      for_choice: how many of them were simulated for the choice.
      simulated: how many were simulated in all, the table's included.
    """

    problem: Problem
    choice: Prediction
    best: tuple[Prediction, ...]
    proposals: int
    for_choice: int
    simulated: int


def make_plan(problem: Problem, runs: Callable[[Proposal], bool] = lambda proposal: True) -> Plan:
    """Searches all proposals for which `runs` holds, then those of each kind for the table.

    Raises:
      ConfigError: no proposal can work.
    """
    found = list(filter(runs, proposals(problem)))
    if not found:
        raise ConfigError(
            f"no meshes of {problem.devices} devices can split config.sampler.fragment, config.trainer.micro_batch "
            "and config.evaluation.batch evenly: make these multiples of the devices"
        )
    simulations = Simulations(problem)
    choice = search(simulations, found, budget(found))
    for_choice = simulations.count
    kinds: dict[str, list[Proposal]] = {}
    for proposal in found:
        kinds.setdefault(proposal.kind, []).append(proposal)
    rows = [search(simulations, members, EACH, simplify=False) for members in kinds.values()]
    better = min(rows, key=lambda row: row.step_seconds)
    # The search for the table may find a better proposal than the search for the choice.
    if better.step_seconds < choice.step_seconds * (1 - NOTHING):
        choice = better
    rows = [choice if row.proposal.kind == choice.proposal.kind else row for row in rows]
    rows.sort(key=lambda row: row.step_seconds)
    return Plan(problem, choice, tuple(rows), len(found), for_choice, simulations.count)


# ------------------------------------------------------------------------------------------- text


WIDTH = 100  # columns

LEGEND = (
    "A line is the best split of its kind; * is the choice.",
    "workers: rollout meshes x devices of each; -: colocated, where all devices generate, then train.",
    "trainer: devices that split images, x those that split time steps.",
    "of bound: (G + T)/N over s/step. G and T are a step's seconds of generation and training on one of N devices.",
    "waits most for: share of all devices' time, and what they wait for.",
    "GAP (generation-axis pipeline): fragments are trained while others are generated, as in every run.",
    "TSP (time-step parallelism): the trainer's devices split the denoising steps of an image, too.",
    "TAG (trainer-assisted generation): a trainer that would wait generates fragments itself.",
    "asynchrony: workers that would wait begin the next step with the weights they have.",
)


def wrapped(text: str, indent: str = "") -> str:
    """Lines of at most `WIDTH` columns; continuation lines are indented."""
    lines = (
        textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_long_words=False)
        for line in text.split("\n")
    )
    return "\n".join(itertools.chain.from_iterable(parts or [""] for parts in lines))


def table(plan: Plan) -> str:
    """A line of at most `WIDTH` columns for the best proposal of every kind."""
    head = ["", "tactics", "workers", "trainer", "s/step", "img/dev/s", "of bound"]
    if plan.problem.footprint is not None:
        head.append("GiB")
    head.append("waits most for")
    rows = [head, *(_row(plan, row) for row in plan.best)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    right = {"s/step", "img/dev/s", "of bound", "GiB"}
    lines = []
    for row in rows:
        cells = zip(row, widths, head, strict=True)
        lines.append(
            "  ".join(c.rjust(w) if name in right else c.ljust(w) for c, w, name in cells).rstrip()
        )
    return "\n".join(lines)


def _row(plan: Plan, made: Prediction) -> list[str]:
    proposal = made.proposal
    cells = [
        "*" if made is plan.choice else "",
        proposal.kind.replace(" ", ""),
        f"{proposal.workers} x {proposal.worker_devices}" if proposal.workers else "-",
        f"{proposal.data} x {proposal.time}",
        f"{made.step_seconds:.4g}",
        f"{made.images_per_device_second:.4g}",
        f"{made.utilisation:.1%}",
    ]
    if made.memory is not None:
        cells.append(f"{made.memory.largest / 2**30:.2f}")
    return [*cells, longest_wait(plan.problem, made) or "-"]


def longest_wait(problem: Problem, made: Prediction) -> str:
    """The largest idle share of all devices' time, with its cause; empty if nothing waits."""
    whole = problem.devices * made.step_seconds
    share, cause = max(((s / whole, cause) for cause, s in made.bubbles.items()), default=(0, ""))
    return f"{share:.1%} {cause}" if share >= 5e-4 else ""


def memory_table(plan: Plan) -> str:
    """The bytes by purpose on a device of each mesh of the choice, and whether temporary memory is included."""
    lines, memory = [], plan.choice.memory
    times = {
        "a trainer device": memory.trainer,
        "a rollout device": memory.worker,
        "before that, a device that encodes prompts": memory.ahead,
    }
    for name, held in times.items():
        parts = ", ".join(f"{what} {size / 2**20:,.1f}" for what, size in held.items() if size)
        if held:
            lines.append(f"{name}, MiB: {sum(held.values()) / 2**20:,.1f} = {parts}")
    if plan.problem.footprint.programs is None:
        lines.append(
            "without temporaries of programs: --memory=GIB compiles the programs and counts them"
        )
    return "\n".join(lines)


def why(plan: Plan) -> str:
    """The choice and its reason, in one sentence."""
    choice, rows = plan.choice, {row.proposal.kind: row for row in plan.best}
    chosen = f"{choice.proposal.kind} ({choice.proposal.describe()}) is best because"
    colocated, split = rows.get("colocated"), [r for r in plan.best if r.proposal.workers]
    if not choice.proposal.workers:
        if not split:
            return f"{chosen} one device can only do one thing at a time."
        other = min(split, key=lambda row: row.step_seconds)
        return (
            f"{chosen} all devices generate and then train, without waiting for one another, at "
            f"{choice.utilisation:.1%} of the bound; the best split, {other.proposal.describe()} with "
            f"{_tactics(other)}, takes {_longer(other, choice)} longer"
            f"{_because(plan.problem, other)}."
        )
    reasons = []
    if colocated is not None:
        reasons.append(
            f"colocated takes {_longer(colocated, choice)} longer{_colocated_loss(plan, colocated)}"
        )
    else:
        reasons.append(
            f"colocated is left out, as {plan.problem.devices} devices cannot split every batch evenly"
        )
    reasons += [
        f"without {name} the best takes {_longer(row, choice)} longer"
        for name, row in _without(plan).items()
    ]
    least = f"it keeps the devices at {choice.utilisation:.1%} of the bound"
    return f"{chosen} {least}: {', '.join(reasons)}." if reasons else f"{chosen} {least}."


def _without(plan: Plan) -> dict[str, Prediction]:
    """For each tactic of the choice, the best disaggregated proposal that lacks it."""
    found = {}
    for name in plan.choice.proposal.tactics:
        rows = [r for r in plan.best if r.proposal.workers and name not in r.proposal.tactics]
        if rows:
            found[name] = min(rows, key=lambda row: row.step_seconds)
    return found


def _colocated_loss(plan: Plan, colocated: Prediction) -> str:
    """The largest cost of a colocated step beyond the bound."""
    problem, proposal = plan.problem, colocated.proposal
    costs, settings = of.costs(problem, proposal), of.settings(problem, proposal)
    devices, images = proposal.trainer, settings.groups * settings.images
    used = problem.worker.used(devices)
    sampling = images * (costs.generate + costs.decode)
    losses = {
        "its training does not scale": images * (costs.train - problem.costs.train / devices),
        "its generation does not scale": sampling * (problem.worker.seconds(used) - 1 / used),
        f"only {used} of its devices can share a fragment": sampling * (1 / used - 1 / devices),
        "all devices switch roles": 2 * costs.switch,
        "all devices wait for updates": costs.update * settings.updates,
        "all devices encode the prompts": costs.encode,
        "all devices wait for rewards": colocated.bubbles.get("reward", 0.0) / devices,
    }
    cause = max(losses, key=losses.get)
    return f" (most of it as {cause})" if losses[cause] > 1e-3 * colocated.step_seconds else ""


def _because(problem: Problem, made: Prediction) -> str:
    if problem.settings.fragments == 1:
        return ", as a step is a single fragment and nothing can overlap: make config.sampler.fragment smaller"
    waiting = longest_wait(problem, made)
    return f", most of it waiting ({waiting})" if waiting else ""


def _tactics(made: Prediction) -> str:
    return " + ".join(made.proposal.tactics) or "no tactics"


def _longer(other: Prediction, choice: Prediction) -> str:
    return f"{other.step_seconds / choice.step_seconds - 1:.1%}"


def describe_costs(problem: Problem, missing: Sequence[str]) -> str:
    """The costs of a plan, each on one device."""
    given = dataclasses.asdict(problem.costs)
    per_image = {"generate", "train", "decode", "score", "deliver"}
    parts = [
        f"{name} {seconds:.4g} s{' an image' if name in per_image else ''}"
        for name, seconds in given.items()
        if seconds or name not in missing
    ]
    text = f"on one device: {', '.join(parts)}"
    if missing:
        text += f"; not known and left out: {', '.join(missing)}"
    laws = {"training": problem.trainer.serial, "generation": problem.worker.serial}
    scaling = ", ".join(f"{name} {share:.1%}" for name, share in laws.items())
    return f"{text}; share that more devices do not shorten: {scaling}"
