"""The shipped configurations are those of the published models, and cannot be trained."""

import fnmatch
import inspect
from typing import NamedTuple

import diffusers
import jax
import pytest
import torch

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.families import load_family, read_parts
from digen_jax.files import read_json
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder, published_models
from digen_jax.parallel.encoding import example_record
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from tests.models import parity


class Model(NamedTuple):
    """A published model.

    Attributes:
      transformer: parameters without the table of positions, as the repository's safetensors files have them.
      vae: parameters of the autoencoder, or of the part that is read.
      encoders: parameters of the text encoders that are read, in the order of their names.
      tokens: lengths of the arrays of tokens.
      latent: shape of the latents of the default size.
      heads: number of the transformer's.
      shift: of the scheduler.
      guidance: kind of guidance.
    """

    transformer: int
    vae: int
    encoders: tuple[int, ...]
    tokens: tuple[int, ...]
    latent: tuple[int, ...]
    heads: int
    shift: float
    guidance: str = "classifier-free"


def sd3(transformer: int, heads: int) -> Model:
    encoders = 123_650_304, 694_659_840, T5
    return Model(transformer, KL, encoders, (77, 77, 256), IMAGE, heads, 3)


def flux(transformer: int, shift: float, guidance: str) -> Model:
    return Model(transformer, KL, (CLIP, T5), (77, 512), IMAGE, 24, shift, guidance)


def qwen3_layer(width: int, hidden: int) -> int:
    return width * (2 * 4096 + 2 * 1024 + 3 * hidden) + 2 * width + 2 * 128


def wan(transformer: int, heads: int, shift: float = 3) -> Model:
    latent = 21, 60, 104, 16  # of 480x832 with 81 frames
    return Model(transformer, WAN_VAE, (5_680_910_336,), (512, 512), latent, heads, shift)


