"""Device memory for the planner: sizes of a config's model, and temporary memory of its programs."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from digen_jax.assemble import outline, parameter_shapes, pipeline_of
from digen_jax.config.train_config import TrainConfig
from digen_jax.learned_rewards.on_mesh import read
from digen_jax.models.family import Params, Record, Size
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.mesh import ShardingRules, axis_sizes, make_mesh
from digen_jax.parallel.placement import DeviceGroup, MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.system import System, shapes_in_dtype
from digen_jax.planning.programs import (
    Traced,
    sampler_weights,
    step_records,
    trace_encode_block,
    trace_generate,
    trace_gradient,
    trained_samples,
)
from digen_jax.policies import make_policy
from digen_jax.rewards.built_in import on_mesh
from digen_jax.scheduling.layouts import Footprint, OnDevice, Programs


def model_footprint(config: TrainConfig) -> Footprint:
    """Returns the sizes of a config's model, from shapes only: nothing is read or allocated.

    Temporary memory of programs is not included: see `compiled_temporaries`.

    Raises:
      ConfigError: The model's folder cannot be used.
    """
    (_, family), algorithm = pipeline_of(config), config.algorithm
    policy = make_policy(config, family)
    tuned, base, frozen, encode = parameter_shapes(config, family)
    sent = tuned, jax.eval_shape(policy.sampler_base, base)
    if config.precision.rollout:
        sent = shapes_in_dtype(sent, config.precision.rollout)
    placement = config.placement
    layout = ShardingRules.of(placement.rules, family.axes())
    one_device = DeviceGroup(make_mesh(jax.devices()[:1]), layout)
    scorers = read(on_mesh(config.rewards), one_device, weights=False)
    # Numbered, because a reward may occur twice with different files.
    networks = {f"{one.name}/{number}": one.params for number, one in enumerate(scorers)}

    def sizes(tree: Params) -> OnDevice:
        return functools.cache(
            lambda fsdp, tensor: layout.bytes(tree, axis_sizes(fsdp=fsdp, tensor=tensor))
        )

    return Footprint(
        tuned=sizes(tuned),
        synced=sizes(sent[0]),
        base=sizes(base),
        sampler_base=sizes(sent[1]),
        frozen=sizes(frozen),
        copies=(config.trainer.ema > 0) + (algorithm.slow_copy is not None),
        trajectory=stored_bytes(config, family.latent_shape(config.model.size)),
        conditioning=_encoded_bytes(policy, step_records(config, family), frozen | encode),
        trainer_fsdp=placement.trainer.fsdp,
        worker_fsdp=placement.rollout.fsdp,
        encode=sizes(encode) if encode else None,
        rewards=sizes(networks) if networks else None,
    )


def stored_bytes(config: TrainConfig, latent: tuple[int, ...]) -> int:
    """Returns the bytes stored per image until it is trained."""
    size = math.prod(latent)
    if config.algorithm.objective == "matching":
        return 4 * (size + 2)  # the image and its key
    images = 2 * size * jnp.dtype(config.precision.trajectory).itemsize  # x, x_next
    mean = 4 * size if config.algorithm.stores_means else 0
    return config.noisy_steps * (images + mean + 4)  # log_prob


def _encoded_bytes(policy: Policy, records: Sequence[Record], frozen: Params) -> int:
    """Returns the bytes of the conditioning of a step's prompts, which is replicated on every device."""
    family = policy.family
    tokens = [family.tokenize(records)]
    if policy.reads_null:
        tokens.append(family.tokenize_null(records))
    return sum(_bytes(jax.eval_shape(family.encode, frozen, each)) for each in tokens)


def _bytes(shapes: Params) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def temporary_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns bytes per device of temporaries and results, without results in an argument's memory."""
    found: Any = compiled.memory_analysis()
    return found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes


