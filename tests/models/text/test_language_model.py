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
from digen_jax.checkpoints.tensors import file_shape, tensor_names
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
from tests.models import parity

TEXT = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.01,
    "bos_token_id": None,
    "eos_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 24,
    "patch_size": 4,
}
# As files of transformers 4 and 5 spell them.
QWEN2_5_VL = {
    **TEXT,
    "model_type": "qwen2_5_vl",
    "rope_theta": 1e6,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 0, 1]},
    "use_sliding_window": False,
    "sliding_window": 4,
    "max_window_layers": 2,
    "vision_config": VISION,
    "tie_word_embeddings": False,
}
QWEN2_5_VL_OF_5 = {
    "model_type": "qwen2_5_vl",
    "vision_config": VISION,
    "text_config": {
        **TEXT,
        "model_type": "qwen2_5_vl_text",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 0]},
    },
}
QWEN3 = {
    **TEXT,
    "model_type": "qwen3",
    "head_dim": 10,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "layer_types": ["full_attention"] * 5,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 0.3,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
LLAMA = {
    **TEXT,
    "model_type": "llama",
    "head_dim": 16,
    "rope_theta": 500.0,
    "rope_scaling": LLAMA3,
    "attention_bias": True,
    "mlp_bias": True,
}
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

QWEN2_5_VL_7B = {
    **QWEN2_5_VL,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {"hidden_size": 1280, "out_hidden_size": 3584, "depth": 32},
}
QWEN3_4B = {
    **QWEN3,
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "layer_types": None,
}
QWEN3_8B = {
    **QWEN3_4B,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "tie_word_embeddings": False,
}


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


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_transformers(case):
    module, expected = oracle(case)
    # Programs of the last state alone compile faster.
    first = 0 if case in ("qwen2_5_vl", "qwen3") else len(STATES) - 1
    model = LanguageModel(LanguageModelConfig.from_config(CASES[case]), STATES[first:])
    params = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    actual = ours(model, params)
    for state, a, e in zip(STATES[first:], actual, expected[first:], strict=True):
        assert parity.worst([a], [e])[0] < 1e-5, state


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
def test_a_folder_is_read_with_each_tensor_once(case, saved, states, tmp_path, monkeypatch):
    module, _ = oracle(case)
    if saved == "in memory":
        tensors = {n: t.clone() for n, t in module.state_dict().items()}
        safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    else:
        whole = module.model if saved == "without a head" else module
        whole.save_pretrained(tmp_path, max_shard_size="16KB" if saved == "sharded" else "1GB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3 or saved != "sharded"
    reads = {}

    class Counted:
        def __init__(self, name, part):
            self.name, self.part = name, part
            self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

        def __getitem__(self, index):
            reads[self.name] = reads.get(self.name, 0) + 1
            return self.part[index]

    def opened(path):
        return {n: t._replace(slice=Counted(n, t.slice)) for n, t in open_tensors(path).items()}

    open_tensors = folder.open_tensors
    monkeypatch.setattr(folder, "open_tensors", opened)
    config = LanguageModelConfig.from_config(CASES[case])
    model = LanguageModel(config, states)
    actual = folder.read_params(
        tmp_path, shapes(model), LISTS, ignore=unused(config, states), rename=canonical_name
    )

    expected = parity.to_flax(read_by(module, model), shapes(model), LISTS)
    assert parity.worst(actual, expected)[0] == 0
    for name in open_tensors(tmp_path):
        is_read = not is_unused(canonical_name(name), config, states)
        assert reads.get(name, 0) == is_read, name
    assert sum(reads.values()) == len(read_by(module, model))


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


@pytest.mark.parametrize(
    ("config", "states"),
    [
        (QWEN2_5_VL_7B, (-1,)),
        (QWEN3_4B, (-2,)),
        (QWEN3_4B, (9, 18, 27)),
        (QWEN3_8B, (9, 18, 27)),
        (QWEN3_8B, (-1,)),
    ],
    ids=["Qwen-Image", "Z-Image", "klein 4B", "klein 9B", "8B whole"],
)
def test_the_real_encoders_have_the_names_and_shapes_of_transformers(config, states):
    with torch.device("meta"):
        module = torch_module(config)
    model = LanguageModel(LanguageModelConfig.from_config(config), states)
    tree = shapes(model)
    actual = {
        name: file_shape(path, leaf.shape, LISTS)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        for path in [tuple(key.key for key in path)]
        for name in tensor_names(path, LISTS)
    }
    expected = {name: tuple(tensor.shape) for name, tensor in read_by(module, model).items()}
    assert actual == expected
    axes = logical_axes(tree, AXES, LISTS)
    ranks = jax.tree.map(lambda leaf: len(leaf.shape), tree)
    assert ranks == jax.tree.map(len, axes, is_leaf=lambda leaf: isinstance(leaf, tuple))


@pytest.mark.parametrize("states", [(6,), (1, -7), ()], ids=str)
def test_a_state_that_is_not_there_is_refused(states):
    with pytest.raises(ValueError, match="hidden state"):
        state_indices(LanguageModelConfig.from_config(QWEN3), states)
