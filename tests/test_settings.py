import pathlib

import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from digen_jax import settings
from digen_jax.settings import ConfigError


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
