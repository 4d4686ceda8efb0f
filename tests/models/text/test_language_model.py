import copy
import fnmatch
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from digen_jax.checkpoints import folder
from digen_jax.models.family import logical_axes
from digen_jax.models.text.language_model import (
    AXES,
    LISTS,
    LanguageModel,
    LanguageModelConfig,
    canonical_name,
    state_indices,
    unused,
)
from tests.cases import quick
from tests.models import parity

TEXT = dict(vocab_size=50, hidden_size=24, intermediate_size=40, num_hidden_layers=5)
TEXT |= dict(num_attention_heads=6, num_key_value_heads=2, hidden_act="silu")
TEXT |= dict(max_position_embeddings=512, rms_norm_eps=0.01, bos_token_id=None, eos_token_id=None)
VISION = dict(depth=1, hidden_size=16, intermediate_size=24, num_heads=2, out_hidden_size=24)
VISION |= dict(patch_size=4)
# As files of transformers 4 and 5 spell them.
QWEN2_5_VL = TEXT | dict(model_type="qwen2_5_vl", rope_theta=1e6)
QWEN2_5_VL |= dict(rope_scaling={"type": "mrope", "mrope_section": [1, 0, 1]})
QWEN2_5_VL |= dict(use_sliding_window=False, sliding_window=4, max_window_layers=2)
QWEN2_5_VL |= dict(vision_config=VISION, tie_word_embeddings=False)
QWEN2_5_VL_OF_5 = {
    "model_type": "qwen2_5_vl",
    "vision_config": VISION,
    "text_config": {
        **TEXT,
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]},
    },
}
QWEN3 = TEXT | dict(model_type="qwen3", head_dim=10, rope_theta=1_000_000, rope_scaling=None)
QWEN3 |= dict(tie_word_embeddings=True, layer_types=["full_attention"] * 5)
LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=0.3, high_freq_factor=3.0)
LLAMA3 |= dict(original_max_position_embeddings=32)
LLAMA = TEXT | dict(model_type="llama", head_dim=16, rope_theta=500.0, rope_scaling=LLAMA3)
LLAMA |= dict(attention_bias=True, mlp_bias=True)
MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 8, "sliding_window": 9}
QWEN2 = {**TEXT, "model_type": "qwen2", "rope_parameters": {"rope_theta": 1e6}}
CASES = {
    "qwen2_5_vl": QWEN2_5_VL,
    "qwen2_5_vl of transformers 5": QWEN2_5_VL_OF_5,
    "qwen3": QWEN3,
    "qwen3 with biases": {**QWEN3, "attention_bias": True, "tie_word_embeddings": False},
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
}
CLASSES = {
    "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
    "qwen3": transformers.Qwen3ForCausalLM,
    "llama": transformers.LlamaForCausalLM,
    "mistral": transformers.MistralForCausalLM,
    "qwen2": transformers.Qwen2ForCausalLM,
}
# Two scans and a single layer, and the embeddings; not in order.
STATES = (-2, 0, 2, -1)


def torch_module(config: dict) -> torch.nn.Module:
    kind = CLASSES[config["model_type"]]
    # A copy, because transformers changes the fields of rope in place.
    return kind(kind.config_class.from_dict(copy.deepcopy(config)))


