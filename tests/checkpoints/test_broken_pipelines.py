"""Invalid pipeline folders: each gives one line that names the file, before any computation."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from digen_jax.assemble import open_parts
from digen_jax.checkpoints import folder as weights
from digen_jax.checkpoints.tensors import write_file
from digen_jax.config.load import fit_config, load_config
from digen_jax.errors import ConfigError, prefix_errors
from digen_jax.families import load_family, open_pipeline
from digen_jax.inference.model import edited, open_model, read_run_config
from digen_jax.models.family import Size
from tests.tiny_runs import pipeline, tiny_config

INDEX = "transformer/diffusion_pytorch_model.safetensors.index.json"
NAN, INFINITE = float("nan"), float("inf")


@pytest.fixture
def folder(base, tmp_path):
    return shutil.copytree(pipeline(base), tmp_path / "pipeline")


def edit(folder, file, **values):
    path = folder / file
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not ...}))


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        load_family(open_pipeline(str(folder)))
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


SCHEDULER, TRANSFORMER, VAE = (
    "scheduler/scheduler_config.json",
    "transformer/config.json",
    "vae/config.json",
)


@pytest.mark.parametrize(
    ("file", "values", "named"),
    [
        ("model_index.json", dict(_class_name=["x"]), "_class_name"),
        ("model_index.json", dict(transformer=["diffusers", "Flux"]), '["diffusers", "Flux"]'),
        ("model_index.json", dict(vae=[None, None]), "vae is [null, null]"),
        ("model_index.json", dict(vae=...), "vae is null"),
        ("model_index.json", dict(tokenizer="x"), 'tokenizer is "x"'),
        (TRANSFORMER, dict(_class_name="FluxTransformer2DModel"), "FluxTransformer2DModel"),
        (VAE, dict(_class_name="AutoencoderTiny"), "AutoencoderTiny"),
        ("text_encoder/config.json", dict(architectures=["T5"]), "T5"),
        ("text_encoder/config.json", dict(model_type="t5"), "model_type"),
        ("text_encoder/config.json", dict(num_attention_heads=0), "num_attention_heads"),
        ("text_encoder_2/config.json", dict(num_hidden_layers="x"), "num_hidden_layers"),
        (VAE, dict(scaling_factor=0), "scaling_factor"),
        (VAE, dict(scaling_factor=NAN), "scaling_factor"),
        (VAE, dict(scaling_factor=None), "scaling_factor"),
        (VAE, dict(shift_factor="abc"), "shift_factor"),
        (VAE, dict(block_out_channels="abc"), "block_out_channels"),
        (VAE, dict(norm_num_groups=0), "norm_num_groups"),
        (VAE, dict(layers_per_block=-1), "layers_per_block"),
        (SCHEDULER, dict(shift="abc"), "shift"),
        (SCHEDULER, dict(shift=-3), "shift"),
        (SCHEDULER, dict(shift=NAN), "shift"),
        (SCHEDULER, dict(num_train_timesteps=500), "num_train_timesteps"),
        (SCHEDULER, dict(use_dynamic_shifting="no"), "use_dynamic_shifting"),
        (TRANSFORMER, dict(num_layers=1_000_000), "num_layers"),
        ("tokenizer/tokenizer_config.json", dict(model_max_length=...), "model_max_length"),
        ("tokenizer_2/tokenizer_config.json", dict(model_max_length=1000), "model_max_length"),
        ("tokenizer/tokenizer.json", dict(model={"type": "none"}), "tokenizer"),
    ],
)
def test_an_invalid_value_is_refused_by_file_and_field(folder, file, values, named):
    edit(folder, file, **values)
    sentence = refused(folder)
    assert file.partition("/")[0] in sentence and named in sentence


@pytest.mark.parametrize(
    ("part", "values", "named"),
    [
        ("", dict(vocab_size=7), "tokenizer has ids up to 626, but vocab_size .* 7"),
        ("_2", dict(eos_token_id=5), "eos_token .* tokenizer_2 .* 626, .* 5"),
    ],
)
def test_an_encoder_that_does_not_fit_its_tokenizer_is_refused(folder, part, values, named):
    edit(folder, f"text_encoder{part}/config.json", **values)
    assert re.search(named, refused(folder))


@pytest.mark.parametrize("gone", ["tokenizer", "tokenizer_2/tokenizer.json", "scheduler"])
def test_a_missing_file_is_named(folder, gone):
    path = folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert gone.partition("/")[0] in refused(folder)


def test_files_that_are_empty_or_folders_are_named(folder):
    (folder / "tokenizer" / "tokenizer.json").write_text("")
    assert refused(folder).startswith("tokenizer/tokenizer.json")
    (folder / VAE).unlink()
    (folder / VAE).mkdir()
    assert refused(folder).startswith(VAE)


def test_too_many_tokens_are_an_error_of_the_field_and_not_of_the_folder(folder):
    named = "^config.model.max_sequence_length"
    with pytest.raises(ConfigError, match=named), prefix_errors("config.model.folder: "):
        load_family(folder, max_sequence_length=513)


# ------------------------------------------------------------------------------ weights


def reading(folder, part):
    """The error of reading the weights of a component."""
    family = load_family(folder)
    with pytest.raises(ValueError) as caught:
        family.read(folder, part)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(f"{folder}/", "")


def rewrite(folder, part, change):
    (file,) = (folder / part).glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return file.name


@pytest.mark.parametrize(
    ("part", "tensor", "dtype", "value"),
    [
        ("transformer", "transformer_blocks.1.attn.to_q.weight", np.float32, NAN),
        ("vae", "decoder.conv_in.bias", np.float16, INFINITE),
        ("text_encoder", "text_projection.weight", jax.numpy.bfloat16, -INFINITE),
    ],
)
def test_weights_that_are_not_finite_are_refused_by_tensor_and_file(
    folder, part, tensor, dtype, value
):
    def break_one(tensors):
        broken = tensors[tensor].astype(dtype)
        broken.flat[-1] = value
        tensors[tensor] = broken

    file = rewrite(folder, part, break_one)
    assert reading(folder, part).startswith(f"tensor {tensor} in {part}/{file}")


def test_large_numbers_whose_sum_overflows_are_read(folder):
    def enlarge(tensors):
        tensors["text_projection.weight"][:] = 3e38

    rewrite(folder, "text_encoder", enlarge)
    params = load_family(folder).read(folder, "text_encoder")
    assert np.all(np.asarray(params["text_projection"]["kernel"]) == np.float32(3e38))


def test_quantised_weights_are_refused(folder):
    def quantise(tensors):
        tensors.update({name: np.int8(10 * tensor) for name, tensor in tensors.items()})

    rewrite(folder, "vae", quantise)
    assert "I8" in reading(folder, "vae")


@pytest.mark.parametrize(
    ("target", "named"),
    [
        *((one, INDEX) for one in ("../../outside.safetensors", "/outside", "..", "a/b", "", 3)),
        ("part.safetensors", "transformer/part.safetensors"),
    ],
)
def test_an_index_of_files_outside_of_its_folder_or_missing_ones_is_refused(folder, target, named):
    (file,) = (folder / "transformer").glob("*.safetensors")
    weight_map = dict.fromkeys(load_file(file), target)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sentence = reading(folder, "transformer")
    assert sentence.startswith(named) and str(target) in sentence


def test_weights_that_do_not_fit_are_found_before_any_is_read(base, folder, monkeypatch):
    """The error names the file, both shapes, and the config that the expected one is from."""
    widths = json.loads((folder / VAE).read_text())["block_out_channels"]
    edit(folder, VAE, block_out_channels=[*widths[:-1], 2 * widths[-1]])
    monkeypatch.setattr(weights.safetensors, "read_tree", None)
    (file,) = (folder / "vae").glob("*.safetensors")
    named = rf"tensor \S+ in {file} .* \[[\d, ]+\], .* \[[\d, ]+\], .* {folder}/{VAE}"
    config = tiny_config(base, "full")
    config.model.folder = str(folder)
    train_config = fit_config(load_config(config), 1)
    with pytest.raises(ConfigError, match=f"^config.model.folder: {named}"):
        open_parts(train_config, jax.devices()[:1])
    with pytest.raises(ConfigError, match=f"^{named}"):
        open_model(str(folder), jax.devices()[:1])


def test_options_are_checked_before_weights_are_read(folder, monkeypatch):
    def fits(family, sizes):
        assert sizes == [(16, 32, 1)]
        edited(family, [{"prompt": "x"}], Size(16, 16))

    monkeypatch.setattr(weights.safetensors, "read_tree", None)
    options = [dict(height=16, width=32)]
    with pytest.raises(ConfigError, match="size"):
        open_model(str(folder), jax.devices()[:1], options=options, fits=fits)


def test_a_component_or_a_pipeline_instead_of_a_run_is_refused(folder):
    with pytest.raises(ConfigError, match=r"model_index.json"):
        open_model(str(folder / "transformer"), jax.devices()[:1])
    with pytest.raises(ConfigError, match=r"config.json"):
        read_run_config(folder)


def test_weights_of_another_kind_are_named(folder):
    (file,) = (folder / "vae").glob("*.safetensors")
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert "diffusion_pytorch_model.fp16.safetensors" in reading(folder, "vae")


def test_a_file_that_cannot_be_written_is_an_os_error(tmp_path):
    """safetensors raises its own error for a full disk, as for a folder that does not exist."""
    file = tmp_path / "none" / "model.safetensors"
    with pytest.raises(OSError, match=str(file)):
        write_file(file, {"a": np.ones(3, np.float32)})
