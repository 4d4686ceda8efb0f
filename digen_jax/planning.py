"""From a config to a plan: its step, its model's sizes, costs of a finished run, `placement = "auto"`."""

import dataclasses
import functools
import math
import pathlib
import re
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from digen_jax import recipe, recipe_checks, rewards
from digen_jax.algorithms.demands import Algorithm, needs_reference, slow_copy
from digen_jax.algorithms.policy_gradient import PolicyGradient
from digen_jax.assemble import build, load_family, make_policy, open_pipeline, trained_policy
from digen_jax.inference import run_config
from digen_jax.metrics import read_metrics
from digen_jax.prompts.files import read_prompt_file
from digen_jax.runtime.placement import fitted, fsdp_spec, mesh_sizes
from digen_jax.runtime.planner import candidate as of
from digen_jax.runtime.planner.calibration import Calibration, per_device
from digen_jax.runtime.planner.candidate import Candidate
from digen_jax.runtime.planner.measure import UNMEASURED, measure
from digen_jax.runtime.planner.memory import device_bytes
from digen_jax.runtime.planner.problem import Footprint, Parameters, Problem, Scaling
from digen_jax.runtime.planner.search import Simulations, budget, search
from digen_jax.runtime.planner.space import candidates
from digen_jax.runtime.scheduler.settings import Costs, Settings
from digen_jax.settings import ConfigError, blame, user_input

WARM = 2  # first steps of a run that may have compiled


def step_settings(config: ConfigDict) -> Settings:
    """The scheduler's view of a config's step, with every tactic allowed; early groups rule asynchrony out."""
    batch = config.batch
    settings = dataclasses.replace(
        recipe.scheduler_settings(config),
        steps=1,
        staleness=0 if config.runtime.early_groups else 1,
        ordered=False,
        tag_fragments=batch.groups * batch.images // config.sampler.fragment,
    )
    with blame("config.batch and config.sampler.fragment: ", (ConfigError,)):
        settings.check()
    return settings


