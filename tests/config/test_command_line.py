import os
import pathlib
import subprocess
import sys

import pytest

from digen_jax.config import command_line
from digen_jax.config.load import read_config
from digen_jax.errors import ConfigError
from tests.pipelines import ROOT

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    sampler = {"guidance": 1.0, "steps": 8}
    placement, trainer = {"mode": "given"}, {"micro_batch": 2}
    groups = {"sampler": sampler, "free": {}, "placement": placement, "trainer": trainer}
    return ConfigDict({"seed": 0, **groups})
"""
SCRIPT = """
from absl import flags
from ml_collections import config_flags
from digen_jax.config import command_line
from digen_jax.errors import ConfigError

CONFIG = config_flags.DEFINE_config_file("config")
WORKDIR = command_line.define_path("workdir", None, "where")
FILES = command_line.define_path("file", [], "which", several=True)
flags.mark_flags_as_required(["config", "workdir"])

def main():
    config = CONFIG.value
    if config.seed == 1:
        raise ConfigError("config.seed is 1:\\nset it to 0")
    if config.seed == 2:
        raise ValueError("a bug")
    if config.seed == 5:
        print("0.5 \u00b1 0.1 \u2603")
    if config.seed == 4:
        import jax
        from digen_jax.process.shutdown import during
        lines = "RESOURCE_EXHAUSTED: Out of memory allocating 2000000 bytes.\\nBuffers: many"
        try:
            with during("training on chunk 3 of step 2"):
                raise jax.errors.JaxRuntimeError(lines)
        except RuntimeError as error:
            raise RuntimeError("a piece of work failed too often") from error
    if FILES.value:
        print(WORKDIR.value, *FILES.value)
    print(config.sampler.guidance, config.seed, config.placement.mode)

command_line.run_main(main)
"""


def launch(folder: pathlib.Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    (folder / "config.py").write_text(CONFIG)
    (folder / "script.py").write_text(SCRIPT)
    root = pathlib.Path(command_line.__file__).parents[2]
    return subprocess.run(
        [sys.executable, folder / "script.py", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)} | variables,
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("--config.sampler.guidence=2", "did you mean config.sampler.guidance?"),
        ("--noconfig.sede", "did you mean config.seed?"),
        ("--config.seed.a=2", "config.seed.a"),
        ("--config.free.new=1", "config.free.new is not a field"),
        ("--config.sampler=(0, 4)", "--config.sampler.guidance=..."),
        ("--config.seed=1", "config.seed is 1: set it to 0"),
        ("extra", "'extra'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_no_traceback(tmp_path, override, sentence):
    done = launch(tmp_path, "--config", str(tmp_path / "config.py"), "--workdir=w", override)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("script.py: ") and sentence in done.stderr


def test_a_missing_config_file_is_one_line(tmp_path):
    done = launch(tmp_path, f"--config={tmp_path}/none.py:tiny", "--workdir=w")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"{tmp_path}/none.py" in done.stderr and "--config" in done.stderr


def test_good_overrides_arrive_and_a_bug_keeps_its_traceback(tmp_path):
    given = ("--config", str(tmp_path / "config.py"), "--workdir=w")
    done = launch(tmp_path, *given, "--config.sampler.guidance=2.5", "--config.placement=auto")
    assert (done.returncode, done.stdout) == (0, "2.5 0 auto\n")
    done = launch(tmp_path, *given, "--config.seed=2")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a bug" in done.stderr


def test_a_tilde_in_a_flag_for_a_path_is_the_home_folder(tmp_path):
    files = ("--file=~/a", "--file", "~/b", "--file=/c/~/d")
    done = launch(
        tmp_path, "--config=~/config.py", "--workdir=~/runs/x", *files, HOME=str(tmp_path)
    )
    home = f"{tmp_path}/"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[:4] == [f"{home}runs/x", f"{home}a", f"{home}b", "/c/~/d"]


@pytest.mark.parametrize("argument", ["--config=~no-user/config.py", "--workdir=~no-user/x"])
def test_a_home_folder_that_is_not_known_is_one_line(tmp_path, argument):
    given = ("--config", str(tmp_path / "config.py"), "--workdir=w", argument)
    done = launch(tmp_path, *given)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert argument.partition("=")[2] in done.stderr


def test_a_device_without_memory_is_one_line_with_xlas_first_one(tmp_path):
    given = ("--config", str(tmp_path / "config.py"), "--workdir=w")
    done = launch(tmp_path, *given, "--config.seed=4")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith(
        "script.py: a device ran out of memory during training on chunk 3 of step 2 (RESOURCE_EXHAUSTED: Out of "
    )
    assert "config.trainer.micro_batch" in done.stderr and "Buffers" not in done.stderr


def test_a_console_without_unicode_shows_escapes(tmp_path):
    given = ("--config", str(tmp_path / "config.py"), "--workdir=w", "--config.seed=5")
    done = launch(tmp_path, *given, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[0] == r"0.5 \xb1 0.1 \u2603"


@pytest.mark.parametrize(("parameters", "argument"), [("", ":unknown"), ("name", "")])
def test_an_argument_that_a_config_does_not_take_is_refused(tmp_path, parameters, argument):
    file = tmp_path / "config.py"
    file.write_text(CONFIG.replace("get_config()", f"get_config({parameters})"))
    with pytest.raises(ConfigError) as caught:
        command_line.check_overrides(["x.py", f"--config={file}{argument}"])
    assert str(file) in str(caught.value)


def test_files_of_the_package_are_found_from_any_directory(tmp_path, monkeypatch):
    given = [
        "--config=configs/sd35_medium.py:geneval,1",
        "configs/no.py",
        "--model",
        "assets/shapes-sd3",
    ]
    assert command_line.expand_args(given) == given  # from the root of a checkout they are here
    monkeypatch.chdir(tmp_path)
    assert command_line.expand_args(given) == [
        f"--config={ROOT}/configs/sd35_medium.py:geneval,1",
        *given[1:3],
        f"{ROOT}/assets/shapes-sd3",
    ]
    (tmp_path / "assets" / "shapes-sd3").mkdir(parents=True)
    assert command_line.expand_args(given[3:]) == given[3:]
    config = read_config({"prompts": {"file": "assets/prompts/shapes_train.jsonl"}})
    assert config.model.folder == "assets/shapes-sd3"
    assert config.prompts.paths == (f"{ROOT}/assets/prompts/shapes_train.jsonl",)


def test_one_word_for_the_placement_is_its_sizes():
    given = ["x.py", "--config=a.py", "--config.placement=auto", "-config.placement=fitted"]
    kept = ["--config.placement={'rollout': {'data': 0}}", "--config.placement.mode=auto", "auto"]
    assert command_line.expand_args([*given, *kept]) == [
        *given[:2],
        "--config.placement.mode=auto",
        "--config.placement.mode=fitted",
        *kept,
    ]


@pytest.mark.parametrize(
    ("text", "steps"),
    [(None, []), ("3", [3]), ("3-5", [3, 4, 5]), ("8-8", [8]), ("7-9", [7, 8, 9])],
)
def test_the_profiled_steps_are_one_or_a_range(text, steps):
    assert list(command_line.profiled_steps(text, 8)) == steps


@pytest.mark.parametrize("text", ["", "0", "0-2", "9", "9-10", "5-3", "-3", "3-", "3,4", "all"])
def test_profiled_steps_that_are_not_of_the_run_are_refused(text):
    with pytest.raises(ConfigError, match=f"--profile={text} "):
        command_line.profiled_steps(text, 8)
