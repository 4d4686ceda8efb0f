"""Trainer settings and programs: chunks -> accumulated gradient -> update."""

import dataclasses
import functools
from typing import Annotated, Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from digen_jax.algorithms.advantages import STD_EPS
from digen_jax.algorithms.algorithm import Algorithm, EmaDecay, EmaUnit, update_average
from digen_jax.diffusion.steps import ReverseStep
from digen_jax.errors import Decay, NonNegativeFloat, PositiveFloat, PositiveInt, Range
from digen_jax.parallel.accumulate import (
    GroupSums,
    Metrics,
    OpenGroup,
    Policies,
    Term,
    Totals,
    TrainBatch,
    fold_group,
    passes,
    recenter,
    sum_passes,
)
from digen_jax.parallel.mesh import put, with_shardings
from digen_jax.parallel.objectives import DifferentiableRewards, make_objective, zero_totals
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy, jit_as_written


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """Optimizer, micro-batches, and the moving average of the parameters."""

    micro_batch: PositiveInt = 144  # images per forward and backward pass
    pack: PositiveInt = 1  # denoising steps of each image per pass
    updates: PositiveInt = 1  # optimizer updates per step, each from separate groups
    learning_rate: PositiveFloat = 1e-4  # AdamW learning rate after warm-up
    warmup: Annotated[int, Range(0, 10**9)] = 0  # updates of linear learning-rate warm-up
    # updates of linear learning-rate decay to 0 after warm-up; 0 means a constant rate
    decay: Annotated[int, Range(0, 10**9)] = 0
    b1: Decay = 0.9  # AdamW decay of the first moment
    b2: Decay = 0.999  # AdamW decay of the second moment
    eps: PositiveFloat = 1e-8  # AdamW epsilon
    weight_decay: NonNegativeFloat = 0.0  # AdamW weight decay
    # maximum global gradient norm; inf disables clipping
    clip_norm: Annotated[float, Range(0, excluded="least", infinite=True)] = 1.0
    # decay of the parameters' moving average, which is evaluated and exported; 0 means no average
    ema: Decay = 0.0
    # unit of the count n in the next two fields: "update", the number of updates so far (Flow-GRPO, DiffusionNFT), or
    # "step", the number of previous training steps, with mixing at the end of a step (DanceGRPO, Flow-Factory, AWM)
    ema_unit: EmaUnit = "update"
    ema_warm_up: bool = False  # whether the decay is at most (1 + n) / (10 + n)
    ema_every: PositiveInt = 1  # mixes the average when n + 1 is a multiple of this
    # number of applications per mixing, for parity with code that mixes after every micro-batch
    ema_repeats: PositiveInt = 1

    @property
    def average(self) -> EmaDecay:
        """Decay of the parameters' moving average."""
        warm_up, every, repeats = self.ema_warm_up, self.ema_every, self.ema_repeats
        return EmaDecay(self.ema, warm_up, every, repeats, self.ema_unit, self.updates)

    def optimizer(self) -> optax.GradientTransformation:
        """Returns AdamW with global-norm clipping, linear warm-up and optional decay of the learning rate."""
        rate = optax.linear_schedule(
            self.learning_rate / (self.warmup + 1), self.learning_rate, self.warmup
        )
        if self.decay:
            fall = optax.linear_schedule(self.learning_rate, 0.0, self.decay)
            rate = optax.join_schedules([rate, fall], [self.warmup])
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(rate, self.b1, self.b2, self.eps, weight_decay=self.weight_decay),
        )


def updates_made(state: optax.OptState) -> Int[Array, ""]:
    """Returns the number of updates from the state of a `TrainerSettings` optimizer; all its counts are equal."""
    return optax.tree_utils.tree_get_all_with_path(state, "count")[0][1]


class TrainState(NamedTuple):
    """State that a step changes. `ema` is None without an average, `copy` and `sampling` without a slow copy.

    `sampling` is the algorithm's `sampling_copy`.
    """

    tuned: Any
    optimizer: Any
    ema: Any
    copy: Any = None
    sampling: Any = None

    @property
    def evaluated(self) -> Any:
        """Parameters to evaluate: the average, if there is one."""
        return self.tuned if self.ema is None else self.ema


