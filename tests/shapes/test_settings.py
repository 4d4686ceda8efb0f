import json

import pytest

from digen_jax.errors import ConfigError
from examples.shapes.settings import read_settings
from tests.pipelines import shipped_config


def test_the_settings_say_what_the_config_says():
    config = shipped_config("shapes_pretrain")
    found = read_settings(config)
    assert found.as_json() == json.loads(json.dumps(config.to_dict()))
    assert (found.transformer.fit.steps, found.text.max_length) == (16_000, 12)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("seed", -1, "config.seed must be 0 or more, not -1"),
        ("autoencoder.kl_weight", float("nan"), "config.autoencoder.kl_weight must be a finite"),
        ("transformer.fit.stepz", 3, "config.transformer.fit.stepz is not a field; the fields of"),
        ("text.max_length", None, "config.text.max_length is missing: configs/shapes_pretrain.py"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(name, value, sentence):
    config = shipped_config("shapes_pretrain")
    *groups, field = name.split(".")
    holder = config
    for group in groups:
        holder = holder[group]
    if value is None:
        del holder[field]
    else:
        holder[field] = value
    with pytest.raises(ConfigError) as caught:
        read_settings(config)
    assert str(caught.value).startswith(sentence)
