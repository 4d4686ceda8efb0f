"""Facts of chips, and topologies that cannot be planned for: one line each, without the compilers."""

import ctypes.util
import importlib.util
import math
import os
import re
import types

import jax
import pytest
from jax.experimental import topologies

from digen_jax.errors import ConfigError
from digen_jax.planning import hardware
from digen_jax.planning.hardware import CHIPS, GPUS, chip_of, topology_devices
from tools.tpu_cycles import CORES


@pytest.fixture
def with_libtpu(monkeypatch):
    """As where the compiler is installed; `say` makes it answer with an error."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax.config, "update", lambda *given: None)
    for variable in hardware.LIBTPU_ENVIRONMENT:
        monkeypatch.setenv(variable, "")

    def say(text):
        def refuse(**given):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(topologies, "get_topology_desc", refuse)

    return say


@pytest.mark.parametrize(
    ("name", "file"),
    [("v5p:2x2x1", "requirements-tpu.txt"), ("h100:8", "requirements-gpu-check.txt")],
)
def test_without_the_compiler_the_sentence_says_how_to_install_it(monkeypatch, name, file):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf" pip install -r {re.escape(file)}$"):
        topology_devices(name)


@pytest.mark.parametrize("missing", ["nvidia.cudnn", "jax_cuda12_plugin"])
def test_the_cuda_compiler_needs_cudnn(monkeypatch, missing):
    def find(name):
        if name == missing or name == "jax_cuda13_plugin":
            raise ModuleNotFoundError(name)
        return object()

    monkeypatch.setattr(importlib.util, "find_spec", find)
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: None)
    with pytest.raises(ConfigError, match="requirements-gpu-check"):
        topology_devices("h100:8")


@pytest.mark.parametrize(
    ("name", "shape"),
    [("h100:8", "1x1x8"), ("h100:1", "1x1x1"), ("a100:2x8", "1x2x8"), ("b200:16x4", "1x16x4")],
)
def test_gpus_are_hosts_times_those_of_a_host(monkeypatch, name, shape):
    asked = {}

    def described(**given):
        asked.update(given)
        return types.SimpleNamespace(devices=["a device"])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax.config, "update", lambda *given: None)
    monkeypatch.setattr(topologies, "get_topology_desc", described)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_gpu_autotune_level=0")
    assert topology_devices(name) == ["a device"]
    assert (asked["platform"], asked["topology"]) == ("cuda", shape)
    assert f'"{GPUS[name.partition(":")[0]].kind}"' in asked["target_config"]
    assert os.environ["XLA_FLAGS"].split() == ["--xla_dump_to=x", *hardware.CUDA_XLA_FLAGS]


@pytest.mark.parametrize(
    "name", ["h100", "h100:0", "h100:9", "h100:2x9", "h100:8x", "x:8", "h300:8"]
)
def test_gpus_that_there_are_not_are_a_mistake(name):
    with pytest.raises(ConfigError, match="h100:8"):
        topology_devices(name)


def test_every_gpu_is_a_chip_whose_memory_the_compiler_gets():
    for gpu in GPUS.values():
        assert f"device_memory_size: {CHIPS[gpu.kind].memory}\n" in gpu.description()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "another process has locked"),
        ("INVALID_ARGUMENT: Invalid TPU external name: TPU v9", "is no slice that the TPU compiler knows"),
    ],
)  # fmt: skip
def test_what_the_compiler_refuses_is_a_sentence(with_libtpu, said, sentence):
    with_libtpu(said)
    with pytest.raises(ConfigError, match=sentence) as error:
        topology_devices("v9:2x2")
    assert "\n" not in str(error.value)


def test_the_peaks_of_tpus_are_clocks_times_whole_matrix_units():
    """Matrix units are squares of multiply-adds."""
    for chip in CHIPS.values():
        if core := CORES.get(chip.name):
            units = chip.flops / core.clock / (2 * core.array**2)
            assert math.isclose(units, round(units), rel_tol=1e-9)


def test_an_unknown_chip_is_an_error():
    assert chip_of("TPU v5 lite").name == "v5e"
    with pytest.raises(ConfigError):
        chip_of("TPU v99")
