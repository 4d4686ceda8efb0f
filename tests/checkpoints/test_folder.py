import json
import pathlib
import shutil
from fnmatch import fnmatch

import diffusers
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from digen_jax.checkpoints import folder, tensors
from digen_jax.files import read_json
from digen_jax.models.autoencoders import autoencoder_kl
from digen_jax.models.text import clip_text
from tests.checkpoints import toy

VAE = dict(block_out_channels=(8, 12), down_block_types=("DownEncoderBlock2D",) * 2)
VAE |= dict(up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=3, norm_num_groups=4)
CLIP = dict(vocab_size=30, hidden_size=16, intermediate_size=24, num_hidden_layers=3)
CLIP |= dict(num_attention_heads=2, max_position_embeddings=9, projection_dim=10, eos_token_id=29)


def build(name: str):
    """A torch model with every tensor redrawn."""
    if name == "vae":
        module = diffusers.AutoencoderKL(**VAE)
    else:
        module = transformers.CLIPTextModelWithProjection(transformers.CLIPTextConfig(**CLIP))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            if tensor.is_floating_point():
                tensor.normal_(generator=generator)
    return module.eval()


def network(name: str, config: dict):
    """Our network's parameter shapes, from the config.json the torch model saved, and its lists."""
    if name == "vae":
        ours = autoencoder_kl.AutoencoderKL(autoencoder_kl.AutoencoderKLConfig.from_config(config))
        given, options = jnp.zeros((1, 4, 4, 3), jnp.float32), {"method": "reconstruct"}
        lists = autoencoder_kl.LISTS
    else:
        ours = clip_text.CLIPTextModelWithProjection(clip_text.CLIPTextConfig.from_config(config))
        given, options, lists = jnp.zeros((1, 4), jnp.int32), {}, clip_text.LISTS
    shapes = jax.eval_shape(lambda key: ours.init(key, given, **options), jax.random.key(0))
    return shapes["params"], lists


KINDS = {"vae": "diffusers", "clip": "transformers"}


@pytest.mark.parametrize(("name", "dtype"), [("vae", torch.float32), ("clip", torch.bfloat16)])
def test_a_real_component_survives_the_round_trip_byte_by_byte(tmp_path, name, dtype):
    module = build(name).to(dtype)
    module.save_pretrained(tmp_path / "theirs")
    config = read_json(tmp_path / "theirs" / "config.json")
    template, lists = network(name, config)
    jax_dtype = {torch.float32: jnp.float32, torch.bfloat16: jnp.bfloat16}[dtype]
    params = folder.read_params(tmp_path / "theirs", template, lists, dtype=jax_dtype)
    folder.write_params(tmp_path / "ours", params, lists, config, KINDS[name])

    weights = f"{folder.STEMS[KINDS[name]]}.safetensors"
    theirs, ours = ((tmp_path / side / weights).read_bytes() for side in ("theirs", "ours"))
    assert theirs == ours
    assert files(tmp_path / "ours") == ["config.json", weights]
    again = type(module).from_pretrained(tmp_path / "ours", torch_dtype=dtype)
    state = module.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    assert read_json(tmp_path / "ours" / "config.json") == config


def toy_params(path: pathlib.Path, max_shard_size: int = 10**9):
    """The torch toy saved by the hub's own writer, and read."""
    path.mkdir(parents=True)
    huggingface_hub.save_torch_state_dict(
        toy.TorchToy().state_dict(),
        path,
        filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    return folder.read_params(path, toy.template(), toy.LISTS)


def files(path: pathlib.Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def equal(left, right) -> bool:
    same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), left, right)
    return jax.tree.all(same)


@pytest.mark.parametrize("name", ["vae", "clip"])
def test_of_a_single_file_beside_an_index_the_same_is_read_as_by_its_library(tmp_path, name):
    module = build(name)
    module.save_pretrained(tmp_path, max_shard_size="2KB")
    kept = {file.name: file.read_bytes() for file in tmp_path.glob("*.safetensors*")}
    assert len(kept) > 2
    with torch.no_grad():
        for tensor in module.parameters():
            tensor += 1
    module.save_pretrained(tmp_path)
    for file, content in kept.items():
        (tmp_path / file).write_bytes(content)
    expected = type(module).from_pretrained(tmp_path).state_dict()
    stored = folder.open_tensors(tmp_path)
    for tensor, values in expected.items():
        np.testing.assert_array_equal(stored[tensor].read(...), values.numpy())


