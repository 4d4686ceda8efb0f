import re
import types

import jax
import jax.numpy as jnp
import pytest

from digen_jax.attention.kernels import choose
from digen_jax.errors import ConfigError

CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu")
TPU = types.SimpleNamespace(platform="tpu", device_kind="TPU v6 lite")
H100 = types.SimpleNamespace(
    platform="gpu", device_kind="NVIDIA H100 80GB HBM3", compute_capability="9.0"
)
T4 = types.SimpleNamespace(platform="gpu", device_kind="Tesla T4", compute_capability="7.5")
AMD = types.SimpleNamespace(
    platform="gpu", device_kind="AMD Instinct MI300X", compute_capability="gfx942"
)
F32, BF16 = jnp.float32, jnp.bfloat16


@pytest.mark.parametrize(
    ("device", "dtype", "width", "weighted", "kernel"),
    [
        (None, BF16, 64, False, "xla"),
        (CPU, BF16, 64, False, "xla"),
        (TPU, BF16, 64, True, "splash"),
        (TPU, F32, 128, False, "splash"),
        (TPU, BF16, 128, True, "xla"),
        (TPU, F32, 512, False, "xla"),
        (H100, BF16, 64, True, "cudnn"),
        (H100, F32, 64, False, "xla"),
        (H100, BF16, 128, True, "xla"),
        (H100, BF16, 42, False, "xla"),
        (T4, BF16, 64, False, "xla"),
        (AMD, BF16, 64, False, "xla"),
    ],
)
def test_auto_takes_the_kernel_of_the_device_if_it_can_compute_these_heads(
    device, dtype, width, weighted, kernel
):
    assert choose("auto", device, dtype, width, weighted) == kernel
    if kernel != "xla":
        assert choose(kernel, device, dtype, width, weighted) == kernel
    assert choose("xla", device, dtype, width, weighted) == "xla"


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "width", "weighted", "reason"),
    [
        ("splash", CPU, BF16, 64, False, "splash attention runs on TPUs, and the device is a CPU"),
        ("splash", H100, BF16, 64, False, "runs on TPUs, and the device is a 'NVIDIA H100"),
        ("splash", TPU, BF16, 256, False, "it takes at most 128 channels a head, which are 256"),
        ("cudnn", TPU, BF16, 64, False, "cuDNN runs on NVIDIA's GPUs, and the device is a 'TPU"),
        ("cudnn", AMD, BF16, 64, False, "cuDNN runs on NVIDIA's GPUs, and the device is a 'AMD"),
        ("cudnn", T4, BF16, 64, False, "needs compute capability 8.0, and a 'Tesla T4' has less"),
        ("cudnn", H100, F32, 64, False, "computes in bfloat16 or float16, not in float32"),
        ("cudnn", H100, BF16, 42, False, "cuDNN takes a multiple of 8 channels a head, not 42"),
        ("cudnn", H100, BF16, 128, True, "for the weights of keys, are 136 here"),
    ],
)
def test_a_kernel_that_cannot_is_refused(kernel, device, dtype, width, weighted, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        choose(kernel, device, dtype, width, weighted)
    sentence = str(caught.value)
    assert sentence.startswith(f"config.model.attention = {kernel!r} cannot be used, because ")
    assert sentence.endswith(": set it to 'auto'")


def test_real_devices_have_the_fields_that_are_read():
    assert choose("auto", jax.devices()[0], BF16, 64) == "xla"
