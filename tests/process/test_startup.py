"""In separate processes, because JAX starts once in each."""

import os
import pathlib
import pwd
import socket
import subprocess
import sys
import tempfile
import threading

import pytest

from digen_jax.errors import ConfigError
from digen_jax.process import job
from digen_jax.process.job import join, wait_for_port

PROGRAM = """
from digen_jax.process.job import prepare
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
    assert done.stdout.split() == ["2" if given else "3", str(cache), "-2"]


@pytest.mark.parametrize("home", [None, "/", "", "nowhere", "HOME"])
def test_the_cache_is_a_temporary_folder_without_a_home(tmp_path, monkeypatch, home):
    def unknown(user):
        raise KeyError(user)

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(os, "access", lambda path, mode: path == str(tmp_path))
    if home is None:
        monkeypatch.delenv("HOME", raising=False)
    else:
        monkeypatch.setenv("HOME", home.replace("HOME", str(tmp_path)))
    own = tmp_path / ".cache"
    temporary = pathlib.Path(tempfile.gettempdir(), f"cache-{os.getuid()}")
    assert job._user_cache() == (own if home == "HOME" else temporary)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ((None, 2, None), "--processes and --process need the first one's --coordinator"),
        ((None, None, 0), "--processes and --process need the first one's --coordinator"),
        (("here:1234", 2, None), "needs --processes, how many there are, and --process"),
        (("here", 2, 1), "--coordinator=here must be auto or the first process's HOST:PORT"),
        (("here:99999", 2, 1), "--coordinator=here:99999 must be auto or the first process's HOST"),
        (("here:1234", 2, 5), "--process=5 must be one of the --processes=2, which are counted"),
        (("here:1234", 0, 0), "--process=0 must be one of the --processes=0, which are counted"),
    ],
)
def test_one_of_several_processes_must_be_told_who_it_is(given, sentence):
    with pytest.raises(ConfigError, match=sentence):
        join(*given)


def test_a_process_by_itself_joins_nothing():
    join(None, None, None)


def test_a_coordinator_that_nobody_reaches_is_refused_after_its_time_and_a_word(capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        port = bound.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            wait_for_port("127.0.0.1", port, seconds=0.3, pause=0.1)
    sentence = f"--coordinator=127.0.0.1:{port} was not reached in 0.3 s ([Errno 111] Connection refused): check"
    assert str(caught.value).startswith(sentence)
    said = capsys.readouterr().err
    assert said == (
        f"waiting for the first process at 127.0.0.1:{port} ([Errno 111] Connection refused), at most 0.3 s\n"
    )


def test_a_coordinator_that_comes_later_is_waited_for():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        later = threading.Timer(0.3, bound.listen)
        later.start()
        wait_for_port("127.0.0.1", bound.getsockname()[1], seconds=60, pause=0.1)
        later.join()


def test_a_first_process_that_stays_alone_ends_with_a_sentence():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = f"from digen_jax.process.job import join; join({address!r}, 3, 0, seconds=1.5)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    said = [line for line in done.stderr.splitlines() if address in line]
    assert said == [
        f"waiting at {address} for 2 more processes, at most 1.5 s",
        f"-c: --coordinator={address}: not all processes have come in 1.5 s: start as many as --processes says, "
        "each with its own --process",
    ]
