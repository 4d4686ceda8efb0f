import dataclasses
import functools
import json
import shutil

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import safetensors
import safetensors.torch
import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from digen_jax.checkpoints import lora as components
from digen_jax.checkpoints import lora_files, tensors
from digen_jax.checkpoints.lora import LoraConfig, lora_layers, merge
from digen_jax.checkpoints.lora_files import PEFT_CONFIG, PEFT_FILE
from digen_jax.errors import ConfigError
from digen_jax.models.sd3 import network as sd3
from tests.checkpoints import toy
from tests.models import parity

KEY = jax.random.key(3)
TOY = LoraConfig(rank=3, alpha=5.0, targets=r"linear_1|blocks\.\d+\.to_out\.0")


@functools.cache
def toy_params():
    return parity.to_flax(toy.TorchToy().state_dict(), toy.template(), toy.LISTS)


# Of a pipeline with one component, "transformer".


def lora_init(key, template, config, lists):
    templates, lists = {"transformer": template}, {"transformer": lists}
    return components.lora_init(key, templates, config, lists)["transformer"]


def write_lora(path, factors, alpha, lists, prefix="transformer"):
    lora_files.write_lora(path, {prefix: factors}, alpha, {prefix: lists})


def read_lora(path, template, lists, shardings=None):
    templates, lists = {"transformer": template}, {"transformer": lists}
    return lora_files.read_lora(path, templates, lists, shardings)["transformer"]


def read_initial_lora(path, config, template, lists):
    templates, lists = {"transformer": template}, {"transformer": lists}
    return lora_files.read_initial_lora(path, config, templates, lists)["transformer"]


def redrawn(lora, seed=1):
    """Both factors are random: with B = 0 mistakes would not show."""
    draw = np.random.default_rng(seed).standard_normal
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * draw(leaf.shape), leaf.dtype), lora)


@functools.cache
def toy_lora():
    return redrawn(lora_init(KEY, toy.template(), TOY, toy.LISTS))


@functools.partial(jax.jit, static_argnames="dtype")
def apply_toy(params, lora, dtype=None):
    variables = {"params": params, "lora": lora}
    with jax.default_matmul_precision("highest"), lora_layers(TOY.scale):
        return toy.Toy(dtype).apply(variables, *toy.inputs())


# -------------------------------------------------------------------------------------- training


def test_activations_are_those_of_merged_weights():
    params, lora = toy_params(), toy_lora()
    expected = toy.output(merge(params, lora, TOY.scale))
    assert np.abs(expected - toy.output(params)).max() > 0.1
    np.testing.assert_allclose(apply_toy(params, lora), expected, atol=1e-5)


def test_gradient_through_scan_and_remat_is_that_of_merged_weights():
    params, lora = toy_params(), toy_lora()

    def through_activations(lora):
        return jnp.sum(jnp.sin(apply_toy(params, lora)))

    def through_weights(lora):
        merged = merge(params, lora, TOY.scale)
        with jax.default_matmul_precision("highest"):
            return jnp.sum(jnp.sin(toy.Toy().apply({"params": merged}, *toy.inputs())))

    actual = jax.jit(jax.grad(through_activations))(lora)
    expected = jax.jit(jax.grad(through_weights))(lora)
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    for path, leaf in flatten_dict(actual).items():
        reference = flatten_dict(expected)[path]
        assert float(jnp.abs(reference).max()) > 0
        np.testing.assert_allclose(leaf, reference, atol=1e-5 * largest)


def products(jaxpr) -> set[tuple[int, ...]]:
    """Shapes of every matrix product in a jaxpr and those it contains."""
    shapes = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            shapes.add(equation.outvars[0].aval.shape)
        for parameter in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda p: hasattr(p, "eqns")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                shapes |= products(inner)
    return shapes


def test_neither_the_product_of_the_factors_nor_a_gradient_of_weights_is_formed():
    params, lora = toy_params(), toy_lora()

    def loss(params, lora):
        return jnp.sum(apply_toy(params, lora))

    tuned_lora = products(jax.make_jaxpr(jax.grad(loss, argnums=1))(params, lora).jaxpr)
    tuned_fully = products(jax.make_jaxpr(jax.grad(loss))(params, lora).jaxpr)
    weights = {(8, 8), (12, 8), (8, 12)}
    assert {(8, 3), (3, 8)} & tuned_lora
    assert not weights & tuned_lora
    assert weights & tuned_fully


