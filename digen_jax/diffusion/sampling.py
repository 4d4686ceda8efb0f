"""Samples trajectories with one scan over the steps, and replays their transitions."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Float32, Int, Key

from digen_jax.diffusion.steps import Ode, ReverseStep

# Independent streams of an image's key.
START, TRANSITION = 0, 1

Velocity = Callable[[Float32[Array, "b ..."], Float32[Array, "b"]], Float[Array, "b ..."]]


class Stage(NamedTuple):
    """Consecutive steps of a schedule with one velocity."""

    velocity: Velocity
    steps: int


class Transitions(NamedTuple):
    """Reverse steps x -> x_next that can be replayed: s steps of b images, as sampled.

    Indexing the first axis of every field gives leading axes `[b]` and a scalar sigma; `flatten` gives `[n]`
    and sigma `[n]`. `replay` takes these two forms. If images have different steps (`select_steps`), sigma
    is `[s b]`.
    """

    x: Float[Array, "s b ..."]  # in the storage dtype
    x_next: Float[Array, "s b ..."]
    log_prob: Float32[Array, "s b"]  # of the behavior policy
    sigma: Float32[Array, "s"] | Float32[Array, "s b"]
    sigma_next: Float32[Array, "s"] | Float32[Array, "s b"]
    mean: Float32[Array, "s b ..."] | None = None  # of x_next, if `sample` stores it


class Trajectory(NamedTuple):
    """Result of `sample`: the images' latents, the window's transitions, the sigmas used."""

    latents: Float[Array, "b ..."]
    transitions: Transitions
    sigmas: Float32[Array, "sigmas"]
    stored: Float[Array, "b t ..."] | None = None  # latents before the steps in `latents`, if given
    # of each transition to the initial policy, if the sampler computes it
    kl: Float32[Array, "s b"] | None = None


class Replay(NamedTuple):
    """Evaluation of a policy at given transitions: log_prob, mean and std of x_next, and velocity at x."""

    log_prob: Float32[Array, "n"]
    mean: Float32[Array, "n ..."]
    std: Float32[Array, "n"]
    velocity: Float[Array, "n ..."]


def image_keys(
    root: Key[Array, ""], serials: Int[ArrayLike, "b"], images: Int[ArrayLike, "b"]
) -> Key[Array, "b"]:
    """Returns the key of each image: the root key, folded with its group's serial and its number in the group.

    Raises:
      ValueError: `root` is not a typed threefry key; with rbg, an image would depend on its batch.
    """
    typed = jax.dtypes.issubdtype(root.dtype, jax.dtypes.prng_key)
    if not typed or str(jax.random.key_impl(root)) != "threefry2x32":
        raise ValueError("root must be a threefry key; create it by jax.random.key(seed)")
    return jax.vmap(
        lambda serial, image: jax.random.fold_in(jax.random.fold_in(root, serial), image)
    )(jnp.asarray(serials), jnp.asarray(images))


def start_noise(keys: Key[Array, "b"], shape: tuple[int, ...]) -> Float32[Array, "b ..."]:
    """Samples standard normal noise of `shape` for each image, from its start stream."""
    return jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, START), shape))(keys)


def group_keys(root: Key[Array, ""], serials: Int[ArrayLike, "b"]) -> Key[Array, "b"]:
    """Returns the key of each image's group, the key of its image 0, for start noise shared by a group.

    Transition noise still comes from each image's key. The shared noise depends only on the group's serial,
    not on the batch. DanceGRPO's `init_same_noise` (arXiv 2505.07818) samples one noise per batch of a
    process, which is one prompt in its scripts; Flow-GRPO's `same_latent` keys it by the prompt's text,
    the epoch and the batch.

    Args:
      root: Root key, as in `image_keys`.
      serials: Group serial of each image.
    """
    return image_keys(root, serials, jnp.zeros_like(jnp.asarray(serials)))


def check_window(
    step: ReverseStep, sigmas: Float[np.ndarray, "sigmas"], start: int, length: int
) -> None:
    """Raises ValueError if the steps [start, start + length) cannot be trained by their density.

    Invalid are an empty window, a window outside the schedule, a step without noise (ode), and a step with
    std 0 (the last step of cps).
    """
    steps = len(sigmas) - 1
    if length < 1:
        raise ValueError(f"the window has length {length}; train at least 1 step")
    check_step_range(start, length, steps)
    if isinstance(step, Ode):
        raise ValueError("the trained steps are ode steps; give them noise: flow, dance or cps")
    nothing, sigma = jnp.zeros(steps), jnp.asarray(sigmas, jnp.float32)
    _, std = step.mean_std(nothing, nothing, sigma[:-1], sigma[1:], sigma[1])
    silent = np.flatnonzero(np.asarray(std)[start : start + length] == 0)
    if silent.size:
        raise ValueError(
            f"step {start + silent[0]} of the window [{start}, {start + length}) has no noise "
            f"({type(step).__name__} from sigma {sigmas[start + silent[0]]:.4g} to "
            f"{sigmas[start + silent[0] + 1]:.4g}); end the window before it"
        )


def sample(
    velocity: Velocity | Sequence[Stage],
    x_start: Float[Array, "b ..."],
    sigmas: Float[ArrayLike, "sigmas"],
    step: ReverseStep,
    keys: Key[Array, "b"],
    window: tuple[int | Int[Array, ""], int],
    store_dtype: DTypeLike = jnp.float32,
    store_means: bool = False,
    latents: range = range(0),
) -> Trajectory:
    """Samples from noise at sigmas[0] to data at sigmas[-1], in one `lax.scan` for each stage.

    Steps in the window follow `step` and are stored. Other steps are ODE steps: those of `step` if it is
    an ODE solver, else Euler steps. An image depends only on its key and the start noise, not on its
    batch.

    Args:
      velocity: `(x [b ...], sigma [b]) -> [b ...]`; the network with its parameters, conditioning
        and guidance. Or the stages of all steps, if they have several velocities.
      x_start: Start noise at sigmas[0].
      sigmas: Decreasing schedule of n steps.
      step: Kind of the steps in the window.
      keys: One typed key per image (`image_keys`); step i samples its noise from the key folded with i.
      window: (first step, may be traced; number of steps, static). Length 0 stores nothing.
      store_dtype: Dtype that x is rounded to after every step, before its log_prob is computed. Sampling
        continues from the rounded value, so that replay reads the sampled values.
      store_means: Whether to also store the mean of x_next in float32 (for GRPO-Guard and Flow-DPPO), which
        needs at least the memory of x.
      latents: Consecutive steps before which the latents are also returned; n, the number of steps, is for
        the final ones.

    Raises:
      ValueError: the window is outside the schedule or has steps without noise.
    """
    start, length = window
    sigmas = jnp.asarray(sigmas, jnp.float32)
    steps = len(sigmas) - 1
    check_step_range(start, length, steps)
    noise_keys = jax.vmap(lambda key: jax.random.fold_in(key, TRANSITION))(keys)
    solver = step if isinstance(step, Ode) else Ode()
    stages = [Stage(velocity, steps)] if callable(velocity) else velocity

    def body(velocity, carry, i):
        x, memory, stored = carry
        v = velocity(x.astype(jnp.float32), jnp.full(x.shape[:1], sigmas[i]))
        x_next, memory = solver.advance(x, v, sigmas, i, memory)
        x_next = _round(x_next, store_dtype)
        if length:
            inside = (i >= start) & (i < start + length)
            new = _noisy_step(step, x, v, sigmas, i, noise_keys)
            new = new if store_means else new._replace(mean=None)
            stored = _store(stored, new, jnp.clip(i - start, 0, length - 1), inside)
            x_next = jnp.where(inside, new.x_next, x_next)
        return (x_next, memory, stored), x if latents else None

    x = _round(x_start, store_dtype)
    carry, first, before = (x, solver.init_last(x), _empty(x, length, store_means)), 0, []
    for one, count in stages:
        taken = jnp.arange(first, first + count)
        carry, each = jax.lax.scan(functools.partial(body, one), carry, taken)
        before.append(each)
        first += count
    x, _, stored = carry
    if not latents:
        return Trajectory(x, stored, sigmas)
    all_latents = jnp.concatenate([*before, x[None]])
    return Trajectory(
        x, stored, sigmas, jnp.moveaxis(all_latents[latents.start : latents.stop], 0, 1)
    )


def replay(
    velocity: Velocity, transitions: Transitions, step: ReverseStep, sigma_max: Float[ArrayLike, ""]
) -> Replay:
    """Computes log-probability, mean and std of transitions under `velocity`, by the functions of `sample`.

    Args:
      velocity: Velocity of the policy, as in `sample`.
      transitions: One leading axis `[n]` (see `flatten`), sigma `[n]` or a scalar. Their sigmas are used, so
        the samples may be at different steps.
      step: Kind of step that sampled them.
      sigma_max: `trajectory.sigmas[1]`.

    Raises:
      ValueError: the transitions have two leading axes.
    """
    if transitions.log_prob.ndim != 1:
        raise ValueError(
            f"transitions have leading axes {transitions.log_prob.shape}; flatten them first"
        )
    batch = transitions.log_prob.shape
    x = transitions.x.astype(jnp.float32)
    sigma, sigma_next = (
        jnp.broadcast_to(s, batch) for s in (transitions.sigma, transitions.sigma_next)
    )
    v = velocity(x, sigma)
    mean, std = step.mean_std(x, v, sigma, sigma_next, sigma_max)
    return Replay(step.log_prob(transitions.x_next, mean, std), mean, std, v)


def per_image(transitions: Transitions) -> Transitions:
    """Broadcasts sigma to one per image, `[s b]`."""
    if transitions.sigma.ndim == 2:
        return transitions

    def of_images(sigma: Float32[Array, "s"]) -> Float32[Array, "s b"]:
        return jnp.broadcast_to(sigma[:, None], transitions.log_prob.shape)

    sigma, sigma_next = map(of_images, (transitions.sigma, transitions.sigma_next))
    return transitions._replace(sigma=sigma, sigma_next=sigma_next)


def select_steps(transitions: Transitions, steps: Int[Array, "k b"]) -> Transitions:
    """Selects k steps of each of b images: `[s b ...]` becomes `[k b ...]`, sigma `[k b]`."""

    def of_image(image: Transitions, own: Int[Array, "k"]) -> Transitions:
        return jax.tree.map(lambda a: a[own], image)

    return jax.vmap(of_image, in_axes=1, out_axes=1)(per_image(transitions), steps)


def flatten(transitions: Transitions) -> Transitions:
    """Merges the leading axes `[s b]` into `[s*b]`, with one sigma per transition."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), per_image(transitions))