class Trainer:
    """Jitted gradient accumulation and update on one mesh. `base` is the policy's (see `Policy`)."""

    def __init__(
        self,
        policy: Policy,
        group: DeviceGroup,
        step: ReverseStep,
        algorithm: Algorithm,
        settings: TrainerSettings,
        rewards: DifferentiableRewards | None = None,
    ):
        self.policy, self.group, self.settings = policy, group, settings
        self.algorithm, self.rewards = algorithm, rewards
        self._optimizer = settings.optimizer()
        self._objectives: list[Any] = [
            make_objective(expert, step, algorithm, rewards) for expert in policy.experts
        ]

        def start_group(tuned):
            return self._constrain(self._objectives[0].zero_group(tuned))

        def fold(totals, sums, scale):
            weight = cast(Any, algorithm).kl_coefficient
            return self._constrain(fold_group(totals, sums, scale, weight))

        def add(totals, others):
            return self._constrain(jax.tree.map(jnp.add, totals, others))

        self._start = jax.jit(self._zero_totals, static_argnums=1)
        self._start_group = jax.jit(start_group)
        self._accumulate = jit_as_written(self._accumulate_passes, donate_argnums=2)
        self._accumulate_group = jit_as_written(self._accumulate_open_group, donate_argnums=3)
        self._fold, self._add = (jax.jit(one, donate_argnums=0) for one in (fold, add))
        self._update = jax.jit(self._apply_update, donate_argnums=0)
        # A copy that samples is not donated: samplers and the trainer still refer to the version.
        samples = algorithm.copy_samples_from is not None or algorithm.sampling_copy is not None
        donated = () if samples else 0
        self._update_copy = jax.jit(self._updated_copy, donate_argnums=donated)

    def init(self, tuned: Any) -> TrainState:
        """Returns the state before the first update, sharded by the group's rules.

        Consumes `tuned`: arrays that already have these shardings are donated by the first update.
        """
        shardings = self._shardings(tuned)
        tuned = jax.device_put(tuned, shardings.tuned)
        optimizer = jax.jit(self._optimizer.init, out_shardings=shardings.optimizer)(tuned)
        ema = jax.tree.map(jnp.copy, tuned) if self.settings.ema else None
        kept = self.algorithm.slow_copy, self.algorithm.sampling_copy
        copies = (jax.tree.map(jnp.copy, tuned) if one else None for one in kept)
        return TrainState(tuned, optimizer, ema, *copies)

    def accumulate(
        self,
        state: TrainState,
        base: Any,
        train_batch: TrainBatch,
        totals: Totals | None,
        behavior: Any = None,
        start: Any = None,
        piece: tuple[int, int] | None = None,
    ) -> Totals:
        """Adds a chunk's gradient and sums to `totals`.

        Args:
          state: State of the trainer.
          base: See `Policy`.
          train_batch: The chunk.
          totals: Sums so far, which are donated. None means zero.
          behavior: Parameters that sampled the chunk, required if the algorithm `reads_behavior`.
          start: Parameters at the start of the step, used if the algorithm `reads_start`. None means that `state`
            still has them.
          piece: (first, count) of the passes to add; one program computes all pieces. None means all passes.

        Raises:
          ValueError: `behavior` is required, but missing.
        """
        if self.algorithm.reads_behavior and behavior is None:
            raise ValueError("the policy that sampled is evaluated, so accumulate needs behavior")
        if totals is None:
            totals = self._start(state.tuned)
        policies = self._policies(state, base, behavior, start)
        unscaled, totals = totals.unscaled, totals._replace(unscaled=None)
        part = None if piece is None else tuple(map(np.int32, piece))
        totals = self._accumulate(policies, train_batch, totals, part)
        return totals._replace(unscaled=unscaled)

    def accumulate_early(
        self,
        state: TrainState,
        base: Any,
        train_batch: TrainBatch,
        rewards: Float[np.ndarray, "b"],
        group: OpenGroup | None,
    ) -> OpenGroup:
        """Adds a chunk of one group to that group's sums, which are donated. None means a new group.

        `train_batch.advantages` is not read. `Algorithm.check_early_training` decides whether the result is exact.
        """
        before = np.zeros(0) if group is None else group.rewards
        known = np.concatenate([before, np.asarray(rewards, np.float64)])
        shift = before.mean() - known.mean() if len(before) else 0.0
        centred = np.asarray(known[len(before) :] - known.mean(), np.float32)
        train_batch = train_batch._replace(advantages=put(centred, self.group.batch))
        sums = self._start_group(state.tuned) if group is None else group.sums
        policies = Policies(state.tuned, base)
        sums = self._accumulate_group(policies, train_batch, np.float32(shift), sums)
        return OpenGroup(known, sums)

    def close(
        self, group: OpenGroup, totals: Totals | None, std: Literal["group", "global"]
    ) -> Totals:
        """Folds a complete group into `totals`, which is donated. None means zero totals.

        `std` selects the divisor of its advantages: the std of the group or, at the update, of the step.

        Raises:
          ValueError: clipping would have changed an advantage of the group, so the result is not its gradient.
        """
        scale: Any = None
        if std == "group":
            centred = group.rewards - group.rewards.mean()
            scale = 1 / (group.rewards.std() + STD_EPS)
            largest = float(np.abs(centred).max() * scale)
            # An advantage is rounded to float32 before clipping.
            most = cast(Any, self.algorithm).adv_clip
            if np.float32(largest) > np.float32(most) * (1 + 1e-6):
                raise ValueError(
                    f"an advantage of {largest:.4g} is clipped to {most}, so its group "
                    "cannot be trained before it is complete"
                )
            scale = np.float32(scale)
        if totals is None or (std == "global" and totals.unscaled is None):
            empty = self._start(group.sums.plain.gradient, std == "global")
            totals = empty if totals is None else totals._replace(unscaled=empty.unscaled)
        return self._fold(totals, group.sums, scale)

    def add(self, totals: Totals | None, others: Totals) -> Totals:
        """Adds sums on this mesh to `totals`, which is donated. None means zero totals."""
        return others if totals is None else self._add(totals, others)

    def shardings_of(self, totals: Totals) -> Totals:
        """Returns this mesh's sharding for each array of sums, which may be on another mesh."""
        return jax.tree.broadcast(self._layout(totals), totals)

    def update(
        self, state: TrainState, totals: Totals, reward_std: float | None = None
    ) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step; `state` is donated, except its slow copies, which are unchanged.

        If every image is excluded, the gradient is 0, but Adam still updates: its moments decay, and the parameters
        move by the moments and the weight decay.

        Args:
          state: State of the trainer.
          totals: Sums over the update's samples.
          reward_std: Std of all rewards of the step, required if groups were closed before it was known.

        Raises:
          ValueError: `reward_std` is required, but missing.
        """
        scale = None
        if totals.unscaled is not None:
            if reward_std is None:
                raise ValueError(
                    "groups were trained before the global std was known: give reward_std"
                )
            scale = np.float32(1 / (reward_std + STD_EPS))
        updated, metrics = self._update(state._replace(copy=None, sampling=None), totals, scale)
        return updated._replace(copy=state.copy, sampling=state.sampling), metrics

    def end_step(self, state: TrainState, updates: int) -> TrainState:
        """Moves the slow copies towards the trained parameters, after all updates of a step.

        Args:
          state: Its copies are donated, unless one samples.
          updates: Number of optimizer updates so far, in all steps.
        """
        algorithm = self.algorithm
        decays = {"copy": algorithm.slow_copy, "sampling": algorithm.sampling_copy}
        moved = {
            name: self._update_copy(
                getattr(state, name), state.tuned, np.float32(decay.at(updates))
            )
            for name, decay in decays.items()
            if decay is not None
        }
        return state._replace(**moved)

    def sampling_params(self, state: TrainState, updates: int) -> Any:
        """Returns the behavior policy after `updates` updates: the trained parameters, or one of the slow copies."""
        if self.algorithm.sampling_copy is not None:
            return state.sampling
        first = self.algorithm.copy_samples_from
        return state.tuned if first is None or updates < first else state.copy

    def _policies(self, state: TrainState, base: Any, behavior: Any, start: Any) -> Policies:
        """Returns the parameters that the algorithm reads; arguments as in `accumulate`."""
        algorithm = self.algorithm
        return Policies(
            state.tuned,
            base,
            behavior if algorithm.reads_behavior else None,
            start if algorithm.reads_start else None,
            state.copy if algorithm.reads_copy else None,
            None if self.rewards is None else self.rewards.params,
        )

    def trace_accumulate(self, tuned: Any, base: Any, train_batch: TrainBatch) -> jax.stages.Traced:
        """Traces the program of `accumulate` for shapes with shardings."""
        policies = self._policies(self._state_shapes(tuned), base, tuned, None)
        return self._accumulate.trace(policies, train_batch, self._totals_shapes(tuned))

    def trace_update(self, tuned: Any) -> jax.stages.Traced:
        """Traces the program of `update` for shapes with shardings."""
        state = self._state_shapes(tuned)._replace(copy=None, sampling=None)
        return self._update.trace(state, self._totals_shapes(tuned), None)

    def _state_shapes(self, tuned: Any) -> TrainState:
        optimizer = jax.eval_shape(self._optimizer.init, tuned)
        optimizer = with_shardings(optimizer, self._shardings(tuned).optimizer)
        kept = self.settings.ema, self.algorithm.slow_copy, self.algorithm.sampling_copy
        return TrainState(tuned, optimizer, *(tuned if one else None for one in kept))

    def _totals_shapes(self, tuned: Any) -> Totals:
        totals = jax.eval_shape(self._start, tuned)
        return with_shardings(totals, self._layout(totals))

    def _shardings(self, tuned: Any) -> TrainState:
        """Returns the shardings of a state: average and moments like their parameters, counts replicated."""
        params = self.group.params(tuned)
        optimizer = optax.tree.map_params(
            self._optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self._optimizer.init, tuned),
            params,
            transform_non_params=lambda _: self.group.replicated,
        )
        return TrainState(params, optimizer, params if self.settings.ema else None)

    def _layout(self, sums: Totals | GroupSums | Term | None) -> Any:
        """Returns the shardings of sums; a gradient is split like its parameters."""
        replicated: Any = self.group.replicated
        match sums:
            case None:
                return None
            case Term(gradient, _):
                return Term(self.group.params(gradient), replicated)
            case Totals(gradient, _, unscaled):
                return Totals(self.group.params(gradient), replicated, self._layout(unscaled))
            case GroupSums(centred, plain, kl, _):
                layout = self._layout
                return GroupSums(layout(centred), layout(plain), layout(kl), replicated)

    # ------------------------------------------------------------------------------ while tracing

    def _constrain(self, sums: Any) -> Any:
        return jax.lax.with_sharding_constraint(sums, self._layout(sums))

    def _sum(
        self, gradient: Any, policies: Policies, train_batch: TrainBatch, sums: Any, piece: Any
    ) -> Any:
        """Adds gradient(objective, policies, shared, pass) of all passes to the sums.

        A pass goes through each expert of its samples once, with weight 0 for samples of the others.
        """

        def add(objective: Any, sums: Any, *inputs: Any) -> Any:
            return jax.tree.map(jnp.add, sums, gradient(objective, *inputs))

        def accumulate(sums: Any, *inputs: Any) -> Any:
            if len(self._objectives) == 1:
                return add(self._objectives[0], sums, *inputs)
            *others, micro = inputs
            experts = self.policy.family.expert(micro.samples.sigma)
            for number, objective in enumerate(self._objectives):
                weight = jnp.where(experts == number, micro.weight, 0.0)
                own = *others, micro._replace(weight=weight)
                # The branches contain the backward pass, so that no activations of the other expert are stored.
                own_sums = functools.partial(add, objective)
                sums = jax.lax.cond(
                    jnp.any(weight > 0), own_sums, lambda sums, *_: sums, sums, *own
                )
            return sums

        images = self.settings.micro_batch // self.algorithm.images_per_sample
        times = self.algorithm.times
        micros = passes(train_batch, images, self.settings.pack, self.group, times)
        layout, shared = self._layout(sums), train_batch.shared
        return sum_passes(accumulate, self.group, policies, shared, micros, sums, layout, piece)

    def _accumulate_passes(
        self, policies: Policies, train_batch: TrainBatch, totals: Totals, piece: Any = None
    ) -> Totals:
        def gradient(objective, *inputs):
            return objective.gradient(*inputs)

        return self._sum(gradient, policies, train_batch, totals, piece)

    def _accumulate_open_group(
        self, policies: Policies, train_batch: TrainBatch, shift: Any, sums: GroupSums
    ) -> GroupSums:
        def gradient(objective, *inputs):
            return objective.linear(*inputs)

        return self._sum(gradient, policies, train_batch, recenter(sums, shift), None)

    def _zero_totals(self, tuned: Any, unscaled: bool = False) -> Totals:
        totals = zero_totals(self.algorithm, tuned)
        if unscaled:
            totals = totals._replace(unscaled=Term(totals.gradient, jnp.zeros(())))
        return self._constrain(totals)

    def _updated_copy(self, copy: Any, tuned: Any, decay: Float[Array, ""]) -> Any:
        mixed = update_average(copy, tuned, decay)
        return jax.lax.with_sharding_constraint(mixed, self.group.params(mixed))

    def _apply_update(
        self, state: TrainState, totals: Totals, scale: Any
    ) -> tuple[TrainState, Metrics]:
        if totals.unscaled is not None:
            totals = totals.add_policy(totals.unscaled, scale)
        weight = jnp.maximum(totals.sums["weight"], 1)  # 0 if every sample is excluded
        gradient = jax.tree.map(lambda g: g / weight, totals.gradient)
        updates, optimizer = self._optimizer.update(gradient, state.optimizer, state.tuned)
        tuned = optax.apply_updates(state.tuned, updates)
        ema = state.ema
        if ema is not None:
            ema = update_average(ema, tuned, self.settings.average.at(updates_made(optimizer)))
        metrics = {name: total / weight for name, total in totals.sums.items() if name != "weight"}
        metrics["gradient_norm"] = optax.global_norm(gradient)
        metrics["update_norm"] = optax.global_norm(updates)
        # Otherwise the compiler may choose another layout for the new state.
        state = TrainState(tuned, optimizer, ema)
        return jax.lax.with_sharding_constraint(state, self._shardings(tuned)), metrics