def test_a_missing_shard_or_tensor_names_the_files(tmp_path):
    toy_params(tmp_path / "parts", max_shard_size=600)
    first, *_, last = sorted((tmp_path / "parts").glob("*.safetensors"))
    bigger = dict(toy.template(), more={"scale": jax.ShapeDtypeStruct((1,), jnp.float32)})
    with pytest.raises(ValueError, match=f"more.weight .*{first.name} .*{last.name}"):
        folder.read_params(tmp_path / "parts", bigger, toy.LISTS)
    last.unlink()
    with pytest.raises(ValueError, match=last.name):
        folder.read_params(tmp_path / "parts", toy.template(), toy.LISTS)


def test_writing_again_leaves_nothing_of_the_earlier_weights(tmp_path):
    params = toy_params(tmp_path / "theirs")
    for limit in (600, 10**9, 600):
        folder.write_params(tmp_path / "ours", params, toy.LISTS, {"a": 1}, max_shard_bytes=limit)
        assert equal(folder.read_params(tmp_path / "ours", toy.template(), toy.LISTS), params)
        single = "diffusion_pytorch_model.safetensors" in files(tmp_path / "ours")
        assert single == (limit == 10**9)
        assert (len(files(tmp_path / "ours")) == 2) == single


def test_a_failed_write_leaves_the_earlier_folder_whole(tmp_path, monkeypatch):
    params = toy_params(tmp_path / "theirs")
    folder.write_params(tmp_path / "ours", params, toy.LISTS, {"version": 1})
    before = files(tmp_path / "ours")
    calls = []

    def fails_the_second_time(*args, save=tensors.save_file, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise OSError("no space left on device")
        save(*args, **kwargs)

    monkeypatch.setattr(tensors, "save_file", fails_the_second_time)
    changed = jax.tree.map(lambda leaf: leaf + 1, params)
    with pytest.raises(OSError, match="no space left"):
        folder.write_params(
            tmp_path / "ours", changed, toy.LISTS, {"version": 2}, max_shard_bytes=600
        )
    assert len(calls) == 2
    assert files(tmp_path / "ours") == before
    assert read_json(tmp_path / "ours" / "config.json") == {"version": 1}
    assert equal(folder.read_params(tmp_path / "ours", toy.template(), toy.LISTS), params)


def test_a_folder_without_weights_is_named(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        folder.read_params(tmp_path, toy.template(), toy.LISTS)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.safetensors.index.json"):
        folder.open_tensors(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "{", "[1]", '{"a": ' * 10**5),
        *('{"a": ' * 101 + "1" + "}" * 101, f'{{"a": {"1" * 5000}}}'),
    ],
    ids=range(6),
)
def test_read_json_names_the_file(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=str(tmp_path / "config.json")):
        read_json(tmp_path / "config.json")


def test_json_may_have_a_byte_order_mark_and_some_levels(tmp_path):
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"a": [[{"b": "\xc3\xa4"}], 1]}')
    assert read_json(tmp_path / "config.json") == {"a": [[{"b": "ä"}], 1]}


# ---------------------------------------------------------------------------------- resolve_folder

HUB = [
    "model_index.json",
    "LICENSE.md",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
    "tokenizer/merges.txt",
    "tokenizer/chat_template.jinja",
    "tokenizer_3/spiece.model",
    "text_encoder_3/model-00001-of-00002.safetensors",
    "adapter_config.json",  # a LoRA's, as PEFT saves it
    "adapter_model.safetensors",
]
NOT_NEEDED = [
    "sd3_medium_incl_clips_t5xxlfp16.safetensors",
    "text_encoder/model.fp16.safetensors",
    "text_encoder_3/model.fp16-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model.bin",
    "demo.png",
]


def test_what_is_neither_a_folder_nor_a_reachable_repository_is_named(tmp_path):
    assert folder.resolve_folder(str(tmp_path)) == tmp_path
    (tmp_path / "file").touch()
    for name in ("nowhere", tmp_path / "nowhere", "./a/b", tmp_path / "file", "a/b/c", "no/model"):
        with pytest.raises(ValueError, match=str(name)):
            folder.resolve_folder(name)


def test_only_the_needed_files_come_from_the_hub(tmp_path, monkeypatch):
    asked = {}

    def download(name, allow_patterns, ignore_patterns):
        asked.update(name=name)
        kept = huggingface_hub.utils.filter_repo_objects(
            HUB + NOT_NEEDED, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        )
        asked["files"] = list(kept)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert folder.resolve_folder("owner/model-3.5") == tmp_path
    assert asked == {"name": "owner/model-3.5", "files": HUB}
    folder.resolve_folder("owner/model-3.5", without=("text_encoder_3", "tokenizer_3"))
    assert asked["files"] == [file for file in HUB if not fnmatch(file, "*_3/*")]


# ---------------------------------------------------------------------------------- pipelines


ABSENT = dict.fromkeys(("transformer", *toy.ENCODERS))


