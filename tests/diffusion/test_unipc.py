"""UniPC's schedule and steps against diffusers' scheduler, a float64 transcription, and limits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import UniPCMultistepScheduler

from digen_jax.diffusion.sampling import sample
from digen_jax.diffusion.schedule import (
    SchedulerConfig,
    UniPcConfig,
    make_sigmas,
    make_unipc_schedule,
)
from digen_jax.diffusion.steps import (
    CappedFlowSde,
    Dpm2,
    FlowSde,
    Ode,
    UniPc,
    _log_snr,
    make_step,
)
from tests.diffusion.test_dpm2 import KEYS, START, assert_close, velocity
from tests.diffusion.test_steps import NAMES
from tests.diffusion.test_steps import transcription as one_step

SHIFTS = 1, 3, 5, 7, 8, 12, 16
# Wan-AI/Wan2.1-T2V-1.3B-Diffusers, scheduler/scheduler_config.json.
WAN = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)


def scheduler_of(steps, shift=3.0):
    scheduler = UniPCMultistepScheduler(**WAN | {"flow_shift": shift})
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    return scheduler


@pytest.mark.parametrize("shift", SHIFTS)
def test_sigmas_and_times_are_diffusers_bit_for_bit(shift):
    """Times of float32 sigmas would differ where 1000 sigma is a whole number, which is at shift 1."""
    scheduler, differ = UniPCMultistepScheduler(**WAN | {"flow_shift": shift}), 0
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        found = make_unipc_schedule(UniPcConfig(float(shift)), steps)
        assert found.sigmas.dtype == np.float32 and found.times.dtype == np.int64
        np.testing.assert_array_equal(found.sigmas, scheduler.sigmas.numpy())
        np.testing.assert_array_equal(found.times, scheduler.timesteps.numpy())
        differ += (np.floor(np.float32(1000) * found.sigmas[:-1]) != found.times).any()
    assert differ == (28 if shift == 1 else 0)


def test_the_first_sigma_is_float32_where_its_logarithm_is_taken():
    """1 - float32(1 - 1e-6) is 1.0133e-6, as in diffusers."""
    first = jnp.asarray(make_unipc_schedule(UniPcConfig(3.0), 10).sigmas)[0]
    assert abs(_log_snr(first) - math.log(1.0132789611816406e-06)) < 1e-5


def transcription(sigmas, corrects=True):
    """x after each step in float64: the paper's UniC and UniP with R and b, x0 of the uncorrected x."""
    sigma = np.asarray(sigmas, np.float64)
    lam = [math.inf if s == 0 else math.log((1 - s) / s) for s in sigma]
    x, steps, outputs, found = START.astype(np.float64), len(sigma) - 1, [], []
    last, order = None, 1

    def update(x, s, t, order, new=None):
        h = lam[t] - lam[s]
        b_h = math.expm1(-h)
        slopes = [] if order == 1 else [(outputs[s - 1] - outputs[s]) / ((lam[s - 1] - lam[s]) / h)]
        weights = [0.5]
        if new is not None:
            slopes.append(new - outputs[s])
            if order == 2:
                r = (lam[s - 1] - lam[s]) / h
                phi_2 = b_h / -h - 1
                phi_3 = phi_2 / -h - 0.5
                b = [phi_2 / b_h, 2 * phi_3 / b_h]
                weights = np.linalg.solve([[1, 1], [r, 1]], b)
        total = sum(w * slope for w, slope in zip(weights, slopes, strict=bool(slopes)))
        return sigma[t] / sigma[s] * x - (1 - sigma[t]) * b_h * (outputs[s] + total)

    for i in range(steps):
        x0 = x - sigma[i] * velocity(x, np.full(len(x), sigma[i]), np)
        if i and corrects:
            x = update(last, i - 1, i, order, x0)
        outputs.append(x0)
        order = min(2, steps - i, i + 1)
        last = x
        x = x0 if sigma[i + 1] == 0 else update(x, i, i + 1, order)
        found.append(x)
    return found


@jax.jit
def advance(x, v, sigmas, i, last):
    return UniPc().advance(x, v, sigmas, i, last)


@jax.jit
def run(x, sigmas):
    return sample(velocity, x, sigmas, UniPc(), KEYS, (0, 0)).latents


@pytest.mark.parametrize("shift", [1.0, 3.0, 12.0])
@pytest.mark.parametrize("steps", [1, 2, 3, 10, 40])
def test_every_step_equals_diffusers_and_the_transcription(steps, shift):
    scheduler = scheduler_of(steps, shift)
    sigmas = make_unipc_schedule(UniPcConfig(shift), steps).sigmas
    x = jnp.asarray(START)
    last = UniPc().init_last(x)
    theirs = torch.from_numpy(START.copy())
    written = transcription(sigmas)
    for i, t in enumerate(scheduler.timesteps):
        v = velocity(theirs.numpy(), np.full(3, sigmas[i]), np).astype(np.float32)
        theirs = scheduler.step(torch.from_numpy(v), t, theirs, return_dict=False)[0]
        x, last = advance(x, velocity(x, jnp.full(3, sigmas[i])), sigmas, i, last)
        assert_close(x, theirs.numpy(), 2e-5)
        assert_close(x, written[i], 2e-5)
    assert_close(run(START, sigmas), x)
    if steps > 2:  # it is not its predictor alone
        assert np.abs(transcription(sigmas, corrects=False)[-1] - written[-1]).max() > 1e-3