def check_step_range(start: int | Array, length: int, steps: int) -> None:
    """Raises ValueError if the steps [start, start + length) are not within the schedule.

    If the start is traced, only the length is checked.
    """
    known = isinstance(start, int)
    if not 0 <= length <= steps or (known and not 0 <= start <= steps - length):
        raise ValueError(
            f"the window starts at {start} and has length {length}, "
            f"outside the schedule's {steps} steps"
        )


def _noisy_step(step, x, v, sigmas, i, noise_keys) -> Transitions:
    sigma, sigma_next = sigmas[i], sigmas[i + 1]
    mean, std = step.mean_std(x, v, sigma, sigma_next, sigmas[1])
    noise = jax.vmap(lambda key: jax.random.normal(jax.random.fold_in(key, i), x.shape[1:]))(
        noise_keys
    )
    x_next = _round(mean + std * noise, x.dtype)
    return Transitions(x, x_next, step.log_prob(x_next, mean, std), sigma, sigma_next, mean)


def _round(x: Array, dtype: DTypeLike) -> Array:
    """Casts such that the compiler cannot remove the rounding, as it could if a value is cast down and up again."""
    kind = jnp.finfo(dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant).astype(dtype)


def _empty(x: Array, length: int, means: bool) -> Transitions:
    images = jnp.zeros((length, *x.shape), x.dtype)
    mean = images.astype(jnp.float32) if means else None
    per_step = jnp.zeros(length)
    return Transitions(images, images, jnp.zeros((length, x.shape[0])), per_step, per_step, mean)


def _store(stored: Transitions, new: Transitions, slot: Array, inside: Array) -> Transitions:
    """Writes `new` into its slot if the step is inside the window."""

    def write(buffer, value):
        old = jax.lax.dynamic_index_in_dim(buffer, slot, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(inside, value, old), slot, 0)

    return jax.tree.map(write, stored, new)