def pipeline(path: pathlib.Path) -> pathlib.Path:
    """A pipeline folder that diffusers wrote: vae, scheduler; and a T5 not there."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = diffusers.StableDiffusion3Pipeline(scheduler=scheduler, vae=build("vae"), **ABSENT)
    pipe.save_pretrained(path)
    index = json.loads((path / "model_index.json").read_text())
    index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
    (path / "model_index.json").write_text(json.dumps(index))
    (path / "LICENSE.md").write_text("as you like")
    (path / "picture.png").write_text("large")
    return path


def test_a_tuned_pipeline_is_exported_whole(tmp_path):
    source = pipeline(tmp_path / "base")
    config = read_json(source / "vae" / "config.json")
    template, lists = network("vae", config)
    params = folder.read_params(source / "vae", template, lists)
    tuned = jax.tree.map(lambda leaf: leaf + 1, params)

    def write(path: pathlib.Path) -> None:
        folder.write_params(path, tuned, lists, config)

    exported = tmp_path / "new" / "tuned"
    folder.copy_pipeline(source, exported, {"vae": write}, {"steps": 9})
    assert files(tmp_path / "new") == ["tuned"]
    copied = ["LICENSE.md", "model_index.json", "sampling.json", "scheduler", "vae"]
    assert files(exported) == copied
    pipe = diffusers.StableDiffusion3Pipeline.from_pretrained(exported, **ABSENT)
    assert pipe.scheduler.config.shift == 3.0 and pipe.text_encoder_3 is None
    for name, tensor in build("vae").state_dict().items():
        assert torch.equal(pipe.vae.state_dict()[name], tensor + 1)
    with pytest.raises(ValueError, match="unet"):
        folder.copy_pipeline(source, tmp_path / "tuned", {"unet": write}, {})
    with pytest.raises(ValueError, match="base"):
        folder.copy_pipeline(source, source, {}, {})

    def fails(path):
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        folder.copy_pipeline(source, tmp_path / "tuned", {"vae": fails}, {})
    assert files(tmp_path) == ["base", "new"]


def test_read_model_index_wants_a_pipeline(tmp_path):
    path = tmp_path / "model_index.json"
    path.write_text('{"_class_name": "X", "vae": ["diffusers", "AutoencoderKL"]}')
    assert folder.read_model_index(tmp_path)["vae"] == ["diffusers", "AutoencoderKL"]
    path.write_text("{}")
    with pytest.raises(ValueError, match="_class_name"):
        folder.read_model_index(tmp_path)


# ------------------------------------------------------------------------------------ fingerprint


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "MAX_READ", 2**13)
    monkeypatch.setattr(folder, "PIECE", 2**8)
    for part in ("text_encoder", "tokenizer", "vae"):
        (tmp_path / "model" / part).mkdir(parents=True)
        (tmp_path / "model" / part / "config.json").write_text(part)
    (tmp_path / "model" / "text_encoder" / "model.safetensors").write_bytes(bytes(100_001))
    return tmp_path / "model"


def of(model):
    return folder.fingerprint(model, ("text_encoder", "tokenizer"))


def test_it_depends_on_what_the_components_hold_alone(model, tmp_path):
    first = of(model)
    copied = shutil.copytree(model, tmp_path / "elsewhere")
    (copied / "vae" / "config.json").write_text("other")
    assert of(copied) == first
    (copied / "tokenizer" / "config.json").write_text("other")
    assert of(copied) != first


@pytest.mark.parametrize(
    ("place", "count"), [(0, 1), (100_000, 1), (1, 5), (50_000, 4_000), (96_500, 3_400)]
)
def test_a_change_of_large_files_is_seen(model, place, count):
    first = of(model)
    path = model / "text_encoder" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[place : place + count] = b"x" * count
    path.write_bytes(data)
    assert len(data) == 100_001 and of(model) != first


def test_size_and_name_are_a_part_of_it(model):
    path = model / "text_encoder" / "model.safetensors"
    hashes = [of(model)]
    path.write_bytes(bytes(100_002))
    hashes.append(of(model))
    path.rename(path.with_name("other.safetensors"))
    hashes.append(of(model))
    assert len(set(hashes)) == 3


def test_only_pieces_of_a_large_file_are_read(model, monkeypatch):
    read = []

    class Counting:
        def update(self, data):
            read.append(len(data))

        def hexdigest(self):
            return ""

    monkeypatch.setattr(folder.hashlib, "sha256", Counting)
    folder.fingerprint(model, ("text_encoder",))
    assert folder.MAX_READ < sum(read) < 50_000


def test_a_missing_component_is_named(model):
    with pytest.raises(ValueError, match=r"text_encoder_2"):
        folder.fingerprint(model, ("text_encoder_2",))