def test_from_a_sigma_of_1_it_is_the_limit():
    """As on the schedules of other models, where log((1 - sigma) / sigma) is infinite at first."""
    sigmas = make_sigmas(SchedulerConfig(shift=3.0), 8).astype(np.float64)
    near = sigmas.copy()
    near[0] -= 1e-12
    found = run(START, sigmas.astype(np.float32))
    assert np.isfinite(found).all()
    assert_close(found, transcription(near)[-1], 0.02)


def test_it_is_more_exact_than_its_predictor():
    """Data N(0, 0.5^2) with its exact velocity, between the ends, where lambda is finite."""

    def variance(s):
        return (1 - s) ** 2 * 0.25 + s**2

    def exact(x, sigma):
        s = sigma[:, None, None, None]
        return (s - (1 - s) * 0.25) / variance(s) * x

    @functools.partial(jax.jit, static_argnames="step")
    def end(sigmas, step):
        return sample(exact, jnp.asarray(START), sigmas, step, KEYS, (0, 0)).latents

    def error(step, steps):
        sigmas = np.linspace(0.95, 0.05, steps + 1, dtype=np.float32)
        return np.abs(end(sigmas, step) - START * (variance(0.05) / variance(0.95)) ** 0.5).max()

    errors = {step: [error(step, steps) for steps in (10, 20)] for step in (UniPc(), Dpm2(), Ode())}
    for place in range(2):
        assert errors[UniPc()][place] < errors[Dpm2()][place] < errors[Ode()][place]
    assert errors[UniPc()][0] > 4 * errors[UniPc()][1]


def test_noise_at_the_first_sigma_is_that_of_a_sigma_of_1():
    sigmas = make_unipc_schedule(UniPcConfig(3.0), 10).sigmas
    for step in (FlowSde(0.7), CappedFlowSde(1.0)):
        first, one = (step.diffusion(s, sigmas[1], sigmas[1]) for s in (sigmas[0], np.float32(1)))
        np.testing.assert_allclose(first, one, rtol=1e-4)
        assert step.diffusion(sigmas[1], sigmas[2], sigmas[1]) <= first < 10


@pytest.mark.parametrize(
    ("step", "steps", "first"), [(FlowSde(0.7), 20, 5.0327), (CappedFlowSde(1.0), 16, 0.45)]
)
def test_steps_are_genrls_on_its_schedule(step, steps, first):
    """Those of config/default.yaml and longcat.yaml, with the diffusers that GenRL pins, 0.33.1: sigmas from 0.99967.

    With today's diffusers FlowSde's first step has another std there, of 91.
    """
    u = (1 - np.linspace(1, 1 / 1000, steps + 1))[:0:-1]
    pinned = np.append(3 * u / (1 + 2 * u), 0).astype(np.float32)
    kind, (x, v) = NAMES[type(step)], np.random.default_rng(0).normal(size=(2, 3, 4))
    todays = make_unipc_schedule(UniPcConfig(3.0), steps).sigmas
    for sigmas, begin in ((pinned, 0), (todays, 1 if kind == "flow" else 0)):
        for i in range(begin, steps):
            given = sigmas[i], sigmas[i + 1], sigmas[1]
            mean, std = step.mean_std(jnp.asarray(x), jnp.asarray(v), *given)
            arguments = kind, step.noise_level, x, v, *map(float, given)
            expected, expected_std = one_step(*arguments)
            np.testing.assert_allclose(mean, expected, rtol=0, atol=2e-6 * abs(expected).max())
            assert float(std) == pytest.approx(expected_std, rel=2e-6)
    given = map(float, (*pinned[:2], pinned[1]))
    assert one_step(kind, step.noise_level, x, v, *given)[1] == pytest.approx(first, abs=1e-4)


def test_its_config_is_diffusers():
    full = dict(UniPCMultistepScheduler(**WAN).config)
    for config in (WAN, full, WAN | {"_class_name": "UniPCMultistepScheduler"}):
        assert UniPcConfig.from_config(config) == UniPcConfig(3.0)
    assert (
        UniPcConfig.from_config({k: v for k, v in full.items() if k != "flow_shift"}).flow_shift
        == 1
    )
    assert make_step("unipc", 0) == UniPc()
    with pytest.raises(ValueError, match="at least 1 step"):
        make_unipc_schedule(UniPcConfig(), 0)


@pytest.mark.parametrize(
    "change",
    [
        *(dict(solver_order=3), dict(solver_type="bh1"), dict(prediction_type="epsilon")),
        *(dict(use_flow_sigmas=False), dict(use_karras_sigmas=True), dict(lower_order_final=False)),
        *(dict(use_dynamic_shifting=True), dict(final_sigmas_type="sigma_min"), dict(flow_shift=0)),
        *(dict(num_train_timesteps=500), dict(disable_corrector=[0]), dict(shift_terminal=0.1)),
        *(dict(unknown=1), dict(_class_name="FlowMatchEulerDiscreteScheduler")),
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_are_refused(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        UniPcConfig.from_config(WAN | change)


@pytest.mark.parametrize("name", ["prediction_type", "use_flow_sigmas"])
def test_a_setting_whose_default_is_another_must_be_there(name):
    with pytest.raises(ValueError, match=name):
        UniPcConfig.from_config({k: v for k, v in WAN.items() if k != name})
