import pathlib

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from digen_jax.diffusion.schedule import SchedulerConfig, make_sigmas

GOLDEN = np.load(pathlib.Path(__file__).parents[1] / "data" / "flow_rl.npz")
FLUX = {"shift": 3.0, "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 1.15}
QWEN_IMAGE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}


def diffusers_sigmas(config, num_steps, image_seq_len=None, spacing="timesteps"):
    """The pipelines' computation with the installed scheduler."""
    scheduler = FlowMatchEulerDiscreteScheduler(**config)
    arguments = {"num_inference_steps": num_steps}
    if spacing == "uniform":
        arguments = {"sigmas": np.linspace(1.0, 1 / num_steps, num_steps)}
    if config.get("use_dynamic_shifting"):
        settings = scheduler.config
        arguments["mu"] = np.interp(
            image_seq_len,
            [settings.base_image_seq_len, settings.max_image_seq_len],
            [settings.base_shift, settings.max_shift],
        ).item()
    scheduler.set_timesteps(**arguments)
    return scheduler.sigmas.numpy()


@pytest.mark.parametrize(
    ("name", "config", "arguments"),
    [
        ("sigmas_sd3_shift3_T28", {"shift": 3.0}, (28,)),
        ("sigmas_sd3_shift3_T40", {"shift": 3.0}, (40,)),
        ("sigmas_flux_dynamic_1024_T28", FLUX, (28, 4096, "uniform")),
        # the golden file used mu = 0.8 for Qwen-Image, for any number of tokens
        (
            "sigmas_qwen_image_1328_T50",
            QWEN_IMAGE | {"base_shift": 0.8, "max_shift": 0.8},
            (50, 83 * 83, "uniform"),
        ),
        ("sigmas_wan_shift5_T20", {"shift": 5.0}, (20,)),
        ("sigmas", {"shift": 3.0}, (10,)),
    ],
)
def test_golden(name, config, arguments):
    ours = make_sigmas(SchedulerConfig.from_config(config), *arguments)
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, GOLDEN[name], rtol=0, atol=2e-7)


@pytest.mark.parametrize("num_steps", [2, 7, 28])
@pytest.mark.parametrize(
    ("config", "image_seq_len", "spacing"),
    [
        ({"shift": 3.0}, None, "timesteps"),
        ({"shift": 7.0}, None, "uniform"),
        (FLUX, 777, "uniform"),
        (FLUX, 777, "timesteps"),
        (FLUX | {"time_shift_type": "linear"}, 1024, "uniform"),
        (QWEN_IMAGE, 1024, "uniform"),
        ({"shift": 2.0, "shift_terminal": 0.1}, None, "timesteps"),
    ],
)
def test_equals_diffusers(config, image_seq_len, spacing, num_steps):
    ours = make_sigmas(SchedulerConfig.from_config(config), num_steps, image_seq_len, spacing)
    theirs = diffusers_sigmas(config, num_steps, image_seq_len, spacing)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-7)
    assert ours[-1] == 0


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        ({"invert_sigmas": True}, (4,), "invert_sigmas"),
        ({"use_karras_sigmas": True}, (4,), "use_karras_sigmas"),
        ({"use_exponential_sigmas": True}, (4,), "use_exponential_sigmas"),
        ({"use_beta_sigmas": True}, (4,), "use_beta_sigmas"),
        ({"stochastic_sampling": True}, (4,), "stochastic_sampling"),
        ({"flow_shift": 3.0}, (4,), "flow_shift"),
        ({"time_shift_type": "cubic"}, (4,), "time_shift_type"),
        ({"_class_name": "UniPCMultistepScheduler"}, (4,), "UniPCMultistepScheduler"),
        ({}, (0,), "num_steps"),
        ({"shift_terminal": 0.02}, (1,), "one step is too few"),
        ({"use_dynamic_shifting": True}, (4,), "image_seq_len"),
    ],
)
def test_refused(config, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_sigmas(SchedulerConfig.from_config(config), *arguments)


def test_diffusers_own_config_file_is_understood():
    config = dict(FlowMatchEulerDiscreteScheduler(shift=3.0).config)
    config |= {"_class_name": "FlowMatchEulerDiscreteScheduler", "_diffusers_version": "0.40"}
    assert SchedulerConfig.from_config(config) == SchedulerConfig(shift=3.0)
