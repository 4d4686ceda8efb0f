"""Slices that cannot be planned for: one sentence each, without the TPU compiler."""

import importlib.util

import jax
import pytest
from jax.experimental import topologies

from digen_jax.accelerators import topology
from digen_jax.errors import ConfigError


@pytest.fixture
def with_libtpu(monkeypatch):
    """As where the compiler is installed; `say` makes it answer with an error."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(jax.config, "update", lambda *given: None)
    for variable in topology.SETTINGS:
        monkeypatch.setenv(variable, "")

    def say(text):
        def refuse(**given):
            raise jax.errors.JaxRuntimeError(text)

        monkeypatch.setattr(topologies, "get_topology_desc", refuse)

    return say


def test_without_the_compiler_the_sentence_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed: pip install -r requirements-tpu\.txt$"):
        topology.slice_devices("v5p:2x2x1")


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ("ABORTED: Internal error when accessing libtpu multi-process lockfile.", "another process holds"),
        ("INVALID_ARGUMENT: Invalid TPU external name: TPU v9", "is no slice that the TPU compiler knows"),
    ],
)  # fmt: skip
def test_what_the_compiler_refuses_is_a_sentence(with_libtpu, said, sentence):
    with_libtpu(said)
    with pytest.raises(ConfigError, match=sentence) as error:
        topology.slice_devices("v9:2x2")
    assert "\n" not in str(error.value)
