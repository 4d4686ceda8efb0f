"""The shipped configurations are those of the published models, and cannot be trained."""

import jax
import pytest

from digen_jax.checkpoints.folder import resolve_folder
from digen_jax.families import load_family, read_parts
from digen_jax.models.family import Size
from digen_jax.models.published import published_folder, published_models
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup

# Parameters of the transformers without their position tables, as the repositories' safetensors files have them.
TRANSFORMERS = {
    "black-forest-labs/FLUX.1-Kontext-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-dev": 11_901_408_320,
    "black-forest-labs/FLUX.1-schnell": 11_891_178_560,
    "stabilityai/stable-diffusion-3-medium-diffusers": 2_028_328_000,
    "stabilityai/stable-diffusion-3.5-large": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-large-turbo": 8_056_627_520,
    "stabilityai/stable-diffusion-3.5-medium": 2_243_171_520,
}
T5 = 4_762_310_656


# The same for Z-Image, which has no position table.
Z_IMAGE = ("Tongyi-MAI/Z-Image", "Tongyi-MAI/Z-Image-Turbo")
QWEN_IMAGE = ("Qwen/Qwen-Image", "Qwen/Qwen-Image-2512")
# Parameters and heads of transformers, parameters of autoencoders, flow_shift, and latents of 480x832 with 81 frames.
WAN = {
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": (1_418_996_800, 12, 126_892_531, 3, (21, 60, 104, 16)),
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": (14_288_491_584, 40, 126_892_531, 3, (21, 60, 104, 16)),
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": (14_288_491_584, 40, 126_892_531, 3, (21, 60, 104, 16)),
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": (4_999_787_712, 24, 704_688_668, 5, (21, 30, 52, 48)),
}
HUNYUAN = "hunyuanvideo-community/HunyuanVideo"
# Of klein's sizes: the transformer, the whole Qwen3, and its width, hidden width, and whether its head is its own.
SIZES = {
    "4B": (3_875_544_576, 4_022_468_096, 2560, 9728, False),
    "9B": (9_078_581_248, 8_190_735_360, 4096, 12288, True),
}
KLEIN = [f"black-forest-labs/FLUX.2-klein-{kind}{size}" for kind in ("", "base-") for size in SIZES]


