"""Training loop of both pretraining stages: a jitted step over a data mesh, EMA, checkpoints, resumption."""

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from contextlib import closing
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from digen_jax.algorithms.algorithm import EmaDecay, update_average
from digen_jax.attention.kernels import on_device
from digen_jax.checkpoints.checkpointer import Checkpointer, template_of
from digen_jax.logging.metrics import MetricsLog
from digen_jax.process.terminal import track

# First and last layers of the networks.
OUTER = (
    "pos_embed",
    "patch_embedding",
    "context_embedder",
    "proj_out",
    "encoder/conv_in",
    "decoder/conv_out",
)
Loss = Callable[[Any, Any, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class FitSettings:
    """Optimizer and schedule of a stage, a section of its config."""

    steps: int
    learning_rate: float
    muon_rate: float = 0.0  # learning rate of Muon; 0 uses Adam for everything
    final_rate: float = 0.02  # final share of the learning rate in the cosine schedule
    warmup: int = 200
    ema: float = 0.999
    clip_norm: float = 1.0
    checkpoint_every: int = 500
    log_every: int = 50

    def optimizer(self) -> optax.GradientTransformation:
        """Returns Adam, and Muon for the matrices if `muon_rate` is set, after clipping by the norm."""
        rule = optax.adam(self._rate(self.learning_rate), b2=0.99)
        if self.muon_rate:
            rule = optax.contrib.muon(
                self._rate(self.muon_rate),
                adam_learning_rate=self._rate(self.learning_rate),
                muon_weight_dimension_numbers=_matrices,
            )
        return optax.chain(optax.clip_by_global_norm(self.clip_norm), rule)

    def _rate(self, peak: float) -> optax.Schedule:
        """Returns a linear warm-up to the peak and a cosine decay to `final_rate` of it."""
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, self.warmup, self.steps, peak * self.final_rate
        )


def fit(
    params: Any,
    loss: Loss,
    batch: Callable[[int], Any],
    settings: FitSettings,
    workdir: pathlib.Path,
    key: jax.Array,
) -> Any:
    """Trains to `settings.steps` and returns the EMA of the parameters; `params` is donated.

    `loss(params, batch, key) -> (scalar, metrics)`; `batch(step)` is a tree of arrays that depends only on the step,
    so that a killed run continues exactly. Batches are split over all devices.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    replicated, split = (
        NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("data"))
    )
    optimizer, average = settings.optimizer(), EmaDecay(settings.ema, warm_up=True)

    @functools.partial(jax.jit, donate_argnums=0)
    def update(state, inputs, step):
        grad = jax.grad(loss, has_aux=True)
        with on_device(jax.devices()[0], "xla"):  # selects the products that are fast on CPUs
            gradient, metrics = grad(state["params"], inputs, jax.random.fold_in(key, step))
        updates, optimizer_state = optimizer.update(gradient, state["optimizer"], state["params"])
        new = optax.apply_updates(state["params"], updates)
        # An early average would be mostly the random initialization, so its window grows with the step.
        ema = update_average(state["ema"], new, average.at(step))
        metrics["gradient_norm"] = optax.global_norm(gradient)
        return {"params": new, "optimizer": optimizer_state, "ema": ema}, metrics

    ema = jax.tree.map(jnp.copy, params)
    state = {"params": params, "optimizer": optimizer.init(params), "ema": ema}
    state = jax.device_put(state, replicated)
    checkpoints = Checkpointer(workdir / "checkpoints", settings.checkpoint_every, keep=1)
    log = MetricsLog(workdir)
    found = checkpoints.restore_latest(template_of(state))
    start, state = (found.step, found.arrays) if found else (0, state)
    log.truncate(found.host["metrics"] if found else 0)
    with closing(checkpoints), closing(log):
        steps = range(start, settings.steps)
        for step in track(steps, workdir.name, "step", settings.steps, start):
            state, metrics = update(state, jax.device_put(batch(step), split), step)
            done = step + 1
            if done % settings.log_every == 0:
                log.write(done, metrics)
            if checkpoints.due(done) or done == settings.steps:
                checkpoints.save(done, state, {"metrics": log.position()})
            checkpoints.check()
    return state["ema"]


def _matrices(params: Any) -> Any:
    """Selects the kernels between hidden layers, single or scanned, for Muon; a convolution's window counts as inputs.

    Adam trains the first and last layers, whose inputs or outputs have fixed meanings, and all other parameters.
    """

    def dimensions(path: tuple, leaf: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if not name.endswith("kernel") or any(part in name for part in OUTER):
            return None
        # Kernels of convolutions are not scanned, and have four dimensions or more.
        inputs = range(leaf.ndim - 1) if leaf.ndim > 3 else [leaf.ndim - 2]
        return optax.contrib.MuonDimensionNumbers(tuple(inputs), leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(dimensions, params)