def test_compute_type_stays_what_the_network_says():
    lora = toy_lora()
    out = apply_toy(jax.tree.map(jnp.bfloat16, toy_params()), lora, dtype=jnp.bfloat16)
    assert out.dtype == jnp.bfloat16
    expected = apply_toy(toy_params(), lora)
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected, atol=0.06 * np.abs(expected).max()
    )


@pytest.mark.parametrize(
    ("init", "pefts", "std"), [("kaiming", True, 1200**-0.5), ("gaussian", "gaussian", 1 / 50)]
)
def test_initial_factors_are_pefts(init, pefts, std):
    """Their distribution: the std by formula, and the quantiles of PEFT's own draw."""
    template = {"linear_1": {"kernel": jax.ShapeDtypeStruct((400, 8), jnp.bfloat16)}}
    config = LoraConfig(50, 1.0, "linear_1", init)
    a, b = lora_init(KEY, template, config, ())["linear_1"].values()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(400, 8))
    settings = peft.LoraConfig(r=50, target_modules=["0"], init_lora_weights=pefts)
    reference = peft.get_peft_model(model, settings)
    theirs = reference.base_model.model[0].lora_A["default"].weight.detach().numpy()
    assert (a.shape, b.shape, a.dtype) == ((400, 50), (50, 8), jnp.float32)
    assert not b.any()
    assert float(a.std()) == pytest.approx(std, rel=0.02)
    assert float(theirs.std()) == pytest.approx(std, rel=0.02)
    shares = np.linspace(0, 1, 21)[1:-1]
    np.testing.assert_allclose(
        np.quantile(a, shares), np.quantile(theirs, shares), rtol=0, atol=0.05 * std
    )


def test_initial_factors_do_not_depend_on_how_layers_are_scanned():
    one, other = (lora_init(KEY, toy.template(cut), TOY, toy.LISTS) for cut in (False, True))
    stacked = np.concatenate([other[f"blocks_{run}"]["to_out_0"]["a"] for run in ("0to1", "2to3")])
    np.testing.assert_array_equal(one["blocks_0to2"]["to_out_0"]["a"], stacked[:3])
    np.testing.assert_array_equal(one["blocks_3"]["to_out_0"]["a"], stacked[3])
    assert len({row.tobytes() for row in stacked}) == 4


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (r"blocks\.3\.to_in", {("blocks_3", "to_in")}),
        ("blocks.*to_in", {("blocks_0to2", "to_in"), ("blocks_3", "to_in")}),
        (r"blocks\.[012]\.to_out\.0", {("blocks_0to2", "to_out_0")}),
    ],
)
def test_targets_choose_layers(targets, expected):
    lora = lora_init(KEY, toy.template(), LoraConfig(2, 2, targets), toy.LISTS)
    assert {path[:-1] for path in flatten_dict(lora)} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1, 1, "(to_q"), r"'\(to_q' .*position 0"),
        ((1, 1, "to_in"), r"'to_in' .*none of the 9 .*blocks\."),
        ((1, 1, "proj|embed"), "none"),
        ((1, 1, r"blocks\.[13]\.to_in"), r"blocks.1.to_in .*blocks.0.to_in"),
    ],
)
def test_impossible_configs_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        lora_init(KEY, toy.template(), LoraConfig(*fields), toy.LISTS)


# -------------------------------------------------------------------------------------- files


