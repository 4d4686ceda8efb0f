"""The trainer mesh's executor: fragments of experience -> accumulated gradient -> update."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from digen_jax.algorithms.flow_grpo import FlowGRPO, flow_grpo_loss, gaussian_kl
from digen_jax.flow.sampling import Transitions, replay
from digen_jax.flow.steps import Step
from digen_jax.runtime.placement import DeviceGroup
from digen_jax.runtime.policy import Policy

Metrics = dict[str, Float[Array, ""]]


class State(NamedTuple):
    """What an update changes. `ema` is None where no average is kept."""

    tuned: Any
    optimizer: Any
    ema: Any


class Experience(NamedTuple):
    """A fragment as the trainer sees it: s trained transitions of b images."""

    transitions: Transitions
    conditioning: Any  # of P prompts
    null: Any  # of the empty prompt
    rows: Int[Array, "b"]  # each image's prompt
    advantages: Float[Array, "b"]
    sigma_max: Float[Array, ""]  # sigmas[1] of the schedule


class MicroBatch(NamedTuple):
    """What one forward and backward pass takes: n transitions, of whatever steps and images."""

    transitions: Transitions
    rows: Int[Array, "n"]
    advantages: Float[Array, "n"]


class Totals(NamedTuple):
    """Sums over all samples so far; divided once, at the update."""

    gradient: Any
    sums: Metrics


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """Optimisation, apart from the algorithm's own settings. `micro_batch` counts transitions."""

    micro_batch: int
    learning_rate: float
    warmup: int
    b1: float
    b2: float
    eps: float
    weight_decay: float
    clip_norm: float
    ema: float

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after clipping by the global norm, its rate warmed up linearly."""
        rate = optax.linear_schedule(
            self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay),
        )


class Trainer:
    """Jitted gradient accumulation and update on one mesh. `base` is the policy's (see `Policy`)."""

    def __init__(
        self,
        policy: Policy,
        group: DeviceGroup,
        step: Step,
        algorithm: FlowGRPO,
        settings: TrainerSettings,
    ):
        self.policy, self.group, self.settings = policy, group, settings
        self._optimizer = settings.optimizer()
        self._gradient = functools.partial(micro_gradient, policy, step, algorithm)
        self._begin = jax.jit(self._zeros)
        self._accumulate = jax.jit(self._scan, donate_argnums=3)
        self._update = jax.jit(self._apply, donate_argnums=0)

    def init(self, tuned: Any) -> State:
        """The state before the first update, sharded as the group's rules say.

        It takes over `tuned`: where that lies as the rules say already, the first update consumes it.
        """
        shardings = self._shardings(tuned)
        tuned = jax.device_put(tuned, shardings.tuned)
        optimizer = jax.jit(self._optimizer.init, out_shardings=shardings.optimizer)(tuned)
        ema = jax.tree.map(jnp.copy, tuned) if self.settings.ema else None
        return State(tuned, optimizer, ema)

    def accumulate(
        self, state: State, base: Any, experience: Experience, totals: Totals | None
    ) -> Totals:
        """Adds a fragment's gradient and sums to `totals`, which is consumed; None begins anew."""
        if totals is None:
            totals = self._begin(state.tuned, base, experience)
        return self._accumulate(state.tuned, base, experience, totals)

    def update(self, state: State, totals: Totals) -> tuple[State, Metrics]:
        """One optimizer step; `state` is consumed."""
        return self._update(state, totals)

    def _shardings(self, tuned: Any) -> State:
        """Where a state lies: the average and the moments like their parameters, counts everywhere."""
        params = self.group.params(tuned)
        optimizer = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, tuned),
            params,
            transform_non_params=lambda _: self.group.replicated,
        )
        return State(params, optimizer, params if self.settings.ema else None)

    def _zeros(self, tuned: Any, base: Any, experience: Experience) -> Totals:
        """Totals of nothing; which sums there are is for the algorithm to say."""
        micros = _micro_batches(experience, self.settings.micro_batch, self.group)
        first = jax.tree.map(lambda a: a[0], micros)
        shapes = jax.eval_shape(self._gradient, tuned, base, experience, first)
        return self._laid_out(jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes))

    def _laid_out(self, totals: Totals) -> Totals:
        """The gradient split like its parameters."""
        shardings = Totals(self.group.params(totals.gradient), self.group.replicated)
        return jax.lax.with_sharding_constraint(totals, shardings)

    def _scan(self, tuned: Any, base: Any, experience: Experience, totals: Totals) -> Totals:
        """One scan over the micro-batches, each adding its gradient: memory is that of one."""

        def body(totals, micro):
            new = self._gradient(tuned, base, experience, micro)
            return self._laid_out(jax.tree.map(jnp.add, totals, new)), None

        micros = _micro_batches(experience, self.settings.micro_batch, self.group)
        return jax.lax.scan(body, totals, micros)[0]

    def _apply(self, state: State, totals: Totals) -> tuple[State, Metrics]:
        weight = totals.sums["weight"]
        gradient = jax.tree.map(lambda g: g / weight, totals.gradient)
        updates, optimizer = self._optimizer.update(gradient, state.optimizer, state.tuned)
        tuned = optax.apply_updates(state.tuned, updates)
        ema = state.ema
        if ema is not None:
            ema = optax.incremental_update(tuned, ema, 1 - self.settings.ema)
        metrics = {name: total / weight for name, total in totals.sums.items() if name != "weight"}
        metrics["gradient_norm"] = optax.global_norm(gradient)
        metrics["update_norm"] = optax.global_norm(updates)
        # Else the compiler is free to lay the new state out otherwise than the old one.
        state = State(tuned, optimizer, ema)
        return jax.lax.with_sharding_constraint(state, self._shardings(tuned)), metrics


