import os
import pathlib
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from digen_jax import settings
from digen_jax.settings import ConfigError

CONFIG = """
from ml_collections import ConfigDict

def get_config():
    sampler = {"guidance": 1.0, "steps": 8}
    return ConfigDict({"seed": 0, "sampler": sampler, "free": {}, "placement": {"sizes": "given"}})
"""
SCRIPT = """
from absl import flags
from ml_collections import config_flags
from digen_jax import settings

CONFIG = config_flags.DEFINE_config_file("config")
flags.DEFINE_string("workdir", None, "where")
flags.mark_flags_as_required(["config", "workdir"])

def main():
    config = CONFIG.value
    if config.seed == 1:
        raise settings.ConfigError("config.seed is 1:\\nset it to 0")
    if config.seed == 2:
        raise ValueError("a bug")
    print(config.sampler.guidance, config.seed, config.placement.sizes)

settings.run_main(main)
"""


def reference():
    return ConfigDict(
        {
            "seed": 0,
            "rate": 1e-3,
            "name": "shapes",
            "window": (0, 4),
            "sampler": {"guidance": 1.0, "steps": 8, "kind": placeholder(str)},
        }
    )


def changed(**fields):
    config = reference()
    for name, value in fields.items():
        *groups, last = name.split("__")
        holder = config
        for group in groups:
            holder = holder[group]
        with holder.unlocked(), holder.ignore_type():
            holder[last] = value
    return config


@pytest.mark.parametrize(
    ("field", "sentence"),
    [
        (
            "sampler__guidence",
            "config.sampler.guidence is not a field; did you mean config.sampler.guidance?",
        ),
        ("guidance", "config.guidance is not a field; did you mean config.sampler.guidance?"),
        (
            "sampler__zzz",
            "config.sampler.zzz is not a field; "
            "the fields of config.sampler are guidance, kind, steps",
        ),
    ],
)
def test_unknown_field_is_named_with_the_closest_known(field, sentence):
    with pytest.raises(ConfigError) as caught:
        settings.check_fields(changed(**{field: 1}), reference())
    assert str(caught.value) == sentence


def test_fields_that_match_pass():
    settings.check_fields(changed(seed=3), reference())


def test_missing_field_is_named():
    config = reference()
    del config.sampler.steps
    with pytest.raises(ConfigError, match=r"config\.sampler\.steps is missing.* as 8"):
        settings.check_fields(config, reference())


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("seed", 1.5, "config.seed must be a whole number, not 1.5"),
        ("seed", True, "config.seed must be a whole number, not True"),
        ("rate", "fast", "config.rate must be a number, not 'fast'"),
        ("window", 3, "config.window must be a tuple, not 3"),
        ("sampler", 3, "config.sampler must be a group of fields, not 3"),
        ("sampler__guidance", None, "config.sampler.guidance must be a number, not None"),
        ("sampler__kind", 7, "config.sampler.kind must be a text, not 7"),
    ],
)
def test_value_of_another_kind_is_refused(field, value, sentence):
    with pytest.raises(ConfigError) as caught:
        settings.check_types(changed(**{field: value}), reference())
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 1), ("window", [1, 2]), ("sampler__kind", "cps"), ("seed", 9)]
)
def test_value_of_the_right_kind_passes(field, value):
    settings.check_types(changed(**{field: value}), reference())


def test_divides():
    settings.check_divides("config.mesh.data", 4, "config.batch", 12, "its images are sharded")
    with pytest.raises(ConfigError) as caught:
        settings.check_divides("config.mesh.data", 4, "config.batch", 10, "its images are sharded")
    assert str(caught.value) == (
        "config.mesh.data = 4 must divide config.batch = 10, its images are sharded: "
        "set config.batch to 8 or 12, or change config.mesh.data"
    )
    with pytest.raises(ConfigError, match="set b to 4, or change a"):
        settings.check_divides("a", 4, "b", 3, "why")