def make_problem(
    config: ConfigDict,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> Problem:
    """What is to be planned for a complete config on so many devices; the last two as in `Problem`."""
    return Problem(
        devices,
        step_settings(config),
        calibration.costs,
        Scaling(calibration.worker_serial, config.sampler.fragment),
        Scaling(calibration.trainer_serial, config.trainer.micro_batch),
        recipe.trained_steps(config),
        calibration.scorers,
        footprint,
        device_memory,
    )


def auto_placement(
    config: ConfigDict,
    devices: int,
    calibration: Calibration,
    footprint: Footprint | None = None,
    device_memory: float | None = None,
) -> dict[str, dict[str, int]]:
    """The best placement by simulation: the config's sections `placement.rollout` and `.trainer`.

    What is simulated of each is what the run would do there: with the tactics that the config has switched on.

    Args:
      config: complete; what it says of the placement is not read.
      devices: how many there are; all are used.
      calibration: costs on one device.
      footprint: the model's sizes (`model_footprint`), for the axes fsdp; None: they are 1.
      device_memory: bytes, where placements that need more are to be refused.

    Raises:
      ConfigError: no placement can work.
    """
    problem = make_problem(config, devices, calibration, footprint, device_memory)
    runtime = config.runtime
    settings = dataclasses.replace(
        problem.settings, staleness=runtime.staleness, tag_fragments=runtime.tag_fragments
    )
    problem = dataclasses.replace(problem, settings=settings)
    own = dataclasses.replace(recipe.scheduler_settings(config), steps=1)
    found = [
        c
        for c in candidates(problem)
        if (not c.workers or of.settings(problem, c) == own) and _runs(config, problem, c)
    ]
    best = search(Simulations(problem), found, budget(found))
    return placement_section(problem, best.candidate)


def placed(config: ConfigDict, workdir: pathlib.Path) -> ConfigDict:
    """A complete config whose placement is one for the devices at hand, as its `sizes` say.

    With "auto" it is that of the run in `workdir`, else the planner's choice. What commands cost is measured
    first, on one of the devices, which compiles. There publication moves nothing, so the plan takes it to be
    nearly free.

    Raises:
      ConfigError: something of the config cannot work, or no placement can.
    """
    if not recipe.is_automatic(config):
        return fitting(config)
    if (workdir / "config.json").exists():
        known = run_config(workdir).placement
        return recipe.resized(config, {"rollout": known.rollout, "trainer": known.trainer})
    alone = recipe.resized(config, recipe.one_device())
    recipe_checks.check(alone)
    devices = jax.device_count()
    print(
        f"config.placement = 'auto': times each part of a step on one of the {devices} devices, compiling it first",
        flush=True,
    )
    calibration = measured_costs(alone, note=lambda text: print(f"  {text}", flush=True))
    sizes = auto_placement(alone, devices, calibration, model_footprint(alone))
    print(f"placement chosen by {calibration.source}: {sizes}", flush=True)
    return recipe.resized(config, sizes)


def fitting(config: ConfigDict) -> ConfigDict:
    """A complete config with smaller meshes where there are too few devices for them and its placement says so."""
    placement, devices = config.placement, jax.device_count()
    if placement.sizes != recipe.FITTED:
        return config
    sizes = fitted(placement, devices)
    wanted = {"rollout": placement.rollout.to_dict(), "trainer": placement.trainer.to_dict()}
    if sizes != wanted and devices > 1:
        print(f"config.placement is fitted to {devices} devices: {sizes}", flush=True)
    return recipe.resized(config, sizes)


def overrides(config: ConfigDict, problem: Problem, candidate: Candidate) -> dict[str, Any]:
    """The fields of a complete config that a candidate's run has otherwise, by dotted name.

    Where the mesh that samples cannot split evaluation's batch, the next larger one that it can is taken.
    """
    section, settings = placement_section(problem, candidate), problem.settings
    time, batch = candidate.time, config.evaluation.batch
    sampling = candidate.worker_devices or candidate.trainer
    fields = {
        "placement.sizes": recipe.GIVEN if recipe.is_automatic(config) else config.placement.sizes,
        **{
            f"placement.{mesh}.{axis}": n
            for mesh, axes in section.items()
            for axis, n in axes.items()
        },
        "runtime.tag_fragments": settings.tag_fragments if candidate.tag else 0,
        "runtime.staleness": settings.staleness if candidate.asynchrony else 0,
        "trainer.pack": -(-config.trainer.pack // time) * time,
        "evaluation.batch": -(-batch // sampling) * sampling,
    }
    now = flatten_dict(config.to_dict(), sep=".")
    return {name: value for name, value in fields.items() if value != now[name]}


def can_run(config: ConfigDict, problem: Problem, candidate: Candidate) -> bool:
    """Whether a config with a candidate's `overrides` can divide its batches among the meshes."""
    changed = config.copy_and_resolve_references()
    changed.update_from_flattened_dict(overrides(config, problem, candidate))
    return _divides(changed, problem.devices)


def _divides(config: ConfigDict, devices: int) -> bool:
    try:
        recipe_checks.check_devices(config, devices)
    except ConfigError:
        return False
    return True


def _runs(config: ConfigDict, problem: Problem, candidate: Candidate) -> bool:
    """Whether a config's batches can be divided among a candidate's meshes."""
    if config.trainer.pack % candidate.time:
        return False
    sizes = placement_section(problem, candidate)
    return _divides(recipe.resized(config, sizes), problem.devices)


def placement_section(problem: Problem, candidate: Candidate) -> dict[str, dict[str, int]]:
    """{rollout: {workers, data, fsdp}, trainer: {data, fsdp, time}}; rollout's data 0: colocated."""
    rollout, trainer = 1, 1
    if problem.footprint is not None:
        held = device_bytes(problem, candidate)
        rollout, trainer = held.worker_fsdp, held.trainer_fsdp
    return {
        "rollout": {
            "workers": max(1, candidate.workers),
            "data": candidate.worker_devices // rollout,
            "fsdp": rollout,
        },
        "trainer": {"data": candidate.data // trainer, "fsdp": trainer, "time": candidate.time},
    }


# ------------------------------------------------------------------------------------------ costs


def read_run_costs(
    workdir: pathlib.Path, trainer_serial: float = 0.0, worker_serial: float = 0.0
) -> Calibration:
    """Costs from the timings that a run wrote, on the meshes that its config asks for.

    Encoding and decoding are in the generation's seconds, updates in the training's. The shares are
    those that more devices do not shorten.

    Raises:
      ConfigError: it has no timings, or its config no sizes of meshes.
    """
    config = run_config(workdir)
    with user_input():
        lines = read_metrics(workdir / "metrics.jsonl")
    timed = [line for line in lines if "seconds/train" in line]
    if len(timed) <= WARM:
        raise ConfigError(
            f"{workdir} has timings of {len(timed)} steps, the first {WARM} of which may hold compilation: "
            f"let it run for more"
        )
    rollout, trainer = mesh_sizes(config.placement, 10**9)
    images = config.batch.groups * config.batch.images

    def median(phase: str) -> float:
        return statistics.median(line[f"seconds/{phase}"] for line in timed[WARM:])

    measured = Costs(
        generate=median("rollout") / images,
        train=median("train") / images,
        score=median("reward") / images,
        publish=median("publish") / config.placement.rollout.workers,
    )
    return _on_one_device(
        measured,
        config,
        (rollout or trainer, trainer),
        f"the metrics of {len(timed) - WARM} steps of the run in {workdir}",
        ("encode", "score_latency", "switch"),
        (trainer_serial, worker_serial),
    )


def measured_costs(
    config: ConfigDict,
    trainer_serial: float = 0.0,
    worker_serial: float = 0.0,
    note: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Costs from a fragment's way through the config's own system, on the devices at hand.

    Args:
      config: complete.
      trainer_serial: share of training that more devices do not shorten.
      worker_serial: the same of generation.
      note: is told what is done, as it takes minutes.

    Raises:
      ConfigError: the system cannot be built.
    """
    note(f"loading {config.model.folder}")
    system = build(config, jax.devices())
    records = read_prompt_file(config.prompts.file)
    records = [records[i % len(records)] for i in range(config.batch.groups)]
    measured = measure(system, config, records, rewards.resolve(config.reward.name), note)
    rollout, trainer = system.placement.rollout.mesh.size, system.placement.trainer.mesh.size
    kind = jax.devices()[0].device_kind
    source = f"a fragment timed on devices of the kind {kind}, {rollout} for rollout and {trainer} for training"
    serial = (trainer_serial, worker_serial)
    return _on_one_device(measured, config, (rollout, trainer), source, UNMEASURED, serial)


def _on_one_device(
    measured: Costs,
    config: ConfigDict,
    devices: tuple[int, int],
    source: str,
    missing: tuple[str, ...],
    serial: tuple[float, float],
) -> Calibration:
    """Costs of (rollout, trainer) meshes brought to one device by the (trainer's, worker's) serial share."""
    for name, share in zip(("trainer_serial", "worker_serial"), serial, strict=True):
        Scaling(share).check(name)
    trainer, worker = map(Scaling, serial)
    costs = per_device(measured, *devices, worker, trainer)
    return Calibration(costs, source, missing, *serial, scorers=1)


# ----------------------------------------------------------------------------------------- memory


def model_footprint(config: ConfigDict) -> Footprint:
    """The sizes of a config's model, from shapes alone: nothing is read or allocated.

    Activations are what the transformer's backward pass keeps of one transition as it is written,
    before the compiler saves any of it; the guidance that is trained with is included.

    Raises:
      ConfigError: the model's folder cannot be used.
    """
    with blame("config.model.folder: "):
        family = load_family(
            open_pipeline(config.model.folder), config.model.dtype, config.model.remat
        )
    policy, shapes = make_policy(config, family), family.shapes()
    algorithm = recipe.algorithm_settings(config)
    split = functools.partial(policy.split, reference=needs_reference(algorithm))
    tuned, base = jax.eval_shape(split, jax.random.key(0), shapes["transformer"])
    frozen = {part: tree for part, tree in shapes.items() if part != "transformer"}
    sent = tuned, jax.eval_shape(policy.sampler_base, base)
    if config.sampler.dtype:
        sent = jax.tree.map(lambda leaf: leaf.update(dtype=config.sampler.dtype), sent)
    latent = family.latent_shape(config.model.height, config.model.width)
    placement = config.placement
    sizes = functools.partial(_parameters, placement.rules)
    return Footprint(
        tuned=sizes(tuned),
        published=sizes(sent[0]),
        base=sizes(base),
        sampler_base=sizes(sent[1]),
        frozen=sizes(frozen),
        copies=(config.trainer.ema > 0) + (slow_copy(algorithm) is not None),
        activations=_residuals(trained_policy(policy, algorithm), tuned, base, frozen, latent),
        trajectory=_stored(algorithm, recipe.noisy_steps(config), latent),
        micro_batch=config.trainer.micro_batch,
        trainer_fsdp=placement.trainer.fsdp,
        worker_fsdp=placement.rollout.fsdp,
    )


def _stored(algorithm: Algorithm, steps: int, latent: tuple[int, ...]) -> int:
    """Bytes that are kept of an image until it is trained, in float32."""
    size = math.prod(latent)
    if not isinstance(algorithm, PolicyGradient):
        return 4 * (size + 2)  # the image and its key
    return 4 * steps * ((3 if algorithm.stores_means else 2) * size + 1)  # x, x_next, log_prob


def _parameters(rules: Any, tree: Any) -> Parameters:
    """Bytes of a tree's leaves by whether the rules split them over an axis fsdp of 2."""
    found = {True: 0, False: 0}
    for path, leaf in jax.tree.leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        tactic = next(
            (tactic for pattern, tactic in rules if re.search(pattern, name)), "replicate"
        )
        split = tactic == "fsdp" and any(fsdp_spec(leaf.shape, 2))
        found[split] += leaf.size * leaf.dtype.itemsize
    return Parameters(found[True], found[False])


def _residuals(policy: Any, tuned: Any, base: Any, frozen: Any, latent: tuple[int, ...]) -> int:
    """Bytes that the transformer's pullback holds, for one more transition."""

    def encoded(texts: list[str], frozen: Any) -> Any:
        ids = policy.family.tokenize(texts)
        return policy.family.encode(frozen, jax.tree.map(jnp.asarray, ids))

    def pullback(count: int, tuned: Any, base: Any, frozen: Any) -> Any:
        texts, null = encoded([""] * count, frozen), encoded([""], frozen)
        x, sigma = jnp.zeros((count, *latent)), jnp.ones(count)
        return jax.vjp(lambda tuned: policy.velocity(tuned, base, texts, null)(x, sigma), tuned)[1]

    def held(count: int) -> int:
        shapes = jax.eval_shape(functools.partial(pullback, count), tuned, base, frozen)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))

    return held(2) - held(1)