def is_unused(name: str, config: LanguageModelConfig, states: tuple[int, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in unused(config, states))


def read_by(module: torch.nn.Module, model: LanguageModel) -> dict[str, torch.Tensor]:
    """The tensors that a model reads, by their canonical names."""
    tensors = {canonical_name(name): tensor for name, tensor in module.state_dict().items()}
    return {n: t for n, t in tensors.items() if not is_unused(n, model.config, model.states)}


def shapes(model: LanguageModel):
    ids = jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(lambda key: model.init(key, ids, ids), jax.random.key(0))["params"]


def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Ids and masks of texts of 9, 4 and 1 tokens, with padding behind them."""
    ids = np.random.default_rng(0).integers(0, 50, (3, 9)).astype(np.int32)
    mask = (np.arange(9) < np.array([9, 4, 1])[:, None]).astype(np.int32)
    return np.where(mask, ids, 7), mask


def of_torch(module: torch.nn.Module, states: tuple[int, ...]) -> list[np.ndarray]:
    ids, mask = (torch.tensor(array) for array in prompts())
    with torch.no_grad():
        out = module(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    return [out.hidden_states[state].float().numpy() for state in states]


def ours(model: LanguageModel, params) -> list[jax.Array]:
    with jax.default_matmul_precision("highest"):
        return list(jax.jit(model.apply)({"params": params}, *prompts()))


@functools.cache
def oracle(case: str):
    """transformers' module with random parameters, and its hidden states."""
    module = parity.randomise(torch_module(CASES[case]))
    return module, of_torch(module, STATES)


@pytest.mark.parametrize("case", quick([(case,) for case in CASES], 0, 2, 4, 5))
def test_hidden_states_equal_transformers(case):
    module, expected = oracle(case)
    # Programs of the last state alone compile faster.
    first = 0 if case in ("qwen2_5_vl", "qwen3") else len(STATES) - 1
    model = LanguageModel(LanguageModelConfig.from_config(CASES[case]), STATES[first:])
    params = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    actual = ours(model, params)
    for state, a, e in zip(STATES[first:], actual, expected[first:], strict=True):
        assert parity.worst([a], [e])[0] < 1e-5, state
    ranks = jax.tree.map(np.ndim, params)
    axes = logical_axes(params, AXES, LISTS)
    assert ranks == jax.tree.map(len, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


def test_bfloat16_is_as_close_as_in_torch():
    case = "qwen3"
    module, expected = oracle(case)
    model = LanguageModel(LanguageModelConfig.from_config(CASES[case]), STATES, jnp.bfloat16)
    params = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    actual = ours(model, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))
    rounded = parity.randomise(torch_module(CASES[case])).to(torch.bfloat16)
    of_bfloat16 = of_torch(rounded, STATES)
    assert {a.dtype for a in actual} == {jnp.dtype(jnp.bfloat16)}
    for state, a, t, e in zip(STATES, actual, of_bfloat16, expected, strict=True):
        torchs, own = (np.sqrt(np.square(np.asarray(x, np.float32) - e).mean()) for x in (t, a))
        assert 1e-4 < own <= 1.5 * torchs, (state, own, torchs)


def test_only_the_states_asked_for_are_kept():
    model = LanguageModel(LanguageModelConfig.from_config(QWEN3), (4,))
    program = str(jax.make_jaxpr(model.apply)({"params": shapes(model)}, *prompts()))
    assert "3,9,24]" in program and "4,3,9,24]" not in program
    assert "4,24,60]" in program  # the scan's stacked projections, written in the same way


@pytest.mark.parametrize(
    ("case", "saved", "states"),
    [
        ("qwen2_5_vl", "published", (1, 3)),
        ("qwen2_5_vl", "in memory", (-1,)),
        ("qwen2_5_vl", "without a head", (-1,)),
        ("qwen3", "sharded", (1, 3)),
        ("qwen3", "without a head", (1, 3)),
    ],
)
def test_a_folder_is_read(case, saved, states, tmp_path):
    module, _ = oracle(case)
    if saved == "in memory":
        tensors = {n: t.clone() for n, t in module.state_dict().items()}
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    else:
        whole = module.model if saved == "without a head" else module
        whole.save_pretrained(tmp_path, max_shard_size="16KB" if saved == "sharded" else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 or saved != "sharded"
    config = LanguageModelConfig.from_config(CASES[case])
    model = LanguageModel(config, states)
    actual = folder.read_params(
        tmp_path, shapes(model), LISTS, ignore=unused(config, states), rename=canonical_name
    )
    expected = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    assert parity.worst(actual, expected)[0] == 0


def test_a_parameter_under_two_names_is_refused(tmp_path):
    tensors = {name: torch.zeros(24) for name in ("norm.weight", "model.norm.weight")}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"both .*norm\.weight and .*norm\.weight"):
        folder.read_params(tmp_path, {}, LISTS, rename=canonical_name)


def test_a_surplus_tensor_is_refused(tmp_path):
    module, _ = oracle("qwen3")
    tensors = {n: t.clone() for n, t in module.state_dict().items()}
    tensors["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(60)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    config = LanguageModelConfig.from_config(QWEN3)
    with pytest.raises(ValueError, match=r"q_proj\.bias .*surplus"):
        folder.read_params(
            tmp_path,
            shapes(LanguageModel(config)),
            LISTS,
            ignore=unused(config, (-1,)),
            rename=canonical_name,
        )


@pytest.mark.parametrize("states", [(6,), (1, -7), ()], ids=str)
def test_a_state_that_is_not_there_is_refused(states):
    with pytest.raises(ValueError, match="hidden state"):
        state_indices(LanguageModelConfig.from_config(QWEN3), states)


# ------------------------------------------------------------------------------------------ fields


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