def size(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_all_are_known():
    assert published_models() == sorted(
        [*QWEN_IMAGE, *Z_IMAGE, *KLEIN, *WAN, HUNYUAN, *TRANSFORMERS]
    )
    assert published_folder("stabilityai/stable-diffusion-9") is None


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_shipped_configuration_has_the_models_sizes(name):
    folder = published_folder(name)
    family = load_family(folder)
    shapes = family.shapes()
    table = shapes["transformer"].get("pos_embed", {}).get("pos_embed", {})
    assert size(shapes["transformer"]) - size(table) == TRANSFORMERS[name]
    assert size(shapes["vae"]) == 83_819_683
    ids = family.tokenize([{"prompt": ""}])
    if name.startswith("stabilityai"):
        encoders, tokens = (123_650_304, 694_659_840, T5), (77, 77, 256)
    else:
        encoders, tokens = (123_060_480, T5), (77, 512)
    parts = sorted(part for part in shapes if part.startswith("text_encoder"))
    assert tuple(size(shapes[part]) for part in parts) == encoders
    assert tuple(each.shape for each in ids) == tuple((1, length) for length in tokens)


@pytest.mark.parametrize(("name", "shift"), zip(Z_IMAGE, (6, 3), strict=True))
def test_a_shipped_z_image_has_the_models_sizes(name, shift):
    family = load_family(published_folder(name))
    shapes = family.shapes()
    assert size(shapes["transformer"]) == 6_154_908_736
    assert family.transformer.config.axes_lens[0] == 1536
    # Qwen3-4B without its last layer and its last norm, which are not read.
    layer = 2560 * (2 * 4096 + 2 * 1024 + 3 * 9728) + 2 * 2560 + 2 * 128
    assert size(shapes["text_encoder"]) == 4_022_468_096 - layer - 2560
    assert size(shapes["vae"]) == 83_819_683
    assert family.scheduler.shift == shift and family.heads.number == 30
    assert family.tokenize([{"prompt": ""}]).ids.shape == (1, 512)
    assert family.latent_shape(family.default_size()) == (128, 128, 16)


@pytest.mark.parametrize("name", QWEN_IMAGE)
def test_a_shipped_qwen_image_has_the_models_sizes(name):
    family = load_family(published_folder(name))
    shapes = family.shapes()
    assert size(shapes["transformer"]) == 20_430_401_088
    # Qwen2.5-7B, without its head.
    assert size(shapes["text_encoder"]) == 7_615_616_512 - 152_064 * 3584
    assert size(shapes["vae"]) == 126_892_531
    assert (family.scheduler.max_shift, family.scheduler.shift_terminal) == (0.9, 0.02)
    assert family.tokenize([{"prompt": ""}]).ids.shape == (1, 34 + 512)
    assert family.latent_shape(family.default_size()) == (128, 128, 16)


@pytest.mark.parametrize("name", KLEIN)
def test_a_shipped_klein_has_the_models_sizes(name):
    transformer, encoder, width, hidden, head = SIZES[name[-2:]]
    family = load_family(published_folder(name))
    shapes = family.shapes()
    assert size(shapes["transformer"]) == transformer
    # Qwen3 without its last nine layers, its last norm, and its head, which are not read.
    layer = width * (2 * 4096 + 2 * 1024 + 3 * hidden) + 2 * width + 2 * 128
    assert size(shapes["text_encoder"]) == encoder - 9 * layer - width - head * 151936 * width
    # With the two statistics of 128 channels.
    assert size(shapes["vae"]) == 84_046_115 + 2 * 128
    assert family.distilled == ("base" not in name) == (family.guidance == "none")
    assert family.heads.number == width_of(family) // 128
    tokens = family.tokenize([{"prompt": ""}])
    assert tokens.ids.shape == (1, 512)
    assert family.latent_shape(family.default_size()) == (64, 64, 128)


@pytest.mark.parametrize("name", WAN)
def test_a_shipped_wan_has_the_models_sizes(name):
    family = load_family(published_folder(name))
    shapes = family.shapes()
    found = size(shapes["transformer"]), family.heads.number, size(shapes["vae"])
    latents = family.latent_shape(family.default_size())
    assert (*found, family.scheduler.flow_shift, latents) == WAN[name]
    assert [size(shapes[part]) for part in family.trained] == [found[0]] * (1 + ("A14B" in name))
    assert size(shapes["text_encoder"]) == 5_680_910_336
    assert family.tokenize([{"prompt": ""}]).ids.shape == (1, 512)


def test_the_shipped_hunyuan_video_has_the_models_sizes():
    family = load_family(published_folder(HUNYUAN))
    sizes = {part: size(tree) for part, tree in family.shapes().items()}
    # Llama 3 8B with the tokens of LLaVA, without its head, its last two layers and its last norm.
    layer = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096
    assert sizes == {
        "transformer": 12_821_012_544,
        "vae": 146_136_339,
        "text_encoder": 128_320 * 4096 + 30 * layer,
        "text_encoder_2": 123_060_480,
    }
    assert (family.scheduler.shift, family.heads.number) == (7, 24)
    tokens = family.tokenize([{"prompt": ""}])
    assert [each.shape for each in tokens] == [(1, 95 + 256), (1, 95 + 256), (1, 77)]
    assert family.latent_shape(family.default_size()) == (33, 90, 160, 16)


@pytest.mark.parametrize("name", [*WAN, HUNYUAN])
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


def width_of(family) -> int:
    return family.shapes()["transformer"]["x_embedder"]["kernel"].shape[1]


def test_there_are_no_weights_to_train():
    name = next(iter(TRANSFORMERS))
    folder = resolve_folder(published_folder(name))
    group = DeviceGroup(make_mesh(jax.devices()[:1]))
    with pytest.raises(ValueError, match="transformer holds no weights"):
        read_parts(load_family(folder), folder, ("transformer",), group)


def test_a_local_folder_of_that_name_comes_first(tmp_path, monkeypatch):
    name = next(iter(TRANSFORMERS))
    (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert published_folder(name) is None