@pytest.fixture(scope="module")
def pefts(tmp_path_factory):
    """A LoRA saved by PEFT as in Flow-GRPO's code, and the output of torch with PEFT."""
    path = tmp_path_factory.mktemp("peft")
    settings = dict(r=3, lora_alpha=5, init_lora_weights="gaussian")
    config = peft.LoraConfig(**settings, target_modules=["linear_1", "to_out.0"])
    model = peft.get_peft_model(toy.TorchToy(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    return path, toy.torch_output(peft.PeftModel.from_pretrained(toy.TorchToy(), path))


def test_a_lora_that_peft_saved_is_read(pefts):
    path, expected = pefts
    assert {file.name for file in path.iterdir()} >= {PEFT_CONFIG, PEFT_FILE}
    lora, rank, alpha = read_lora(path, toy.template(), toy.LISTS)
    assert (rank, alpha) == (3, 5.0)
    assert jax.tree.map(jnp.shape, lora) == jax.tree.map(jnp.shape, toy_lora())
    assert np.abs(expected - toy.torch_output(toy.TorchToy())).max() > 0.1
    np.testing.assert_allclose(apply_toy(toy_params(), lora), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_rslora": True}, "use_rslora=True"),
        ({"modules_to_save": ["proj_out"]}, r"modules_to_save=\['proj_out'\].*merge_and_unload"),
        ({"bias": "all"}, "bias=all"),
        ({"peft_type": "LOHA"}, "peft_type=LOHA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa"),
        ({"lora_alpha": "7"}, "lora_alpha=7"),
        ({"lora_alpha": 9}, "alpha 9, but config.lora.alpha is 5"),
        ({"r": 8}, r" 8, .* rank 3"),
    ],
)
def test_an_initial_lora_with_other_settings_is_refused(pefts, tmp_path, change, message):
    path = shutil.copytree(pefts[0], tmp_path / "lora")
    settings = json.loads((path / PEFT_CONFIG).read_text()) | change
    (path / PEFT_CONFIG).write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=message):
        read_initial_lora(str(path), TOY, toy.template(), toy.LISTS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rank=4), "rank 3, but config.lora.rank is 4"),
        (dict(alpha=3.0), "alpha 5, but config.lora.alpha is 3"),
        (dict(targets=r"blocks\.\d+\.to_out\.0"), "does not match linear_1, for"),
        (dict(targets=r"linear_1|blocks.*to_(in|out\.0)"), r"blocks\.0\.to_in and 3 more"),
    ],
)
def test_an_initial_lora_that_differs_from_the_config_is_refused(pefts, change, message):
    config = dataclasses.replace(TOY, **change)
    with pytest.raises(ConfigError, match=message):
        read_initial_lora(str(pefts[0]), config, toy.template(), toy.LISTS)


def test_an_initial_lora_is_read_from_folders_and_files_of_both_formats(pefts, tmp_path):
    expected, *settings = read_lora(pefts[0], toy.template(), toy.LISTS)
    write_lora(tmp_path, expected, TOY.alpha, toy.LISTS)
    for path in (pefts[0], tmp_path, pefts[0] / PEFT_FILE):
        start = read_initial_lora(str(path), TOY, toy.template(), toy.LISTS)
        jax.tree.map(np.testing.assert_array_equal, start, expected)
        assert read_lora(path, toy.template(), toy.LISTS)[1:] == (*settings,) == (3, 5.0)


def test_a_diffusers_file_without_alpha_has_its_rank(tmp_path):
    write_lora(tmp_path, toy_lora(), TOY.alpha, toy.LISTS)
    file = tmp_path / "pytorch_lora_weights.safetensors"
    safetensors.torch.save_file(safetensors.torch.load_file(file), file)
    with pytest.raises(ConfigError, match=r"alpha.* rank 3"):
        read_initial_lora(str(tmp_path), TOY, toy.template(), toy.LISTS)
    read_initial_lora(str(tmp_path), dataclasses.replace(TOY, alpha=3), toy.template(), toy.LISTS)
    (tmp_path / PEFT_CONFIG).write_text('{"lora_alpha": 5}')  # as some are published
    read_initial_lora(str(tmp_path), TOY, toy.template(), toy.LISTS)


def test_an_initial_lora_without_pefts_config_or_with_nan_is_refused(pefts, tmp_path):
    shutil.copy(pefts[0] / PEFT_FILE, tmp_path)
    with pytest.raises(ValueError, match=PEFT_CONFIG):
        read_initial_lora(str(tmp_path), TOY, toy.template(), toy.LISTS)
    (tmp_path / PEFT_FILE).unlink()
    write_lora(tmp_path, jax.tree.map(lambda a: a * jnp.nan, toy_lora()), TOY.alpha, toy.LISTS)
    with pytest.raises(ValueError, match="NaN"):
        read_initial_lora(str(tmp_path), TOY, toy.template(), toy.LISTS)


