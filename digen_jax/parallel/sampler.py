"""Sampler programs (prompts -> conditioning -> trajectories -> images) and the random numbers of a step's images.

Random numbers depend only on the step number and the groups' serials. They are therefore the same on any mesh, for any
weights version, and in a resumed run.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Key, UInt8

from digen_jax.algorithms.losses import gaussian_kl
from digen_jax.diffusion.sampling import (
    Stage,
    Trajectory,
    Transitions,
    Velocity,
    check_step_range,
    group_keys,
    image_keys,
    replay,
    sample,
    select_steps,
    start_noise,
)
from digen_jax.diffusion.schedule import Window, random_timesteps
from digen_jax.diffusion.steps import ReverseStep
from digen_jax.images import share
from digen_jax.models.family import Family, Params, Record, Size
from digen_jax.parallel.encoding import PrecomputedPrompts, jit_encoder
from digen_jax.parallel.mesh import fetch, put, tracing_on, with_shardings
from digen_jax.parallel.placement import DeviceGroup, chunked_map
from digen_jax.parallel.policy import EncodedPrompts, Policy, jit_as_written

# Seed of evaluations, independent of the run's, so that they are comparable across runs.
SEED = 2**20
SHARED = 2**25  # minimum bytes of a chunk's clips in shared memory


class SampleDraws(NamedTuple):
    """Random inputs of some images: the last arguments of `Sampler.generate`.

    Attributes:
      keys: Noise key of each image.
      start_keys: Start noise key of each image. None means `keys`.
      start: First step of the window.
      trained: Steps of the window that each image trains. None means all.
    """

    keys: Key[Array, "n"]
    start_keys: Key[Array, "n"] | None
    start: int
    trained: Int[np.ndarray, "k n"] | None

    def subset(self, part: slice) -> "SampleDraws":
        """Returns the random inputs of a slice of the images."""
        start_keys = None if self.start_keys is None else self.start_keys[part]
        trained = None if self.trained is None else self.trained[:, part]
        return SampleDraws(self.keys[part], start_keys, self.start, trained)


@dataclasses.dataclass(frozen=True)
class SampleRng:
    """Generates the random inputs of a run's images. An image may train a random share of the window's steps."""

    seed: int
    window: Window | None  # None means that no step has noise
    shared_noise: bool = False  # all images of a group start from the same noise (`group_keys`)

    def draw(
        self, step: int, serials: Int[np.ndarray, "n"], images: Int[np.ndarray, "n"]
    ) -> SampleDraws:
        """Returns the random inputs of images of a step, given their groups' serials and their indices in the group."""
        root, trained = jax.random.key(self.seed), None
        start_keys = group_keys(root, serials) if self.shared_noise else None
        window = self.window
        if window and window.timestep_fraction < 1:
            seeds = ((self.seed, int(s), int(i)) for s, i in zip(serials, images, strict=True))
            drawn = [
                random_timesteps(seed, window.length, window.timestep_fraction) for seed in seeds
            ]
            trained = np.stack(drawn, axis=1).astype(np.int32)
        start = window.start(step, self.seed) if window else 0
        return SampleDraws(image_keys(root, serials, images), start_keys, start, trained)


@dataclasses.dataclass(frozen=True)
class SamplerSettings:
    """Sampling settings. `length` consecutive steps are of kind `step` and stored; other steps have no noise."""

    size: Size
    steps: int
    step: ReverseStep
    length: int = 0
    store_means: bool = False  # also store the means of the window's steps
    store_dtype: str = "float32"  # images are rounded to it after every step
    latents: range = range(0)  # which latents of the trajectory are stored


class Weights(NamedTuple):
    """All weights of the sampler: tuned parameters, the policy's base, and frozen components."""

    tuned: Any
    base: Any
    frozen: Any


class Decoded(NamedTuple):
    """Decoded clips as bytes, and which of them have a NaN."""

    clips: UInt8[Array, "b t h w 3"]
    has_nan: Bool[Array, "b"]