KL, WAN_VAE, IMAGE = 83_819_683, 126_892_531, (128, 128, 16)
CLIP, T5, QWEN3 = 123_060_480, 4_762_310_656, 4_022_468_096
# Qwen2.5-7B without its head.
QWEN_IMAGE = Model(
    *(20_430_401_088, WAN_VAE, (7_615_616_512 - 152_064 * 3584,), (34 + 512,) * 2, IMAGE, 24, 1)
)
# The vision tower: patches, 32 blocks of width 1280 with a hidden layer of 3420, and the merger to 3584. The text has
# three more tokens for each of 14 x 14 tokens of an image; the other words before the prompt are missing here.
VISION = 1280 * 3 * 2 * 14**2 + 1280 + 5120**2 + 5120 + 5120 * 3584 + 3584
VISION += 32 * (1280 * (4 * 1280 + 3 * 3420) + 4 * 1280 + 2 * 3420 + 1280 + 2 * 1280)
QWEN_IMAGE_EDIT = QWEN_IMAGE._replace(
    encoders=(QWEN_IMAGE.encoders[0] + VISION,), tokens=(64 + 512 + 14**2 + 2,) * 2
)
# Qwen3-4B without its last layer and its last norm.
Z_IMAGE_ENCODER = QWEN3 - qwen3_layer(2560, 9728) - 2560
Z_IMAGE = Model(6_154_908_736, KL, (Z_IMAGE_ENCODER,), (512, 512), IMAGE, 30, 6)
# Qwen3 without its last nine layers, its last norm and its head; two statistics of the autoencoder's 128 channels.
KLEIN = Model(
    *(3_875_544_576, 84_046_115 + 2 * 128, (QWEN3 - 9 * qwen3_layer(2560, 9728) - 2560,)),
    *((512, 512), (64, 64, 128), 24, 3),
)
QWEN3_8B = 8_190_735_360 - 9 * qwen3_layer(4096, 12288) - 4096 - 151936 * 4096
KLEIN_9B = KLEIN._replace(transformer=9_078_581_248, encoders=(QWEN3_8B,), heads=32)
# Llama 3 8B with the tokens of LLaVA, without its head, its last two layers and its last norm.
LLAMA = 128_320 * 4096 + 30 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
HUNYUAN = Model(
    *(12_821_012_544, 146_136_339, (LLAMA, CLIP), (95 + 256, 95 + 256, 77), (33, 90, 160, 16)),
    *(24, 7, "both"),
)
# Qwen2.5-7B without its head, its last two layers and its last norm; ByT5-small with 1,510 tokens.
QWEN = 152_064 * 3584 + 26 * (3584 * (2 * 3584 + 2 * 512 + 3 * 18944) + 3 * 3584 + 2 * 512)
BYT5 = 1510 * 1472 + 12 * (1472 * (4 * 384 + 3 * 3584) + 2 * 1472) + 32 * 6 + 1472
HUNYUAN_15 = Model(
    *(8_326_608_160, 871_309_571, (QWEN, BYT5), (108 + 1000,) * 2 + (256,) * 2),
    *((31, 30, 53, 32), 16, 5),
)
MODELS = {
    "Qwen/Qwen-Image": QWEN_IMAGE,
    "Qwen/Qwen-Image-2512": QWEN_IMAGE,
    "Qwen/Qwen-Image-Edit-2509": QWEN_IMAGE_EDIT,
    "Qwen/Qwen-Image-Edit-2511": QWEN_IMAGE_EDIT,
    "Tongyi-MAI/Z-Image": Z_IMAGE,
    "Tongyi-MAI/Z-Image-Turbo": Z_IMAGE._replace(shift=3),
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": wan(1_418_996_800, 12),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": wan(14_288_491_584, 40),
    "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers": wan(16_394_878_784, 40),
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers": wan(16_394_878_784, 40),
    "Wan-AI/Wan2.2-I2V-A14B-Diffusers": wan(14_288_901_184, 40),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": wan(14_288_491_584, 40),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": wan(4_999_787_712, 24, 5)._replace(
        vae=704_688_668, latent=(21, 30, 52, 48)
    ),
    "black-forest-labs/FLUX.1-Kontext-dev": flux(11_901_408_320, 3, "both"),
    "black-forest-labs/FLUX.1-dev": flux(11_901_408_320, 3, "both"),
    "black-forest-labs/FLUX.1-schnell": flux(11_891_178_560, 1, "none"),
    "black-forest-labs/FLUX.2-klein-4B": KLEIN._replace(guidance="none"),
    "black-forest-labs/FLUX.2-klein-9B": KLEIN_9B._replace(guidance="none"),
    "black-forest-labs/FLUX.2-klein-base-4B": KLEIN,
    "black-forest-labs/FLUX.2-klein-base-9B": KLEIN_9B,
    "hunyuanvideo-community/HunyuanVideo": HUNYUAN,
    "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v": HUNYUAN_15,
    "stabilityai/stable-diffusion-3-medium-diffusers": sd3(2_028_328_000, 24),
    "stabilityai/stable-diffusion-3.5-large": sd3(8_056_627_520, 38),
    "stabilityai/stable-diffusion-3.5-large-turbo": sd3(8_056_627_520, 38),
    "stabilityai/stable-diffusion-3.5-medium": sd3(2_243_171_520, 24),
}


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_all_are_known():
    assert published_models() == sorted(MODELS)
    assert published_folder("stabilityai/stable-diffusion-9") is None


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_configuration_has_the_models_sizes(name):
    expected, folder = MODELS[name], published_folder(name)
    source = Size(480, 832, 81) if "I2V" in name else None
    source = Size(1024, 1024) if "Edit" in name else source
    family = load_family(folder, source=source)
    shapes = family.shapes()
    table = shapes["transformer"].get("pos_embed", {}).get("pos_embed", {})
    assert size(shapes["transformer"]) - size(table) == expected.transformer
    assert size(shapes["vae"]) == expected.vae
    encoders = sorted(part for part in shapes if part.startswith("text_encoder"))
    assert tuple(size(shapes[part]) for part in encoders) == expected.encoders
    tokens = jax.tree.leaves(family.tokenize([example_record(family)]))
    of_text = tuple(each.shape for each in tokens if each.ndim == 2)
    assert of_text == tuple((1, n) for n in expected.tokens)
    assert family.latent_shape(family.default_size()) == expected.latent
    shift = getattr(family.scheduler, "flow_shift" if "Wan" in name else "shift")
    found = family.heads.number, shift, family.guidance
    assert found == (expected.heads, expected.shift, expected.guidance)
    assert len(family.trained) == 1 + ("A14B" in name)
    for part in ("vae", *family.trained):
        component, fields = family.parts[part], read_json(folder / part / "config.json")
        kind = getattr(diffusers, fields["_class_name"])
        with torch.device("meta"):
            known = inspect.signature(kind.__init__).parameters
            module = kind(**{field: value for field, value in fields.items() if field in known})
        unread = component.ignored(family.networks[part])
        tensors = {
            key: tuple(tensor.shape)
            for key, tensor in module.state_dict().items()
            if not any(fnmatch.fnmatch(key, pattern) for pattern in unread)
        }
        assert parity.file_shapes(shapes[part], component.lists) == tensors


@pytest.mark.parametrize(
    "name",
    [
        "Wan-AI/Wan2.1-T2V-14B-Diffusers",
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        "hunyuanvideo-community/HunyuanVideo",
    ],
)
def test_a_shipped_video_model_is_traced_at_720p(name):
    """With tables of positions that are broadcast in the program, not constants of 77 MB."""
    family = load_family(published_folder(name))
    height = 704 if "5B" in name else 720
    shapes, latent = family.shapes(), family.latent_shape(Size(height, 1280, 81))
    x, sigma = (jax.ShapeDtypeStruct(shape, "float32") for shape in ((1, *latent), (1,)))
    prompts = jax.eval_shape(family.encode, shapes, family.tokenize([{"prompt": ""}]))
    guidance = 6.0 if family.guidance == "both" else None

    def velocity(params, x, sigma, prompts):
        return family.velocity({"transformer": {"params": params}}, x, sigma, prompts, guidance)

    program = jax.make_jaxpr(velocity)(shapes["transformer"], x, sigma, prompts)
    assert [out.shape for out in program.out_avals] == [x.shape]
    assert sum(const.nbytes for const in program.consts) < 2**20
    clips = jax.eval_shape(family.decode, {"vae": shapes["vae"]}, x)
    assert clips.shape == (1, 81, height, 1280, 3)


def test_there_are_no_weights_to_train():
    folder = resolve_folder(published_folder(next(iter(MODELS))))
    group = DeviceGroup(make_mesh(jax.devices()[:1]))
    with pytest.raises(ValueError, match="transformer holds no weights"):
        read_parts(load_family(folder), folder, ("transformer",), group)


def test_a_local_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    name = next(iter(MODELS))
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_folder(name) is None