def test_choice_positive_and_folder(tmp_path):
    settings.check_choice("config.kind", "cps", ("cps", "flow"))
    with pytest.raises(ConfigError, match=r"'flwo'; did you mean 'flow'\? .* one of 'cps', 'flow'"):
        settings.check_choice("config.kind", "flwo", ("cps", "flow"))
    settings.check_positive("config.rate", 1e-9)
    for value in (0, -1.0, float("nan")):
        with pytest.raises(ConfigError, match=r"config\.rate must be above 0"):
            settings.check_positive("config.rate", value)
    settings.check_folder("config.model", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"config\.model = .* is a file"):
        settings.check_folder("config.model", tmp_path / "file")
    with pytest.raises(ConfigError, match=r"config\.model = .* is no folder"):
        settings.check_folder("config.model", str(tmp_path / "none"))


def test_user_input_makes_config_errors_of_reading_and_of_nothing_else():
    with pytest.raises(ConfigError, match=r"prompts\.txt"), settings.user_input():
        pathlib.Path("/nowhere/prompts.txt").read_text()
    with pytest.raises(ZeroDivisionError), settings.user_input():
        1 / 0  # noqa: B018


def launch(folder: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
    (folder / "config.py").write_text(CONFIG)
    (folder / "script.py").write_text(SCRIPT)
    root = pathlib.Path(settings.__file__).parents[1]
    return subprocess.run(
        [sys.executable, folder / "script.py", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        check=False,
    )


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "--config.sampler.guidence=2",
            "config.sampler.guidence is not a field; did you mean config.sampler.guidance?",
        ),
        ("--noconfig.sede", "config.sede is not a field; did you mean config.seed?"),
        (
            "--config.seed.a=2",
            "config.seed is one value and has no fields: config.seed.a cannot be set",
        ),
        (
            "--config.free.new=1",
            "config.free.new is not a field; "
            "config.free is empty: set its fields in the config file",
        ),
        (
            "--config.sampler=(0, 4)",
            "config.sampler is a group of fields, not (0, 4): set each by its name, such as "
            "--config.sampler.guidance=...",
        ),
        ("--config.seed=1", "config.seed is 1: set it to 0"),
        ("extra", "'extra' belongs to no option: write --option='its value'"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_and_no_traceback(tmp_path, override, sentence):
    done = launch(tmp_path, "--config", str(tmp_path / "config.py"), "--workdir=w", override)
    assert (done.returncode, done.stderr) == (2, f"script.py: {sentence}\n")


def test_a_missing_config_file_is_one_line(tmp_path):
    done = launch(tmp_path, f"--config={tmp_path}/none.py:tiny", "--workdir=w")
    assert done.returncode == 2
    assert done.stderr == (
        f"script.py: there is no config file {tmp_path}/none.py: give the path of one by --config\n"
    )


def test_good_overrides_arrive_and_a_bug_keeps_its_traceback(tmp_path):
    given = ("--config", str(tmp_path / "config.py"), "--workdir=w")
    done = launch(tmp_path, *given, "--config.sampler.guidance=2.5", "--config.placement=auto")
    assert (done.returncode, done.stdout) == (0, "2.5 0 auto\n")
    done = launch(tmp_path, *given, "--config.seed=2")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: a bug" in done.stderr


def test_mistakes_that_are_found_together_are_one_error_of_a_sentence_each():
    def values(**given):
        with settings.together() as one:
            for name, value in given.items():
                with one(), settings.blame("config.", (ConfigError,)):
                    settings.check_positive(name, value)

    values(a=1, b=2)
    with pytest.raises(ConfigError) as caught:
        values(a=1, b=0)
    assert str(caught.value) == "config.b must be above 0, not 0"
    with pytest.raises(ConfigError) as caught, settings.together() as one:
        with one():
            values(a=0, b=-1, c=3)
        with one():
            values(a=0)
        raise ConfigError("d is\n1")
    assert str(caught.value) == (
        "3 things must change:\n  config.a must be above 0, not 0\n  config.b must be above 0, not -1\n  d is 1"
    )


def test_one_word_for_the_placement_is_its_sizes():
    given = ["x.py", "--config=a.py", "--config.placement=auto", "-config.placement=fitted"]
    kept = ["--config.placement={'rollout': {'data': 0}}", "--config.placement.sizes=auto", "auto"]
    assert settings.spelled_out([*given, *kept]) == [
        *given[:2],
        "--config.placement.sizes=auto",
        "--config.placement.sizes=fitted",
        *kept,
    ]
