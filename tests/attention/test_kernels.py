import re
import types

import jax
import jax.numpy as jnp
import pytest

from digen_jax.attention.kernels import Heads, choose
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
        (TPU, BF16, 64, True, "packed"),
        (TPU, F32, 128, False, "packed"),
        (TPU, BF16, 72, False, "splash"),
        (TPU, BF16, 128, True, "packed"),
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
    heads = Heads(24, width, weighted)
    assert choose("auto", device, dtype, heads) == kernel
    if kernel != "xla":
        assert choose(kernel, device, dtype, heads) == kernel
    assert choose("xla", device, dtype, heads) == "xla"


@pytest.mark.parametrize(
    ("heads", "kernel"),
    [
        (Heads(24, 128, groups=8, keys=4608), "splash"),
        (Heads(24, 128, groups=24, keys=30_000), "splash"),
        (Heads(3, 64, groups=3, keys=1100), "splash"),
        (Heads(24, 64, groups=24, keys=1100).split(4), "packed"),
        (Heads(24, 64, groups=24, keys=1100).split(8), "splash"),  # three heads a device
        (Heads(30, 128, groups=30, keys=1100).split(4), "packed"),  # each device has all of them
    ],
)
def test_on_a_tpu_packed_attention_comes_first_where_it_can(heads, kernel):
    assert choose("auto", TPU, BF16, heads) == kernel


@pytest.mark.parametrize(
    ("kernel", "device", "dtype", "width", "weighted", "reason"),
    [
        ("splash", CPU, BF16, 64, False, "splash attention runs on TPUs, but the device is a CPU"),
        ("splash", H100, BF16, 64, False, "runs on TPUs, but the device is a 'NVIDIA H100"),
        ("splash", TPU, BF16, 256, False, "it takes at most 128 channels per head, which are 256"),
        ("packed", CPU, BF16, 64, False, "packed attention runs on TPUs, but the device is a CPU"),
        ("packed", TPU, BF16, 72, False, "24 heads of 72 channels on a device do not fill tiles"),
        ("cudnn", TPU, BF16, 64, False, "cuDNN runs on NVIDIA GPUs, but the device is a 'TPU"),
        ("cudnn", AMD, BF16, 64, False, "cuDNN runs on NVIDIA GPUs, but the device is a 'AMD"),
        ("cudnn", T4, BF16, 64, False, "needs compute capability 8.0, but a 'Tesla T4' has less"),
        ("cudnn", H100, F32, 64, False, "computes in bfloat16 or float16, not in float32"),
        ("cudnn", H100, BF16, 42, False, "cuDNN supports multiples of 8 channels per head, not 42"),
        ("cudnn", H100, BF16, 128, True, "for the weights of keys, are 136 here"),
    ],
)
def test_a_kernel_that_cannot_is_refused(kernel, device, dtype, width, weighted, reason):
    with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
        choose(kernel, device, dtype, Heads(24, width, weighted))
    sentence = str(caught.value)
    assert sentence.startswith(f"config.model.attention = {kernel!r} cannot be used, because ")
    assert sentence.endswith(": set it to 'auto'")


def test_real_devices_have_the_fields_that_are_read():
    assert choose("auto", jax.devices()[0], BF16, Heads(4, 64)) == "xla"