class Sampler:
    """Jitted encoding, generation and decoding on one mesh.

    A program is compiled once per number of prompts and of images, for any start of the window. An image
    depends only on its keys and prompt, not on its batch.

    Args:
      policy: Policy that samples.
      group: The mesh.
      settings: Sampling settings.
      stored: Precomputed prompts. None means that the weights include the text encoders.
    """

    def __init__(
        self,
        policy: Policy,
        group: DeviceGroup,
        settings: SamplerSettings,
        stored: PrecomputedPrompts | None = None,
    ):
        family = policy.family.scheduled(settings.steps, settings.size)
        policy = dataclasses.replace(policy, family=family)
        self.policy, self.group, self.settings, self.stored = policy, group, settings, stored
        self.shape = family.latent_shape(settings.size)
        self.sigmas = family.sigmas(settings.steps, settings.size)
        self._steps = steps_of_experts(family, self.sigmas)
        self._encode = jit_encoder(family, group)
        self._generate = jit_as_written(self._sample)
        self._decode = jax.jit(self._decode_clips)

    def encode(self, weights: Weights, records: Sequence[Record]) -> EncodedPrompts:
        """Returns the conditioning of each record."""
        if self.stored is None:
            return self._run_encoders(weights.frozen, records)
        null = self.stored.null(records) if self.policy.reads_null else None
        prompts = EncodedPrompts(self.stored.conditioning(records), null)
        return jax.tree.map(lambda array: put(array, self.group.replicated), prompts)

    def _run_encoders(self, components: Params, records: Sequence[Record]) -> EncodedPrompts:
        family, null = self.policy.family, None
        conditioning = self._encode(components, family.tokenize(records))
        if self.policy.reads_null:
            null = self._encode(components, family.tokenize_null(records))
        return EncodedPrompts(conditioning, null)

    def generate(
        self,
        weights: Weights,
        prompts: EncodedPrompts,
        rows: Int[np.ndarray, "b"],
        keys: Key[Array, "b"],
        start_keys: Key[Array, "b"] | None = None,
        start: int = 0,
        trained: Int[np.ndarray, "k b"] | None = None,
    ) -> Trajectory:
        """Samples one chunk: image i has prompt `rows[i]` and noise key `keys[i]`.

        Returns immediately; the arrays are computed asynchronously. The number of images must be a multiple of
        the number of devices.

        Args:
          weights: All weights.
          prompts: Encoded prompts.
          rows: Prompt index of each image.
          keys: Noise key of each image.
          start_keys: Start noise key of each image. None means `keys`.
          start: First stored step.
          trained: Stored steps to return for each image (`select_steps`). None means all.

        Raises:
          ValueError: a step is outside the schedule.
        """
        check_step_range(start, self.settings.length, self.settings.steps)
        batch = self.group.batch
        keys = put(keys, batch)
        return self._generate(
            weights,
            prompts,
            put(rows, batch),
            keys,
            keys if start_keys is None else put(start_keys, batch),
            np.int32(start),
            None if trained is None else put(trained, self.group.batch_of_steps),
        )

    def decode(self, weights: Weights, trajectory: Trajectory) -> Decoded:
        """Decodes the final latents of a trajectory into clips; returns immediately, like `generate`.

        They are converted as by `images.to_uint8`: bytes take a quarter of the memory and of the transfer to the host.
        """
        return self._decode(weights.frozen, trajectory.latents.astype(jnp.float32))

    # In the following methods `weights` are shapes with shardings; nothing is allocated.

    def trace_encode(
        self, weights: Weights, records: Sequence[Record], null: bool = False
    ) -> jax.stages.Traced:
        """Traces the text encoders' program, even if prompts are precomputed, or that of the null conditioning."""
        family = self.policy.family
        tokens = family.tokenize_null(records) if null else family.tokenize(records)
        return self._encode.trace(self._encoders(weights), tokens)

    def trace_generate(
        self, weights: Weights, records: Sequence[Record], images: int, trained: int = 0
    ) -> jax.stages.Traced:
        """Traces `generate` for a number of images. `trained` is the number of returned steps per image, 0: all."""
        batch, steps = self.group.batch, self.group.batch_of_steps
        rows = jax.ShapeDtypeStruct((images,), np.int32, sharding=batch)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), images))
        keys = keys.update(sharding=batch)
        own = jax.ShapeDtypeStruct((trained, images), np.int32, sharding=steps) if trained else None
        prompts = self.encoded(weights, records)
        return self._generate.trace(weights, prompts, rows, keys, keys, np.int32(0), own)

    def trace_decode(self, weights: Weights, images: int) -> jax.stages.Traced:
        """Traces `decode` for a number of images."""
        latents = jax.ShapeDtypeStruct((images, *self.shape), np.float32, sharding=self.group.batch)
        return self._decode.trace(weights.frozen, latents)

    def encoded(self, weights: Weights, records: Sequence[Record]) -> EncodedPrompts:
        """Returns the shapes of the result of `encode`."""
        encoders = self._encoders(weights)
        prompts = jax.eval_shape(lambda encoders: self._run_encoders(encoders, records), encoders)
        return with_shardings(prompts, self.group.replicated)

    def _encoders(self, weights: Weights) -> Params:
        """Returns the shapes of the text encoders."""
        if self.stored is None:
            return weights.frozen
        return with_shardings(self.stored.encoders, self.group.params(self.stored.encoders))

    # While tracing:

    def _sample(
        self,
        weights: Weights,
        prompts: EncodedPrompts,
        rows: Int[Array, "b"],
        keys: Key[Array, "b"],
        start_keys: Key[Array, "b"],
        start: Int[Array, ""],
        trained: Int[Array, "k b"] | None,
    ) -> Trajectory:
        """See `generate`."""
        group, settings = self.group, self.settings
        split = functools.partial(jax.lax.with_sharding_constraint, shardings=group.batch)
        conditioning, null = prompts.at(rows)
        conditioning = jax.tree.map(split, conditioning)
        stages = [
            Stage(expert.velocity(weights.tuned, weights.base, conditioning, null), count)
            for expert, count in zip(self.policy.experts, self._steps, strict=True)
            if count
        ]
        noise, window = split(start_noise(start_keys, self.shape)), (start, settings.length)
        with_kl = self.policy.samples_reference and settings.length > 0
        means = settings.store_means or with_kl
        stored = settings.store_dtype, means, settings.latents
        with tracing_on(group.batch, group.attention):
            trajectory = sample(stages, noise, self.sigmas, settings.step, keys, window, *stored)
            if with_kl:
                references = [
                    expert.reference(weights.base, conditioning, null)
                    for expert in self.policy.experts
                ]
                kl = self._kl(references, trajectory.transitions)
                trajectory = trajectory._replace(kl=kl)
        if not settings.store_means:
            transitions = trajectory.transitions._replace(mean=None)
            trajectory = trajectory._replace(transitions=transitions)
        latents = self.policy.family.complete(trajectory.latents, conditioning)
        trajectory = trajectory._replace(latents=latents)
        if trained is None:
            return trajectory
        # Select on this mesh, so that untrained transitions are neither stored nor sent to the trainer.
        return trajectory._replace(transitions=select_steps(trajectory.transitions, trained))

    def _kl(
        self, references: Sequence[Velocity], transitions: Transitions
    ) -> Float32[Array, "s b"]:
        """Returns the KL of each transition to the reference, whose velocity `references` has for each expert."""
        step, family = self.settings.step, self.policy.family

        def of_expert(reference: Velocity, one: Transitions) -> Float32[Array, "b"]:
            found = replay(reference, one, step, self.sigmas[1])
            return gaussian_kl(cast(Array, one.mean), found.mean, found.std)

        branches = [functools.partial(of_expert, reference) for reference in references]

        def of_step(one: Transitions) -> Float32[Array, "b"]:
            return jax.lax.switch(family.expert(one.sigma[None])[0], branches, one)

        return jax.lax.map(of_step, transitions)

    def _decode_clips(self, frozen: Any, latents: Float[Array, "b *latent"]) -> Decoded:
        """Decodes clips in chunks of a size that bounds memory; devices of `sequence` decode parts of each frame."""
        family, size, group = self.policy.family, self.settings.size, self.group

        def decode(latents: Float[Array, "n *latent"]) -> Decoded:
            if size.frames > 1:
                latents = jax.lax.with_sharding_constraint(latents, group.clips(latents.shape))
            clips = family.decode(frozen, latents)
            has_nan = jnp.isnan(clips).any(axis=(1, 2, 3, 4))
            return Decoded(jnp.round(jnp.clip(clips, 0, 1) * 255).astype(jnp.uint8), has_nan)

        rows = max(1, family.decoded_pixels // math.prod(size))
        return chunked_map(decode, latents, rows, group)


def steps_of_experts(family: Family, sigmas: Float32[np.ndarray, "sigmas"]) -> tuple[int, ...]:
    """Returns the number of a schedule's steps of each expert, which take consecutive ones."""
    if len(family.trained) == 1:
        return (len(sigmas) - 1,)
    experts = np.asarray(family.expert(jnp.asarray(sigmas[:-1])))
    return tuple(int((experts == number).sum()) for number in range(len(family.trained)))


def sample_fixed(
    sampler: Sampler,
    weights: Weights,
    records: Sequence[Mapping[str, Any]],
    first: int,
    batch: int,
    seed: int = SEED,
    of_each: int = 1,
) -> Trajectory:
    """Samples clips first, first + 1, ... of a seed, one per record, asynchronously and padded to `batch`.

    Used by evaluations. `of_each` is the number of consecutive repeats of each record.
    """
    padded = [*records, *[records[-1]] * (batch - len(records))]
    numbers = np.arange(first, first + batch, dtype=np.int32)
    keys = image_keys(jax.random.key(seed), numbers // of_each, numbers % of_each)
    rows = np.arange(batch, dtype=np.int32)
    return sampler.generate(weights, sampler.encode(weights, padded), rows, keys)


def fetch_clips(decoded: Decoded) -> UInt8[np.ndarray, "b t h w 3"] | None:
    """Returns decoded clips on the host, or None if one has a NaN. All processes of the mesh must call it.

    Chunks of `SHARED` bytes or more are in shared memory. Smaller ones are shared only while they are scored, because
    each needs two open files, and many may wait.
    """
    if fetch(decoded.has_nan).any():
        return None
    clips = fetch(decoded.clips)
    return share(clips) if clips.nbytes >= SHARED else clips
