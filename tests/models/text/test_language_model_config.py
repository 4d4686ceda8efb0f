import jax
import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.models.text.language_model import LanguageModel, LanguageModelConfig
from tests.models import parity
from tests.models.text.test_language_model import (
    LLAMA,
    LLAMA3,
    MISTRAL,
    QWEN2,
    QWEN3,
    of_torch,
    shapes,
    torch_module,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma"}, "model_type must be 'qwen2_5_vl' or"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 must be a multiple"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"head_dim": None, "hidden_size": 25}, "hidden_size 25 must be a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling: rope_type .*'yarn'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_scaling: rope_type .*'mrope'"),
        ({"rope_parameters": {"beta": 1.0}}, "rope_parameters: beta is not supported"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "rope_scaling: factor must be"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 3}}, "rope_scaling: high_freq_factor 3"),
        ({"rope_scaling": ["mrope"]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1"),
        ({"rope_theta": "large"}, "rope_theta must be"),
        ({"layer_types": ["chunked_attention"]}, "layer_types: 'chunked_attention'"),
        ({"layer_types": "all"}, "layer_types must be a list"),
        ({"max_window_layers": -1}, "max_window_layers must be"),
        ({"text_config": 3}, "text_config must be an object"),
    ],
    ids=str,
)
def test_an_unsupported_field_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        LanguageModelConfig.from_config({**QWEN3, **changes})


@pytest.mark.parametrize("field", ["model_type", "vocab_size", "rms_norm_eps"])
def test_a_missing_field_is_named(field):
    config = {name: value for name, value in QWEN3.items() if name != field}
    with pytest.raises(ValueError, match=f"{field} is missing"):
        LanguageModelConfig.from_config(config)


SLIDING = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({**MISTRAL, "sliding_window": 8}, 8),
        ({**MISTRAL, "sliding_window": None}, None),
        ({**QWEN2, **SLIDING}, 8),
        ({**QWEN2, **SLIDING, "max_window_layers": 5}, None),
        ({**QWEN2, **SLIDING, "use_sliding_window": False}, None),
        ({**QWEN2, **SLIDING, "layer_types": ["full_attention"] * 5}, None),
        ({**QWEN2, **SLIDING, "layer_types": ["sliding_attention"] * 5}, 8),
        ({**LLAMA, **SLIDING}, None),
    ],
    ids=["mistral", "none", "qwen2", "no layer", "not used", "all full", "all slide", "llama"],
)
def test_a_sliding_window_that_acts_is_refused(config, window):
    """It acts where transformers' states of the last token differ from those without it."""
    model = LanguageModel(LanguageModelConfig.from_config(config))
    assert model.config.sliding_window == window
    module = parity.randomise(torch_module(config))
    plain = parity.randomise(torch_module({**config, "sliding_window": None, "layer_types": None}))
    states, without = (of_torch(m, (-1,))[0] for m in (module, plain))
    assert (np.abs(states - without).max() > 1e-3) == (window is not None)
    if window is None:
        shapes(model)
        return
    fits, long = jnp.zeros((1, window), jnp.int32), jnp.zeros((1, window + 1), jnp.int32)
    with pytest.raises(ValueError, match=r"sliding_window is 8.*truncate the prompts to 8 tokens"):
        jax.eval_shape(model.init, jax.random.key(0), long, long)
    jax.eval_shape(model.init, jax.random.key(0), fits, fits)
