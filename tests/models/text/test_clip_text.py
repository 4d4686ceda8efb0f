import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from digen_jax.models.text.clip_text import (
    IGNORED,
    LISTS,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    pooling_positions,
)
from tests.models import parity

END = 40
TINY = dict(architectures=["CLIPTextModelWithProjection"], model_type="clip_text_model")
TINY |= dict(attention_dropout=0.0, vocab_size=50, hidden_size=24, intermediate_size=40)
TINY |= dict(projection_dim=12, num_hidden_layers=3, num_attention_heads=3)
TINY |= dict(max_position_embeddings=9, hidden_act="quick_gelu", layer_norm_eps=0.1, bos_token_id=0)
TINY |= dict(eos_token_id=2, pad_token_id=1)
CASES = {
    "quick_gelu, legacy end": TINY,
    "gelu, end token": {**TINY, "hidden_act": "gelu", "eos_token_id": END},
    "one layer": {**TINY, "num_hidden_layers": 1},
}


def torch_module(config: dict) -> torch.nn.Module:
    kwargs = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    return transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**kwargs))


def pair(config: dict, dtype=jnp.float32):
    """transformers' module, ours, and its parameters in our tree."""
    module = parity.randomise(torch_module(config))
    model = CLIPTextModelWithProjection(CLIPTextConfig.from_config(config), dtype)
    return module, model, parity.to_flax(module.state_dict(), shapes(model), LISTS)


def shapes(model: CLIPTextModel | CLIPTextModelWithProjection):
    ids = jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(lambda key: model.init(key, ids), jax.random.key(0))["params"]


def prompts() -> np.ndarray:
    """Ids in which the first end token, the largest id and the last token all differ."""
    ids = np.random.default_rng(0).integers(3, END, (3, 7))
    ids[0, 3:] = END
    ids[1, 5], ids[1, 2] = END, 45
    ids[2, 1], ids[2, 4] = END, END
    return ids


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_equals_transformers_forward_and_in_all_gradients(config):
    module, model, params = pair(config)
    outputs = module(torch.tensor(prompts()), output_hidden_states=True)
    outputs = [outputs.hidden_states[-2], outputs.text_embeds]
    expected = [t.detach().numpy() for t in outputs]
    rng = np.random.default_rng(1)
    weights = tuple(rng.normal(size=e.shape).astype(np.float32) for e in expected)
    sum((o * torch.tensor(w)).sum() for o, w in zip(outputs, weights, strict=True)).backward()

    @jax.jit
    def run(params, ids):
        actual, pull = jax.vjp(lambda p: model.apply({"params": p}, ids), params)
        return actual, *pull(weights)

    with jax.default_matmul_precision("highest"):
        actual, grads = run(params, jnp.asarray(prompts()))

    assert parity.worst(list(actual), expected)[0] < 1e-4
    expected_grads = parity.to_flax(parity.gradients(module), params, LISTS)
    assert parity.worst(grads, expected_grads, whole=True)[0] < 1e-4


def test_bfloat16_stays_close():
    module, model, params = pair(TINY, jnp.bfloat16)
    outputs = module(torch.tensor(prompts()), output_hidden_states=True)
    actual = jax.jit(model.apply)({"params": params}, prompts())
    assert {a.dtype for a in actual} == {jnp.dtype(jnp.bfloat16)}
    expected = [outputs.hidden_states[-2].detach().numpy(), outputs.text_embeds.detach().numpy()]
    assert 1e-3 < parity.worst(list(actual), expected)[0] < 5e-2


def test_pooling_positions_by_hand():
    ids = jnp.asarray(prompts())
    assert pooling_positions(ids, END).tolist() == [3, 5, 1]
    assert pooling_positions(ids, 2).tolist() == [3, 2, 1]
    assert pooling_positions(jnp.asarray([[5, 7, 6]]), END).tolist() == [0]


def test_what_a_reader_may_ignore_is_transformers_buffer():
    module = torch_module(TINY)
    assert set(IGNORED) == dict(module.named_buffers()).keys()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "relu"),
        ("num_attention_heads", 5),
        ("eos_token_id", [2, 40]),
        ("model_type", "clip_vision_model"),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=field):
        CLIPTextConfig.from_config({**TINY, field: value})


def test_bad_calls_are_refused():
    model = CLIPTextModelWithProjection(CLIPTextConfig.from_config(TINY))
    with pytest.raises(ValueError, match="max_position_embeddings"):
        model.init(jax.random.key(0), jnp.zeros((1, 10), jnp.int32))
    with pytest.raises(ValueError, match="hidden_state"):
        model.init(jax.random.key(0), jnp.zeros((1, 9), jnp.int32), -5)