def test_a_file_of_two_components_comes_back_by_component(tmp_path):
    lists = {"transformer": toy.LISTS, "transformer_2": toy.LISTS}
    written = {part: redrawn(toy_lora(), seed) for seed, part in enumerate(lists)}
    lora_files.write_lora(tmp_path, written, TOY.alpha, lists)
    templates = {part: toy.template() for part in lists}
    found = lora_files.read_lora(tmp_path, templates, lists)
    assert {part: settings for part, (_, *settings) in found.items()} == {
        part: [3, 5] for part in lists
    }
    jax.tree.map(
        np.testing.assert_array_equal, {p: lora for p, (lora, *_) in found.items()}, written
    )
    started = lora_files.read_initial_lora(str(tmp_path), TOY, templates, lists)
    jax.tree.map(np.testing.assert_array_equal, started, written)
    one = dataclasses.replace(TOY, targets=r"transformer\.(linear_1|blocks\.\d+\.to_out\.0)")
    with pytest.raises(ConfigError, match=r"blocks\.0\.to_out\.0 and 4 more"):
        lora_files.read_initial_lora(str(tmp_path), one, templates, lists)


def test_our_own_file_comes_back_bit_by_bit_onto_a_mesh(tmp_path):
    write_lora(tmp_path, toy_lora(), TOY.alpha, toy.LISTS)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    sharding = NamedSharding(mesh, PartitionSpec())
    file = tmp_path / "pytorch_lora_weights.safetensors"
    again, rank, alpha = read_lora(file, toy.template(), toy.LISTS, shardings=sharding)
    assert (rank, alpha) == (3, 5.0)
    jax.tree.map(np.testing.assert_array_equal, again, toy_lora())
    assert {leaf.sharding for leaf in jax.tree.leaves(again)} == {sharding}


def rewritten(path, change, metadata=None):
    """The file with some tensors changed (None: left out) and metadata added."""
    file = path / "pytorch_lora_weights.safetensors"
    with safetensors.safe_open(file, "pt") as handle:
        state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        settings = json.loads(handle.metadata()["lora_adapter_metadata"]) | (metadata or {})
    state = {name: tensor for name, tensor in {**state, **change}.items() if tensor is not None}
    strings = {"lora_adapter_metadata": json.dumps(settings)}
    safetensors.torch.save_file(state, file, metadata=strings)


LAYER = "transformer.blocks.1.to_out.0"


@pytest.mark.parametrize(
    ("change", "metadata", "message"),
    [
        ({f"{LAYER}.lora_B.weight": None}, {}, rf"{LAYER}.lora_B.weight .*\[8, 3\]"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(3, 11)}, {}, rf"{LAYER}.lora_A.weight .*\[3, 11\]"),
        ({"transformer.nowhere.lora_B.weight": torch.zeros(8, 3)}, {}, "nowhere.lora_B.weight"),
        ({f"{LAYER}.lora_A.weight": torch.zeros(4, 12)}, {}, r"\[3, 4\]"),
        ({}, {"transformer.r": 8}, r" 8, .* rank 3"),
        ({}, {"transformer.use_rslora": True}, "use_rslora=True"),
        ({}, {"transformer.alpha_pattern": {"x": 2}}, "alpha_pattern={'x': 2}"),
    ],
)
def test_a_lora_that_does_not_fit_is_named(tmp_path, change, metadata, message):
    write_lora(tmp_path, toy_lora(), TOY.alpha, toy.LISTS)
    rewritten(tmp_path, change, metadata)
    with pytest.raises(ValueError, match=message):
        read_lora(tmp_path, toy.template(), toy.LISTS)