def compiled_temporaries(config: TrainConfig, note: Callable[[str], None]) -> Programs:
    """Returns the temporary memory of a config's programs, each compiled for the share of one device.

    The gradient is compiled on tensor x sequence devices, because these share their images. Sampling is compiled on
    fsdp x tensor x sequence devices, because copies of weights are smaller where weights are sharded.

    Each share is compiled when the planner reads it. It is not extrapolated from two others, because the compiler's
    choices change with the size, and the bytes are not linear in it. Nothing is allocated.

    Args:
      config: Config; of its placement only the rules and the axes tensor and sequence are read.
      note: Called with each program's name before it is compiled, which may take minutes.
    """
    shares, cached = _Shares(config, note), cast(Callable[..., Any], functools.cache)
    update, encode, generate, evaluate, decode, score, gradient = map(
        cached,
        (shares.update, shares.encode, shares.generate, shares.evaluate, shares.decode, shares.score,
         shares.gradient),
    )  # fmt: skip

    def sampling(parts: int, fsdp: int, tensor: int, sequence: int) -> dict[str, float]:
        axes = shares.available_axes(fsdp, tensor, sequence)
        chunk = -(-config.sampler.chunk // parts)
        evaluated = -(-config.evaluation.batch // parts)
        images = {config.model.size: chunk}
        images[config.evaluation_size] = max(evaluated, images.get(config.evaluation_size, 0))
        found = {
            "encoding": encode(-(-config.max_groups // parts), *axes),
            "generating": generate(chunk, *axes),
            "evaluating": evaluate(evaluated, *axes),
            "decoding": max(decode(count, size, *axes) for size, count in images.items()),
        }
        if on_mesh(config.rewards):
            found["scoring"] = max(score(count, size, *axes) for size, count in images.items())
        return found

    return Programs(gradient, lambda tuned: update() * tuned, sampling)


class _Shares:
    """Compiles each program for the share of one device; methods return bytes of temporaries."""

    def __init__(self, config: TrainConfig, note: Callable[[str], None]):
        self.config, self.note = config, note
        self.system = functools.cache(
            lambda fsdp, tensor, sequence: self._share(fsdp=fsdp, tensor=tensor, sequence=sequence)
        )
        self.available_axes = functools.cache(self._available_axes)

    def _available_axes(self, fsdp: int, tensor: int, sequence: int) -> tuple[int, int, int]:
        """Returns the axes fsdp, tensor and sequence, each 1 if this machine has too few devices for it."""
        wanted = {"tensor": tensor, "sequence": sequence, "fsdp": fsdp}
        devices = left = len(jax.devices())
        found = {}
        for axis, size in wanted.items():
            found[axis] = size if size <= left else 1
            left //= found[axis]
            if found[axis] < size:
                self.note(
                    f"memory: the temporaries of programs count as not split over the axis {axis} = {size}, "
                    f"because there are {devices} devices to compile for"
                )
        return found["fsdp"], found["tensor"], found["sequence"]

    def _share(
        self, data: int = 1, time: int = 1, fsdp: int = 1, tensor: int = 1, sequence: int = 1
    ) -> System:
        """Returns the system on fsdp x tensor x sequence devices, with their share of a pass on such a mesh."""
        trainer, images = self.config.trainer, self.config.algorithm.images_per_sample
        share = dataclasses.replace(
            trainer,
            micro_batch=images * -(-trainer.micro_batch // (images * data)),
            pack=-(-trainer.pack // time),
        )
        axes = TrainerAxes(data=1, fsdp=fsdp, tensor=tensor, sequence=sequence)
        config = self.config.with_meshes(MeshSizes(RolloutAxes(data=0), axes))
        return outline(dataclasses.replace(config, trainer=share), jax.devices()[: axes.devices])

    def gradient(self, data: int, time: int) -> float:
        """Returns the bytes of a pass over the share of one of `data` x `time` devices."""
        axes = self.config.placement.trainer
        _, tensor, sequence = self.available_axes(1, axes.tensor, axes.sequence)
        system = self._share(data, time, tensor=tensor, sequence=sequence)
        settings = system.trainer.settings
        each = settings.micro_batch // self.config.algorithm.images_per_sample
        samples = each * -(-trained_samples(self.config) // (each * data))
        name = f"the gradient of {settings.pack} x {settings.micro_batch} samples"
        return self._compile(name, trace_gradient(system, self.config, samples))

    def update(self) -> float:
        """Returns the bytes of an update, relative to the trained parameters."""
        system = self.system(1, 1, 1)
        traced = system.trainer.trace_update(system.start)
        return self._compile("an update", traced) / _bytes(system.start)

    def encode(self, prompts: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Returns the bytes of `prompts` per device, including the results of all prompts of a step.

        If prompts are encoded before the run, returns the bytes of a block of prompts.
        """
        system, count = self.system(fsdp, tensor, sequence), prompts * fsdp
        if system.sampler.stored is not None:
            return self._compile("encoding a block of prompts", trace_encode_block(system))
        records = [example_record(system.policy.family)] * count
        traced = system.sampler.trace_encode(sampler_weights(system), records)
        others = _bytes(traced.out_info) / count * (self.config.max_groups - count)
        return self._compile(f"encoding {prompts} prompts", traced) + others

    def generate(self, images: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Returns the bytes of `images` per device, without trajectories, which the planner counts separately."""
        system = self.system(fsdp, tensor, sequence)
        kept = images * stored_bytes(self.config, system.sampler.shape)
        traced = trace_generate(system, system.sampler, self.config, images * fsdp)
        return max(0, self._compile(f"generating {images} images", traced) - kept)

    def evaluate(self, images: int, fsdp: int, tensor: int, sequence: int) -> float:
        """Returns the bytes of the evaluation sampler for `images` per device."""
        system = self.system(fsdp, tensor, sequence)
        traced = trace_generate(system, system.evaluator, self.config, images * fsdp)
        return self._compile(f"evaluating {images} images", traced)

    def decode(self, images: int, size: Size, fsdp: int, tensor: int, sequence: int) -> float:
        """Returns the bytes of `images` per device, including the decoded images."""
        system = self.system(fsdp, tensor, sequence)
        sampler = system.sampler if size == self.config.model.size else system.evaluator
        traced = sampler.trace_decode(sampler_weights(system), images * fsdp)
        return self._compile(f"decoding {images} images", traced)

    def score(self, images: int, size: Size, fsdp: int, tensor: int, sequence: int) -> float:
        """Returns the bytes of the reward on the mesh that needs the most, for `images` per device."""
        return max(
            self._compile(
                f"scoring {images} images by {one.name}",
                one.trace(images * fsdp, size),
            )
            for one in self.system(fsdp, tensor, sequence).rollouts[0].scorers
        )

    def _compile(self, name: str, traced: Traced) -> int:
        self.note(f"memory of {name}: compiling")
        return temporary_bytes(traced.lower().compile())
