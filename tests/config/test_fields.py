import pytest
from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from digen_jax.config import fields
from digen_jax.errors import ConfigError


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
        fields.check_fields(changed(**{field: 1}), reference())
    assert str(caught.value) == sentence


def test_fields_that_match_pass():
    fields.check_fields(changed(seed=3), reference())


def test_missing_field_is_named():
    config = reference()
    del config.sampler.steps
    with pytest.raises(ConfigError, match=r"config\.sampler\.steps is missing.* as 8"):
        fields.check_fields(config, reference())


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
        fields.check_types(changed(**{field: value}), reference())
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("field", "value"), [("rate", 1), ("window", [1, 2]), ("sampler__kind", "cps"), ("seed", 9)]
)
def test_value_of_the_right_kind_passes(field, value):
    fields.check_types(changed(**{field: value}), reference())