@pytest.mark.parametrize("text", ["[" * 10**5, '{"transformer.r": ' + "9" * 5000 + "}"])
def test_metadata_that_cannot_be_read_names_the_file(tmp_path, text):
    file, metadata = tmp_path / "pytorch_lora_weights.safetensors", {"lora_adapter_metadata": text}
    safetensors.torch.save_file({f"{LAYER}.lora_A.weight": torch.zeros(3, 12)}, file, metadata)
    with pytest.raises(ValueError, match=file.name):
        read_lora(tmp_path, toy.template(), toy.LISTS)


def test_a_file_without_lora_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"adapter_model\.safetensors"):
        read_lora(tmp_path, toy.template(), toy.LISTS)
    with pytest.raises(ValueError, match="nowhere"):
        read_lora(tmp_path / "nowhere", toy.template(), toy.LISTS)
    write_lora(tmp_path, toy_lora(), TOY.alpha, toy.LISTS, prefix="unet")
    with pytest.raises(ValueError, match=r"unet\.blocks"):
        read_lora(tmp_path, toy.template(), toy.LISTS)


# -------------------------------------------------------------------------- files of other programs


@functools.cache
def sd3_template():
    network = sd3.SD3Transformer(sd3.SD3Config.from_config(toy.SD3))
    inputs = (jnp.zeros(shape) for shape in ((1, 8, 8, 4), (1,), (1, 5, 12), (1, 10)))
    return jax.eval_shape(network.init, KEY, *inputs)["params"]


@functools.cache
def plain_factors() -> dict[str, torch.Tensor]:
    """A LoRA of SD3's attention: tensors LAYER.lora_A.weight and LAYER.lora_B.weight."""
    config = LoraConfig(rank=3, targets=r"transformer_blocks\.\d+\.attn\..*")
    lora = redrawn(lora_init(KEY, sd3_template(), config, sd3.LISTS))
    modules = lora_files._as_modules(lora, "transformer")
    return {
        name.removeprefix("transformer."): torch.tensor(array)
        for name, array in tensors.file_tensors(modules, sd3.LISTS)
    }


