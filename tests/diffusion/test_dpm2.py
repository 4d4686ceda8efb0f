"""DPM-Solver++(2M) against diffusers' scheduler, a float64 transcription, and an ODE with a known end."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from digen_jax.diffusion.sampling import image_keys, sample, start_noise
from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas
from digen_jax.diffusion.steps import Dpm2

SHAPE = (4, 5, 2)
STEPS = [1, 2, 3, 10, 15, 40]
KEYS = image_keys(jax.random.key(0), np.arange(3), np.zeros(3, int))
START = np.asarray(start_noise(KEYS, SHAPE))
A, B = np.random.default_rng(0).normal(size=(2, 2, 2))


def velocity(x, sigma, xp=jnp):
    """Neither linear nor smooth at the scale of a coarse schedule."""
    s = sigma[:, None, None, None]
    mixed = xp.tanh(x @ xp.asarray(A, x.dtype)) * (1 + s)
    return mixed + xp.sin(9 * s + x @ xp.asarray(B, x.dtype))


def scheduler_of(steps, sigmas=None):
    scheduler = DPMSolverMultistepScheduler(
        use_flow_sigmas=True,
        flow_shift=3.0,
        prediction_type="flow_prediction",
        algorithm_type="dpmsolver++",
        solver_order=2,
    )
    scheduler.set_timesteps(steps)
    if sigmas is not None:
        scheduler.sigmas = torch.from_numpy(sigmas)
    scheduler.set_begin_index(0)
    return scheduler


def diffusers_end(scheduler):
    """The final x."""
    x = torch.from_numpy(START.copy())
    for i, t in enumerate(scheduler.timesteps):
        sigma = np.full(len(START), float(scheduler.sigmas[i]), np.float32)
        v = velocity(x.numpy(), sigma, np).astype(np.float32)
        x = scheduler.step(torch.from_numpy(v), t, x, return_dict=False)[0]
    return x.numpy()


def transcription(sigmas):
    """The final x in float64, by DPM-Solver++'s algorithm 2 with D and r as the paper has them."""
    x, steps = START.astype(np.float64), len(sigmas) - 1
    alpha, sigma = 1 - np.asarray(sigmas, np.float64), np.asarray(sigmas, np.float64)
    data = []
    for i in range(steps):
        data.append(x - sigma[i] * velocity(x, np.full(len(x), sigma[i]), np))
        lam = [log_snr(s) for s in sigma[max(i - 1, 0) : i + 2]]
        h = lam[-1] - lam[-2]
        d = data[i]
        if 0 < i < steps - 1 and not math.isinf(lam[0]):
            r = (lam[1] - lam[0]) / h
            d = (1 + 1 / (2 * r)) * data[i] - 1 / (2 * r) * data[i - 1]
        x = sigma[i + 1] / sigma[i] * x - alpha[i + 1] * (math.exp(-h) - 1) * d
    return x


def log_snr(sigma):
    if sigma in (0, 1):
        return math.inf if sigma == 0 else -math.inf
    return math.log((1 - sigma) / sigma)


def assert_close(ours, reference, tolerance=1e-5):
    ours, reference = np.asarray(ours, np.float64), np.asarray(reference, np.float64)
    assert np.abs(ours - reference).max() <= tolerance * np.abs(reference).max()


@jax.jit
def advance(x, v, sigmas, i, last):
    return Dpm2().advance(x, v, sigmas, i, last)


@jax.jit
def run(x, sigmas):
    return sample(velocity, x, sigmas, Dpm2(), KEYS, (0, 0))


def schedules(steps):
    """diffusers' own flow sigmas, from 0.9997, and those that DiffusionNFT samples on, from 1."""
    return [scheduler_of(steps).sigmas.numpy(), make_sigmas(SchedulerConfig(shift=3.0), steps)]


@pytest.mark.parametrize("steps", STEPS)
def test_a_trajectory_equals_diffusers_and_the_transcription(steps):
    for sigmas in schedules(steps):
        trajectory = run(START, sigmas)
        assert_close(trajectory.latents, diffusers_end(scheduler_of(steps, sigmas)))
        assert_close(trajectory.latents, transcription(sigmas))
        assert trajectory.transitions.x.shape == (0, *START.shape)
        np.testing.assert_array_equal(trajectory.sigmas, sigmas)


def test_x_is_rounded_to_what_is_stored_but_the_last_x0_is_not():
    sigmas = make_sigmas(SchedulerConfig(shift=3.0), 4)
    x = jnp.asarray(START, jnp.bfloat16)
    stored = sample(velocity, x, sigmas, Dpm2(), KEYS, (0, 0), jnp.bfloat16).latents
    last = Dpm2().init_last(x)
    assert last.dtype == jnp.float32
    for i in range(4):
        v = velocity(x.astype(jnp.float32), jnp.full(3, sigmas[i]))
        x, last = advance(x, v, sigmas, i, last)
        assert x.dtype == last.dtype == jnp.float32
        x = x.astype(jnp.bfloat16)
    assert stored.dtype == jnp.bfloat16
    assert_close(stored, x, 0.01)
