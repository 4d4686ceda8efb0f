"""The mesh axis that splits each dimension of a parameter."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from digen_jax.errors import ConfigError
from digen_jax.families import load_family
from digen_jax.models.family import NAMES
from digen_jax.parallel.mesh import REPLICATED, ShardingRules, axis_sizes
from tests.parallel import toy
from tests.pipelines import ROOT

FSDP = ((".*", "fsdp"),)
# MaxText's rules: the width over fsdp, inner widths over tensor.
COMPOSED = (
    ("transformer/", "heads", "tensor"),
    ("transformer/", "mlp", "tensor"),
    (".*", "embed", "fsdp"),
    (".*", "replicate"),
)
BLOCK = "transformer/transformer_blocks_0to2"
SHAPES = {
    f"{BLOCK}/attn/to_q/kernel": (3, 128, 128),
    f"{BLOCK}/attn/add_k_proj/bias": (3, 128),
    f"{BLOCK}/attn/norm_q/scale": (3, 32),
    f"{BLOCK}/attn/to_out_0/kernel": (3, 128, 128),
    f"{BLOCK}/ff/net_0/proj/kernel": (3, 128, 512),
    f"{BLOCK}/ff/net_2/kernel": (3, 512, 128),
    f"{BLOCK}/ff/net_2/bias": (3, 128),
    f"{BLOCK}/norm1/linear/kernel": (3, 128, 768),
    f"{BLOCK}/attn/to_q/a": (3, 128, 4),
    f"{BLOCK}/attn/to_q/b": (3, 4, 128),
    f"{BLOCK}/attn/to_out_0/a": (3, 128, 4),
    "transformer/pos_embed/pos_embed": (1, 256, 128),
    "transformer/proj_out/kernel": (128, 32),
    "text_encoder/text_model/embeddings/token_embedding/embedding": (627, 64),
    "text_encoder/text_model/encoder/layers_0to1/mlp/fc1/kernel": (2, 64, 256),
    "vae/decoder/conv_in/kernel": (3, 3, 8, 32),
    "vae/decoder/mid_block/attentions_0/to_q/kernel": (32, 32),
}


@pytest.fixture(scope="module")
def family():
    return load_family(ROOT / "assets" / "shapes-sd3")


def test_every_dimension_of_every_component_has_a_name_that_says_how_large_it_is(family):
    shapes, axes = flatten_dict(family.shapes()), flatten_dict(family.axes())
    assert shapes.keys() == axes.keys()
    sizes = {}
    for path, leaf in shapes.items():
        assert len(axes[path]) == len(leaf.shape), path
        for name, size in zip(axes[path], leaf.shape, strict=True):
            sizes.setdefault((path[0], name), set()).add(size)
    assert {name for _, name in sizes} - {None} <= set(NAMES)
    config = family.transformer.config
    assert sizes["transformer", "embed"] == sizes["transformer", "heads"] == {config.dim}
    assert sizes["transformer", "mlp"] == {4 * config.dim, config.dim}  # of blocks, of embedders
    assert sizes["transformer", "head_dim"] == {config.attention_head_dim}
    assert sizes["transformer", "modulation"] == {6 * config.dim, 2 * config.dim}
    assert sizes["transformer", "layers"] == {3}
    text = family.text_encoder.config
    assert sizes["text_encoder", "embed"] == {text.hidden_size}
    assert sizes["text_encoder", "vocab"] == {text.vocab_size}
    assert sizes["text_encoder", "mlp"] == {text.intermediate_size}


def specs(family, rules, monkeypatch, **sizes):
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 2**10)
    layout = ShardingRules.of(rules, family.axes())
    return {
        name.removeprefix(f"{BLOCK}/"): tuple(layout.spec(name, shape, axis_sizes(**sizes)))
        for name, shape in SHAPES.items()
    }


def test_by_default_tensor_splits_as_megatron_does_and_fsdp_what_is_left(family, monkeypatch):
    assert specs(family, FSDP, monkeypatch, fsdp=2, tensor=2) == {
        "attn/to_q/kernel": (None, "fsdp", "tensor"),
        "attn/add_k_proj/bias": (None, "tensor"),
        "attn/norm_q/scale": (),
        "attn/to_out_0/kernel": (None, "tensor", "fsdp"),
        "ff/net_0/proj/kernel": (None, "fsdp", "tensor"),
        "ff/net_2/kernel": (None, "tensor", "fsdp"),
        "ff/net_2/bias": (),
        "norm1/linear/kernel": (None, None, "fsdp"),
        "attn/to_q/a": (None, "fsdp"),
        "attn/to_q/b": (None, "fsdp", "tensor"),
        "attn/to_out_0/a": (None, "tensor", "fsdp"),
        "transformer/pos_embed/pos_embed": (None, "fsdp"),
        "transformer/proj_out/kernel": ("fsdp",),
        "text_encoder/text_model/embeddings/token_embedding/embedding": (None, "fsdp"),
        "text_encoder/text_model/encoder/layers_0to1/mlp/fc1/kernel": (None, "fsdp", "tensor"),
        "vae/decoder/conv_in/kernel": (None, None, None, "fsdp"),
        "vae/decoder/mid_block/attentions_0/to_q/kernel": ("fsdp",),
    }
    replicated = specs(family, REPLICATED, monkeypatch, fsdp=2, tensor=2)
    assert replicated["attn/to_q/kernel"] == (None, None, "tensor")
    assert replicated["norm1/linear/kernel"] == ()


def test_fsdp_splits_layers_only_if_a_rule_names_them(family, monkeypatch):
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 16)
    deep, sizes = (600, 128, 128), axis_sizes(fsdp=2)
    for rules, spec in ((FSDP, (None, "fsdp")), ((("", "layers", "fsdp"), *FSDP), ("fsdp",))):
        layout = ShardingRules.of(rules, family.axes())
        assert tuple(layout.spec(f"{BLOCK}/attn/to_q/kernel", deep, sizes)) == spec


def test_rules_over_logical_axes_compose_and_hold_for_the_components_that_they_name(
    family, monkeypatch
):
    found = specs(family, COMPOSED, monkeypatch, fsdp=4, tensor=2)
    assert found["attn/to_q/kernel"] == (None, "fsdp", "tensor")
    assert found["attn/to_out_0/kernel"] == (None, "tensor", "fsdp")
    assert found["norm1/linear/kernel"] == (None, "fsdp")
    assert found["attn/to_q/a"] == (None, "fsdp") and found["attn/to_q/b"] == (None, None, "tensor")
    encoder = "text_encoder/text_model/encoder/layers_0to1/mlp/fc1/kernel"
    assert found[encoder] == (None, "fsdp") and found["vae/decoder/conv_in/kernel"] == ()


@pytest.mark.parametrize(
    ("rules", "sizes", "spec"),
    [
        (FSDP, dict(), ()),
        (FSDP, dict(fsdp=2), (None, "fsdp")),  # of two equal dimensions the first
        (FSDP, dict(fsdp=5), ()),
        (REPLICATED, dict(fsdp=2), ()),
        (FSDP, dict(tensor=3), ()),  # which divides no dimension
        ((("to_q", "replicate"), *FSDP), dict(fsdp=2, tensor=2), (None, None, "tensor")),
        ((("to_q", "replicate"), ("", "mlp", "tensor")), dict(fsdp=2, tensor=2), ()),
        ((("", "heads", "fsdp"), *FSDP), dict(fsdp=2), (None, None, "fsdp")),
        # The first rule that can be applied gets the dimension.
        (
            (("", "heads", "fsdp"), ("", "heads", "tensor")),
            dict(fsdp=2, tensor=2),
            (None, None, "fsdp"),
        ),
        (
            (("", "heads", "fsdp"), ("", "heads", "tensor")),
            dict(fsdp=5, tensor=2),
            (None, None, "tensor"),
        ),
        ((("", "layers", "fsdp"), *FSDP), dict(fsdp=3), ("fsdp",)),
    ],
)
def test_rules_apply_in_their_order(family, monkeypatch, rules, sizes, spec):
    assert specs(family, rules, monkeypatch, **sizes)["attn/to_q/kernel"] == spec


def test_a_rule_about_no_parameter_is_refused(family):
    ShardingRules.of((*COMPOSED, ("to_q", "rank", "fsdp")), family.axes()).check()
    for rule in (("transformr/", "mlp", "tensor"), ("vae/", "mlp", "tensor")):
        with pytest.raises(ConfigError, match=rf"^config\.placement\.rules .*{rule[0]}"):
            ShardingRules.of((rule, *FSDP), family.axes()).check()


def test_bytes_on_a_device_are_those_of_its_shards(monkeypatch):
    monkeypatch.setattr("digen_jax.parallel.mesh.FSDP_MIN_SIZE", 16)
    config = toy.config(**toy.meshes((0, 1), (2, 2)))
    config.placement.trainer.tensor = 2
    system = toy.system(config)
    trees = system.start, system.base
    held = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(trees))
    group = system.placement.trainer
    assert sum(group.layout.bytes(tree, group.mesh.shape) for tree in trees) == held
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(trees))
    assert held < 0.5 * whole and np.prod(list(group.mesh.shape.values())) == 8
