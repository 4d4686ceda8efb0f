"""In processes of their own, as JAX starts once in each."""

import os
import subprocess
import sys

import pytest

from digen_jax.launching import join
from digen_jax.settings import ConfigError

PROGRAM = """
from digen_jax.launching import prepare
prepare(cpu_devices=3)
import jax
from absl import logging as absl_logging
print(len(jax.devices()), jax.config.jax_compilation_cache_dir, absl_logging.get_verbosity())
"""


@pytest.mark.parametrize("given", [False, True])
def test_devices_and_cache_are_set_unless_the_environment_has_them(tmp_path, given):
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path)}
    if given:
        environment["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
        environment["JAX_COMPILATION_CACHE_DIR"] = "elsewhere"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    cache = "elsewhere" if given else tmp_path / "digen_jax" / "xla"
    assert done.stdout.split() == ["2" if given else "3", str(cache), "-1"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((None, 2, None), "--processes and --process need the first one's --coordinator"),
        ((None, None, 0), "--processes and --process need the first one's --coordinator"),
        (("here:1234", 2, None), "needs --processes, how many there are, and --process"),
    ],
)
def test_one_of_several_processes_must_be_told_who_it_is(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        join(*given)


def test_a_process_by_itself_joins_nothing():
    join(None, None, None)
