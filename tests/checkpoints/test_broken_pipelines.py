"""Pipeline folders with a mistake: each gives one sentence that names the file, before any computation."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from digen_jax.assemble import open_parts
from digen_jax.checkpoints import folder as weights
from digen_jax.checkpoints.tensors import write_file
from digen_jax.config.load import fit_config, load_config
from digen_jax.errors import ConfigError, blame
from digen_jax.families import load_family, open_pipeline
from digen_jax.inference.model import edited, open_model, run_recipe
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


@pytest.mark.parametrize(
    ("file", "values", "sentence"),
    [
        ("model_index.json", dict(_class_name=["x"]), "model_index.json has no _class_name"),
        (
            "model_index.json",
            dict(transformer=["diffusers", "FluxTransformer2DModel"]),
            'model_index.json says that transformer is ["diffusers", "FluxTransformer2DModel"], but only '
            '["diffusers", "SD3Transformer2DModel"] is supported: choose another folder',
        ),
        (
            "model_index.json",
            dict(vae=[None, None]),
            "model_index.json says that vae is [null, null]",
        ),
        ("model_index.json", dict(vae=...), "model_index.json says that vae is null, but only"),
        (
            "model_index.json",
            dict(tokenizer="x"),
            'model_index.json says that tokenizer is "x", but',
        ),
        (
            "transformer/config.json",
            dict(_class_name="FluxTransformer2DModel"),
            "transformer/config.json describes a FluxTransformer2DModel, not a SD3Transformer2DModel",
        ),
        (
            "vae/config.json",
            dict(_class_name="AutoencoderTiny"),
            "vae/config.json describes a Auto",
        ),
        (
            "text_encoder/config.json",
            dict(architectures=["T5EncoderModel"]),
            "text_encoder/config.json describes a T5EncoderModel, not a CLIPTextModelWithProjection",
        ),
        ("text_encoder/config.json", dict(model_type="t5"), "text_encoder/config.json: model_type"),
        (
            "vae/config.json",
            dict(scaling_factor=0),
            "vae/config.json: scaling_factor must be a finite number from 1e-06 to 1e+06, not 0",
        ),
        ("vae/config.json", dict(scaling_factor=NAN), "vae/config.json: scaling_factor must be"),
        ("vae/config.json", dict(scaling_factor=None), "vae/config.json: scaling_factor must be"),
        (
            "vae/config.json",
            dict(shift_factor="abc"),
            "vae/config.json: shift_factor must be a finite number or null, not 'abc'",
        ),
        (
            "vae/config.json",
            dict(block_out_channels="abc"),
            "vae/config.json: block_out_channels must be a list, each of it a whole number from 0",
        ),
        ("vae/config.json", dict(norm_num_groups=0), "vae/config.json: norm_num_groups must be"),
        ("vae/config.json", dict(layers_per_block=-1), "vae/config.json: layers_per_block must be"),
        (
            "scheduler/scheduler_config.json",
            dict(shift="abc"),
            "scheduler/scheduler_config.json: shift must be a finite number from 0.001 to 1000, not 'abc'",
        ),
        (
            "scheduler/scheduler_config.json",
            dict(shift=-3),
            "scheduler/scheduler_config.json: shift",
        ),
        (
            "scheduler/scheduler_config.json",
            dict(shift=NAN),
            "scheduler/scheduler_config.json: shift",
        ),
        (
            "scheduler/scheduler_config.json",
            dict(num_train_timesteps=500),
            "scheduler/scheduler_config.json: num_train_timesteps must be 1000, not 500",
        ),
        (
            "scheduler/scheduler_config.json",
            dict(use_dynamic_shifting="no"),
            "scheduler/scheduler_config.json: use_dynamic_shifting must be true or false, not 'no'",
        ),
        (
            "transformer/config.json",
            dict(num_layers=1_000_000),
            "transformer/config.json: num_layers must be a whole number from 1 to 1000, not 1000000",
        ),
        (
            "text_encoder_2/config.json",
            dict(num_hidden_layers="x"),
            "text_encoder_2/config.json: num_hidden_layers must be a whole number from 1 to 1000",
        ),
        (
            "text_encoder/config.json",
            dict(num_attention_heads=0),
            "text_encoder/config.json: num_a",
        ),
        (
            "tokenizer/tokenizer_config.json",
            dict(model_max_length=...),
            "tokenizer/tokenizer_config.json: model_max_length must be the number of tokens",
        ),
        (
            "tokenizer_2/tokenizer_config.json",
            dict(model_max_length=1000),
            "tokenizer_2/tokenizer_config.json: model_max_length must be at most 12, the positions of",
        ),
        (
            "tokenizer/tokenizer.json",
            dict(model={"type": "none"}),
            "the tokenizer in ",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_field(folder, file, values, sentence):
    edit(folder, file, **values)
    assert refused(folder).startswith(sentence)


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        ("tokenizer", "tokenizer/tokenizer_config.json is missing"),
        (
            "tokenizer_2/tokenizer.json",
            "tokenizer_2 holds no vocabulary: tokenizer.json is missing",
        ),
        ("scheduler", "scheduler/scheduler_config.json is missing"),
    ],
)
def test_a_missing_file_is_named(folder, gone, sentence):
    path = folder / gone
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert sentence in refused(folder)


def test_files_that_are_empty_or_folders_are_named(folder):
    (folder / "tokenizer" / "tokenizer.json").write_text("")
    assert refused(folder).startswith("tokenizer/tokenizer.json is not JSON")
    (folder / "vae" / "config.json").unlink()
    (folder / "vae" / "config.json").mkdir()
    assert refused(folder).startswith("vae/config.json cannot be read: Is a directory")


def test_an_encoder_with_fewer_tokens_than_its_tokenizer_is_refused(folder):
    edit(folder, "text_encoder/config.json", vocab_size=7)
    assert ", but vocab_size of its text encoder is 7: they do not belong together" in refused(
        folder
    )


def test_an_end_token_that_the_encoder_does_not_look_for_is_refused(folder):
    edit(folder, "text_encoder_2/config.json", eos_token_id=5)
    assert refused(folder).startswith("the eos_token of the tokenizer in tokenizer_2 has the id ")
    assert "but its text encoder looks for 5: they do not belong together" in refused(folder)


def test_too_many_tokens_are_the_fields_mistake_and_not_the_folders(folder):
    """Also where the folder is blamed for the rest."""
    sentence = (
        "config.model.max_sequence_length must be at most 512, the most that Stable Diffusion"
    )
    with pytest.raises(ConfigError, match=f"^{sentence}"), blame("config.model.folder: "):
        load_family(folder, max_sequence_length=513)


# ------------------------------------------------------------------------------ weights


def reading(folder, part):
    """The sentence that refuses the weights of a component."""
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


@pytest.mark.parametrize("value", [NAN, INFINITE, -INFINITE])
@pytest.mark.parametrize(
    ("part", "tensor", "dtype"),
    [
        ("transformer", "transformer_blocks.1.attn.to_q.weight", np.float32),
        ("vae", "decoder.conv_in.bias", np.float16),
        ("text_encoder", "text_projection.weight", jax.numpy.bfloat16),
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
    expected = f"tensor {tensor} in {part}/{file} holds NaN or infinite numbers: get a whole copy"
    assert reading(folder, part).startswith(expected)


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
    sentence = reading(folder, "vae")
    assert (
        "is of type I8, and quantised weights are not supported: use a copy in float32" in sentence
    )


@pytest.mark.parametrize("target", ["../../outside.safetensors", "/outside", "..", "a/b", "", 3])
def test_an_index_that_leads_out_of_its_folder_is_refused(folder, target):
    (file,) = (folder / "transformer").glob("*.safetensors")
    weight_map = dict.fromkeys(load_file(file), target)
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sentence = f"{INDEX} takes weights from {target!r}, but they must be next to it"
    assert reading(folder, "transformer").startswith(sentence)


def test_an_index_that_names_a_missing_file_is_refused(folder):
    (file,) = (folder / "transformer").glob("*.safetensors")
    weight_map = dict.fromkeys(load_file(file), "part.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    sentence = reading(folder, "transformer")
    assert sentence.startswith("transformer/part.safetensors is missing, which diffusion_pytorch_")


def test_weights_that_do_not_fit_are_found_before_any_is_read(base, folder, monkeypatch):
    """The sentence names the file, both shapes, and the config that the expected one is from."""
    widths = json.loads((folder / "vae" / "config.json").read_text())["block_out_channels"]
    edit(folder, "vae/config.json", block_out_channels=[*widths[:-1], 2 * widths[-1]])
    monkeypatch.setattr(weights, "read_tree", None)
    (file,) = (folder / "vae").glob("*.safetensors")
    sentence = (
        rf"tensor \S+ in {file} has shape \[[\d, ]+\], expected \[[\d, ]+\], "
        rf"by {folder}/vae/config.json: the two belong to different models"
    )
    config = tiny_config(base, "full")
    config.model.folder = str(folder)
    recipe = fit_config(load_config(config), 1)
    with pytest.raises(ConfigError, match=f"^config.model.folder: {sentence}"):
        open_parts(recipe, jax.devices()[:1])
    with pytest.raises(ConfigError, match=f"^{sentence}"):
        open_model(str(folder), jax.devices()[:1])


def test_what_is_asked_is_compared_with_the_model_before_its_weights_are_read(folder, monkeypatch):
    def fits(family):
        edited(family, [{"prompt": "x"}], Size(16, 16))

    monkeypatch.setattr(weights, "open_tensors", None)
    with pytest.raises(ConfigError, match="a size of pictures is given, but there is none to edit"):
        open_model(str(folder), jax.devices()[:1], fits=fits)


def test_a_component_or_a_pipeline_in_a_runs_place_is_told_apart(folder):
    with pytest.raises(ConfigError, match="transformer is one component of a pipeline: give the"):
        open_model(str(folder / "transformer"), jax.devices()[:1])
    with pytest.raises(
        ConfigError, match=r"is no training run's workdir, as it has no config.json"
    ):
        run_recipe(folder)


def test_weights_of_another_kind_are_named(folder):
    (file,) = (folder / "vae").glob("*.safetensors")
    file.rename(file.with_name("diffusion_pytorch_model.fp16.safetensors"))
    assert reading(folder, "vae").endswith(", not diffusion_pytorch_model.fp16.safetensors")


def test_a_file_that_cannot_be_written_is_an_error_of_the_system(tmp_path):
    """safetensors raises its own for a full disk, as for a folder that is not there."""
    file = tmp_path / "none" / "model.safetensors"
    with pytest.raises(OSError, match=f"{file} cannot be written: "):
        write_file(file, {"a": np.ones(3, np.float32)})
