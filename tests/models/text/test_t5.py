import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from flax.traverse_util import flatten_dict
from transformers.models.t5.modeling_t5 import T5Attention

from digen_jax.checkpoints.folder import open_tensors, read_params
from digen_jax.checkpoints.tensors import tensor_names
from digen_jax.models.family import logical_axes
from digen_jax.models.text.t5 import (
    AXES,
    IGNORED,
    LISTS,
    T5Config,
    T5EncoderModel,
    relative_buckets,
)
from tests.models import parity

# The heads together are narrower than d_model.
TINY = dict(architectures=["T5EncoderModel"], model_type="t5", is_encoder_decoder=False)
TINY |= dict(dropout_rate=0.1, vocab_size=50, d_model=24, d_kv=5, d_ff=40, num_layers=3)
TINY |= dict(num_heads=3, relative_attention_num_buckets=8, relative_attention_max_distance=10)
TINY |= dict(layer_norm_epsilon=0.1, feed_forward_proj="gated-gelu")
UMT5 = {**TINY, "architectures": ["UMT5EncoderModel"], "model_type": "umt5"}
CASES = {
    "t5": TINY,
    "umt5": UMT5,
    "t5, relu, one layer, wide heads": {
        **TINY,
        "feed_forward_proj": "relu",
        "num_layers": 1,
        "d_kv": 11,
    },
}


def torch_module(config: dict) -> torch.nn.Module:
    """Without transformers' fused attention, whose sums have another order."""
    kinds = {
        "t5": (transformers.T5Config, transformers.T5EncoderModel),
        "umt5": (transformers.UMT5Config, transformers.UMT5EncoderModel),
    }
    kind, module = kinds[config["model_type"]]
    kwargs = {k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    return module(kind(**kwargs, attn_implementation="eager"))


def shapes(model: T5EncoderModel):
    ids = jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(lambda key: model.init(key, ids), jax.random.key(0))["params"]


def pair(config: dict, dtype=jnp.float32):
    """transformers' module, ours, and its parameters in our tree."""
    module = parity.randomise(torch_module(config))
    with torch.no_grad():  # so that the embedding and the distances matter
        module.shared.weight.mul_(3)
        for name, table in module.named_parameters():
            if "relative_attention_bias" in name:
                table.mul_(2)
    model = T5EncoderModel(T5Config.from_config(config), dtype)
    tensors = dict(module.named_parameters())  # without the tied copy of the embedding
    return module, model, parity.to_flax(tensors, shapes(model), LISTS)


def prompts() -> tuple[np.ndarray, np.ndarray]:
    """Ids of an odd length, beyond the last distance with a bucket of its own, and masks with padding and holes."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 50, (3, 23))
    mask = np.ones(ids.shape, bool)
    mask[0, 9:] = False
    mask[1] = rng.random(23) < 0.6
    return ids, mask


def states(module: torch.nn.Module, ids: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    given = None if mask is None else torch.tensor(mask).long()
    with torch.no_grad():
        found = module(torch.tensor(ids), attention_mask=given).last_hidden_state
    return found.float().numpy()


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_equals_transformers(config):
    module, model, params = pair(config)
    ids, mask = prompts()
    run = jax.jit(lambda params, ids, mask: model.apply({"params": params}, ids, mask))
    expected = states(module, ids, None), states(module, ids, mask)
    with jax.default_matmul_precision("highest"):
        actual = run(params, ids, None), run(params, ids, mask)
    assert parity.worst(list(actual), list(expected))[0] < 1e-5
    axes = flatten_dict(logical_axes(params, AXES, LISTS))
    assert all(len(axes[path]) == leaf.ndim for path, leaf in flatten_dict(params).items())
    # Padding that is masked does not matter, and padding that is not does.
    changed = np.where(mask, ids, 7)
    assert np.abs(run(params, changed, mask)[mask] - actual[1][mask]).max() < 1e-5
    assert np.abs(run(params, changed, None)[mask] - actual[0][mask]).max() > 1e-2


@pytest.mark.parametrize(
    ("buckets", "distance"), [(32, 128), (8, 10), (33, 100), (16, 1000), (4, 2)]
)
def test_buckets_are_transformers_at_every_distance(buckets, distance):
    tokens = 1100
    expected = T5Attention._relative_position_bucket(
        torch.arange(tokens)[None, :] - torch.arange(tokens)[:, None],
        num_buckets=buckets,
        max_distance=distance,
    )
    np.testing.assert_array_equal(relative_buckets(tokens, buckets, distance), expected.numpy())


def test_bfloat16_errs_less_than_torch():
    """From float32 weights, and from those that lie in bfloat16."""
    module, model, params = pair(TINY, jnp.bfloat16)
    ids, mask = prompts()
    exact = states(module, ids, mask)

    def error(found) -> float:
        return np.sqrt(np.mean((np.asarray(found, np.float32) - exact) ** 2))

    theirs = error(states(module.to(torch.bfloat16), ids, mask))
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    run = jax.jit(model.apply)
    for given in (params, rounded):
        actual = run({"params": given}, ids, mask)
        assert actual.dtype == jnp.bfloat16
        assert 1e-3 * np.abs(exact).max() < error(actual) < 1.5 * theirs


@pytest.mark.parametrize(("config", "shard"), [(TINY, "5GB"), (UMT5, "4KB")], ids=["t5", "umt5"])
def test_a_folder_of_transformers_is_read_each_tensor_once(config, shard, tmp_path, monkeypatch):
    module, model, params = pair(config)
    module.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "4KB")
    written = json.loads((tmp_path / "config.json").read_text())
    assert T5Config.from_config(written) == model.config
    tensors = open_tensors(tmp_path)
    assert "shared.weight" in tensors and not tensors.keys() & set(IGNORED)
    wanted = [name for path in flatten_dict(shapes(model)) for name in tensor_names(path, LISTS)]
    assert sorted(wanted) == sorted(tensors)
    found = read_params(tmp_path, shapes(model), LISTS)
    assert parity.worst(found, params)[0] == 0


def test_the_tied_copy_of_the_embedding_may_be_in_the_file(tmp_path):
    module, model, params = pair(TINY)
    tensors = {name: tensor.clone().contiguous() for name, tensor in module.state_dict().items()}
    assert tensors.keys() - dict(module.named_parameters()).keys() == set(IGNORED)
    transformers.modeling_utils.safe_save_file(tensors, tmp_path / "model.safetensors")
    found = read_params(tmp_path, shapes(model), LISTS, ignore=IGNORED)
    assert parity.worst(found, params)[0] == 0
    with pytest.raises(ValueError, match=r"encoder.embed_tokens.weight .* is unexpected"):
        read_params(tmp_path, shapes(model), LISTS)


def test_defaults_are_transformers():
    for kind in (transformers.T5Config, transformers.UMT5Config):
        written = {"model_type": kind.model_type}
        assert T5Config.from_config(written) == T5Config.from_config(kind().to_dict())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("feed_forward_proj", "gated-silu"),
        ("model_type", "mt5"),
        ("relative_attention_num_buckets", 3),
        ("relative_attention_max_distance", 2),
        ("num_heads", 0),
    ],
)
def test_an_unsupported_field_is_named(field, value):
    with pytest.raises(ValueError, match=f"^{field} must"):
        T5Config.from_config({**TINY, field: value})