def micro_gradient(
    policy: Policy,
    step: Step,
    algorithm: FlowGRPO,
    tuned: Any,
    base: Any,
    experience: Experience,
    micro: MicroBatch,
) -> Totals:
    """The summed gradient and metrics of one micro-batch of transitions."""
    conditioning = jax.tree.map(lambda c: c[micro.rows], experience.conditioning)
    sigma_max, null = experience.sigma_max, experience.null
    transitions = micro.transitions

    def reference_kl(mean):
        reference = policy.reference(base, conditioning, null)
        old = replay(reference, transitions, step, sigma_max)
        scale = step.diffusion(transitions.sigma, transitions.sigma_next, sigma_max)
        return gaussian_kl(mean, old.mean, scale)

    def loss(tuned):
        velocity = policy.velocity(tuned, base, conditioning, null)
        new = replay(velocity, transitions, step, sigma_max)
        kl = reference_kl(new.mean) if algorithm.kl_coefficient else None
        weight = jnp.ones_like(micro.advantages)
        return flow_grpo_loss(
            algorithm, new.log_prob, transitions.log_prob, micro.advantages, weight, kl
        )

    (_, sums), gradient = jax.value_and_grad(loss, has_aux=True)(tuned)
    return Totals(gradient, sums)


def _micro_batches(experience: Experience, size: int, group: DeviceGroup) -> MicroBatch:
    """All transitions of a fragment, cut into micro-batches [m, size, ...].

    Micro-batch j of a step holds the images j, j + c, j + 2c, ...: strided, not contiguous, so that
    every device's share of a micro-batch already lies on it.
    """
    s, b = experience.transitions.log_prob.shape
    chunks = b // size

    def cut(a: Array) -> Array:
        """[s b ...] -> [s*chunks size ...]."""
        a = a.reshape(s, size, chunks, *a.shape[2:]).swapaxes(1, 2)
        spec = jax.sharding.PartitionSpec(None, None, *group.batch.spec)
        a = jax.lax.with_sharding_constraint(a, jax.sharding.NamedSharding(group.mesh, spec))
        return a.reshape(s * chunks, size, *a.shape[3:])

    def per_step(a: Array) -> Array:
        """[b] -> [s b]."""
        return jnp.broadcast_to(a, (s, b))

    t = experience.transitions
    sigma, sigma_next = (jnp.broadcast_to(a[:, None], (s, b)) for a in (t.sigma, t.sigma_next))
    transitions = Transitions(t.x, t.x_next, t.log_prob, sigma, sigma_next)
    rows, advantages = per_step(experience.rows), per_step(experience.advantages)
    return jax.tree.map(cut, MicroBatch(transitions, rows, advantages))