def renamed(before="", flat=False, factors=(".lora_A", ".lora_B"), after="", alphas=()):
    """The same tensors under other names; `alphas` are the layers' alphas, in turn."""
    state = {}
    for number, name in enumerate(plain_factors()):
        layer, which = name.split(".lora_")
        where = before + (layer.replace(".", "_") if flat else layer)
        state[where + factors["A" not in which] + after + ".weight"] = plain_factors()[name]
        if alphas:
            state[f"{where}.alpha"] = torch.tensor(alphas[number // 2 % len(alphas)])
    return state


def added(lora, scale) -> dict[str, np.ndarray]:
    """What a LoRA of ours adds to each layer's weight, in torch's layout."""
    merged = merge(jax.tree.map(lambda s: jnp.zeros(s.shape), sd3_template()), lora, scale)
    changed = {(*path[:-1], "kernel") for path in flatten_dict(lora)}
    kernels = {path: leaf for path, leaf in flatten_dict(merged).items() if path in changed}
    return dict(tensors.file_tensors(unflatten_dict(kernels), sd3.LISTS))


def added_by_theirs(state, alphas=None) -> dict[str, np.ndarray]:
    """The same of diffusers' tensors transformer.LAYER.lora_A.weight, of rank 3."""
    found = {}
    for name, a in state.items():
        if ".lora_A." in name:
            layer = name.removesuffix(".lora_A.weight")
            scale = alphas[f"{layer}.alpha"] / 3 if alphas else 1
            product = scale * state[f"{layer}.lora_B.weight"] @ a
            found[f"{layer.removeprefix('transformer.')}.weight"] = product.numpy()
    return found


QWEN = diffusers.QwenImagePipeline.lora_state_dict
KOHYA = dict(factors=(".lora_down", ".lora_up"))
COMFY = dict(before="diffusion_model.")


@pytest.mark.parametrize(
    ("names", "oracle"),
    [
        (KOHYA | dict(before="lora_unet_", flat=True, alphas=[1.5, 4.0]), QWEN),
        (KOHYA | COMFY | dict(alphas=[2.0]), QWEN),
        (COMFY, QWEN),
        (COMFY | dict(after=".default"), QWEN),
        (dict(alphas=[7.0]), QWEN),
        (
            dict(before="transformer.", factors=(".lora.down", ".lora.up")),
            convert_unet_state_dict_to_peft,
        ),
        (dict(before="transformer.", alphas=[2.0, 5.0]), diffusers.FluxPipeline.lora_state_dict),
        *(
            (dict(before=before), lambda state: renamed("transformer."))
            for before in ("", "transformer.module.", "_orig_mod.", "module.transformer._orig_mod.")
        ),
    ],
)
def test_a_lora_of_another_program_is_read_as_by_diffusers(tmp_path, names, oracle):
    state, file = renamed(**names), tmp_path / "lora.safetensors"
    safetensors.torch.save_file(state, file)
    lora, rank, alpha = read_lora(file, sd3_template(), sd3.LISTS)
    alphas = names.get("alphas", [])
    assert (rank, alpha) == (3, alphas[0] if len(alphas) == 1 else 3)
    flux = oracle == diffusers.FluxPipeline.lora_state_dict
    expected = oracle(state, return_alphas=True) if flux else (oracle(state), None)
    expected, found = added_by_theirs(*expected), added(lora, alpha / rank)
    assert expected.keys() == found.keys() and len(found) > 20
    for name, product in expected.items():
        assert np.abs(found[name] - product).max() < 1e-6 * np.abs(product).max()


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        (
            "text_encoder_2.layers.0.q_proj.lora_A.weight",
            "fuse_lora(['transformer', 'text_encoder_2'])",
        ),
        ("lora_te1_layers_0_q_proj.lora_down.weight", "fuse_lora(['transformer', 'text_encoder'])"),
        ("transformer.x.lora_magnitude_vector", "fuse_lora(['transformer'])"),
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", "pipe.lora_state_dict("),
        ("diffusion_model.layers.0.attention.qkv.lora_A.weight", "pipe.lora_state_dict("),
        ("lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight", "the program that wrote it"),
        ("diffusion_model.x.lokr_w1", "the program that wrote it"),
        ("lora_unet_x.hada_w1_a", "the program that wrote it"),
        ("diffusion_model.x.diff_b", "the program that wrote it"),
        ("base_model.model.proj_out.weight", "merge_and_unload()"),
        ("transformer.elsewhere.lora_A.weight", "the same model"),
    ],
)
def test_what_is_no_plain_lora_is_named_with_the_way_to_convert_it(tmp_path, name, advice):
    file = tmp_path / "lora.safetensors"
    safetensors.torch.save_file(renamed("transformer.") | {name: torch.zeros(3, 3)}, file)
    with pytest.raises(ValueError) as refused:
        read_lora(file, sd3_template(), sd3.LISTS)
    assert name in str(refused.value) and advice in str(refused.value)
    assert str(file) in str(refused.value)


def test_fused_factors_are_read_after_the_conversion_that_is_advised(tmp_path):
    """A FLUX LoRA in kohya's format, whose query, key and value have one pair of factors."""
    layer = "lora_unet_double_blocks_0_img_attn_qkv"
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 32, generator=draw), torch.randn(96, 3, generator=draw)
    state = {f"{layer}.lora_down.weight": a, f"{layer}.lora_up.weight": b}
    safetensors.torch.save_file(
        state | {f"{layer}.alpha": torch.tensor(2.0)}, tmp_path / "kohya.safetensors"
    )
    state = diffusers.FluxPipeline.lora_state_dict(tmp_path / "kohya.safetensors")
    file = tmp_path / "converted.safetensors"
    safetensors.torch.save_file({k: v.clone() for k, v in state.items()}, file)
    network = {
        "blocks_0": {"attn": {f"to_{one}": {"kernel": jnp.zeros((32, 32))} for one in "qkv"}}
    }
    template = {f"transformer_{name}": part for name, part in network.items()}
    lora, rank, alpha = read_lora(file, template, ("transformer_blocks",))
    merged = merge(template, lora, alpha / rank)["transformer_blocks_0"]["attn"]
    for one, part in zip("qkv", b.chunk(3), strict=True):
        expected = (2 / 3 * part @ a).T.numpy()
        np.testing.assert_allclose(merged[f"to_{one}"]["kernel"], expected, atol=1e-5)
