"""What single families do, beyond `test_families.py`."""

import dataclasses
import json
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5 import extract_glyph_texts
from diffusers.pipelines.wan import pipeline_wan
from safetensors.numpy import load_file, save_file

from digen_jax.config.load import load_config
from digen_jax.diffusion.schedule import UniPcConfig
from digen_jax.diffusion.steps import Ode
from digen_jax.errors import ConfigError
from digen_jax.families import load_family, open_pipeline, read_frozen
from digen_jax.inference.model import all_devices, open_model
from digen_jax.models.hunyuan_video.family15 import quoted_text
from digen_jax.models.wan import family as wan
from digen_jax.parallel.mesh import ShardingRules, make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.policy import Policy
from digen_jax.parallel.sampler import Sampler, SamplerSettings, Weights
from digen_jax.policies import make_policy
from tests.cases import said
from tests.models.families import PROMPTS, STEPS, diffusers_pipeline, packed
from tests.models.hunyuan.folders import llama3_backend
from tests.models.test_families import FAMILIES, close
from tests.models.wan.folders import SCHEDULER
from tests.tiny_runs import tiny_config

pytestmark = pytest.mark.usefixtures("exact")
PART = "text_encoder_3"


@pytest.fixture
def folder(base, name):
    return FAMILIES[name].folder(base, FAMILIES[name].kinds[0])


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "pipeline")


def of(*names: str):
    return pytest.mark.parametrize("name", names)


def edit(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def refused(folder, **options) -> str:
    with pytest.raises(ConfigError) as caught:
        load_family(open_pipeline(str(folder)), **options)
    return str(caught.value).replace(f"{folder}/", "")


# --------------------------------------------------------------------------- names of tensors in files


@of("flux", "qwen_image")
def test_tensors_are_read_by_the_names_that_another_version_gave_them(name, folder, tmp_path):
    """CLIP's with a prefix, as in published folders; Qwen2.5-VL's as they are in memory. transformers 5 has neither."""
    spec = FAMILIES[name]
    family, params, _ = spec.ours(folder)
    tensors = load_file(folder / "text_encoder" / "model.safetensors")
    if name == "flux":
        assert not any(key.startswith("text_model.") for key in tensors)
        other = {f"text_model.{key}": tensor for key, tensor in tensors.items()}
        other["text_model.embeddings.position_ids"] = np.arange(20)[None]
    else:
        assert "model.layers.0.mlp.up_proj.weight" in tensors
        other = {
            key.replace("model.", "model.language_model.").replace("visual.", "model.visual."): t
            for key, t in tensors.items()
        }
    (tmp_path / "text_encoder").mkdir()
    save_file(other, tmp_path / "text_encoder" / "model.safetensors")
    found = family.read(tmp_path, "text_encoder")
    jax.tree.map(np.testing.assert_array_equal, found, params["text_encoder"])


@of("zimage")
def test_an_encoder_saved_without_its_head_is_read(name, copy, folder):
    """As the index of the published folder names it."""
    edit(copy / "model_index.json", text_encoder=["transformers", "Qwen3Model"])
    shutil.rmtree(copy / "text_encoder")
    diffusers_pipeline(folder).text_encoder.model.save_pretrained(copy / "text_encoder")
    read = load_family(copy, max_sequence_length=FAMILIES[name].tokens).read(copy, "text_encoder")
    jax.tree.map(
        np.testing.assert_array_equal, read, FAMILIES[name].ours(folder)[1]["text_encoder"]
    )


# ------------------------------------------------------------------------------------------ guidance


@of("flux", "flux2")
def test_distilled_models_have_no_guidance(base, name):
    spec = FAMILIES[name]
    guided, distilled = (load_family(spec.folder(base, kind)) for kind in spec.kinds)
    assert guided.guidance == {"flux": "both", "flux2": "classifier-free"}[name]
    assert (distilled.guidance, distilled.default_guidance) == ("none", 1.0)
    with pytest.raises(ValueError, match="guidance is 'none'"):
        Policy(distilled, 3.5)


@pytest.mark.parametrize(
    ("kind", "asked", "match"),
    [
        ("dev", dict(), "--true_cfg_scale is not above 1"),
        ("schnell", dict(), "guidance is 'none'"),
        ("dev", dict(true_cfg_scale=2.0), "holds no weights"),
    ],
)
def test_a_negative_prompt_that_nothing_reads_is_refused_before_weights_are_read(
    base, tmp_path, kind, asked, match
):
    ignore = shutil.ignore_patterns("*.safetensors")
    source = FAMILIES["flux"].folder(base, kind)
    folder = shutil.copytree(source, tmp_path / "pipeline", ignore=ignore)
    given = "--negative_prompt is given"
    with pytest.raises(ConfigError, match=match) as caught:
        open_model(str(folder), jax.devices()[:1], options=[asked], negative=given)
    assert str(caught.value).startswith(f"{given}, but ") == ("true_cfg_scale" not in asked)


@of("qwen_image")
def test_guided_velocities_of_qwen_image_are_as_long_as_the_prompts(name, folder):
    """And those of zeros, of a network of which nothing is trained yet, are numbers: diffusers divides 0 by 0 there."""
    family = FAMILIES[name].ours(folder)[0]
    null, prompt = np.random.default_rng(0).normal(size=(2, 1, 2, 4, 3)).astype(np.float32)
    guided = family.guided(jnp.asarray(null), jnp.asarray(prompt), 3.0)
    lengths = [np.linalg.norm(packed(np.asarray(v)), axis=-1) for v in (guided, prompt)]
    np.testing.assert_allclose(*lengths, rtol=1e-5)
    zeros = jnp.zeros_like(prompt)
    both = jax.jit(jax.value_and_grad(lambda n, p: family.guided(n, p, 3.0).sum(), (0, 1)))
    value, gradients = both(zeros, zeros)
    assert value == 0 and np.isfinite(gradients).all()


@pytest.mark.slow
@of("flux2", "qwen_image")
def test_a_folder_is_sampled_with_the_defaults_of_its_pipeline(name, folder):
    model = open_model(str(folder), jax.devices()[:1])
    assert model.defaults == (*model.family.default_size()[:2], 50, 4.0, 1.0, 1, 0.0)


# ------------------------------------------------------------------------------------------- Wan 2.1


@of("wan")
@pytest.mark.parametrize("fixed", [False, True], ids=["without ftfy", "with ftfy"])
def test_prompts_of_wan_are_cleaned_as_by_the_pipeline(name, folder, monkeypatch, fixed):
    """ftfy is not installed for the tests; one that straightens quotes stands in for it."""
    if fixed:
        ftfy = SimpleNamespace(
            fix_text=lambda text: text.replace("\N{LEFT DOUBLE QUOTATION MARK}", '"')
        )
        monkeypatch.setattr(wan, "ftfy", ftfy)
        monkeypatch.setattr(pipeline_wan, "ftfy", ftfy, raising=False)
        monkeypatch.setattr(pipeline_wan, "is_ftfy_available", lambda: True)
    prompts = [
        "  a red\n\tcircle ",
        "&amp;lt;b&gt; &nbsp; &quot;a&quot;",
        "\x1ca\x1f \x1c b\x85c\u3000d",
    ]
    prompts += ["\N{LEFT DOUBLE QUOTATION MARK}a\u200b&#8221;", ""]
    expected = [pipeline_wan.prompt_clean(prompt) for prompt in prompts]
    assert [wan.clean_prompt(prompt) for prompt in prompts] == expected
    assert expected[1] == '<b> "a"' and ('"a' in expected[3]) == fixed
    family = FAMILIES[name].ours(folder)[0]
    for one, other in zip(
        family.tokenize(said(*prompts)), family.tokenize(said(*expected)), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    longest = " ".join(["a"] * (family.max_sequence_length - 1))
    found = family.is_truncated([longest, f" {longest}\n", f"{longest} a"])
    assert found.tolist() == [False, False, True]


@of("wan")
def test_times_of_wan_are_diffusers_whole_numbers_in_every_schedule(name, folder):
    """At shift 1 those of float32 sigmas alone would differ; noise levels between have whole times, too."""
    family = dataclasses.replace(FAMILIES[name].ours(folder)[0], scheduler=UniPcConfig(1.0))
    scheduler = diffusers_pipeline(folder).scheduler.from_config({**SCHEDULER, "flow_shift": 1.0})
    odd = 0
    for steps in range(1, 101):
        scheduler.set_timesteps(steps)
        scheduled = family.scheduled(steps, FAMILIES[name].size)
        sigmas = family.sigmas(steps, FAMILIES[name].size)[:-1]
        times = FAMILIES[name].times(scheduled, sigmas)
        np.testing.assert_array_equal(times, scheduler.timesteps.numpy())
        odd += bool(scheduled.odd_times)
        assert scheduled.scheduled(40, FAMILIES[name].size).odd_times == ()
    assert odd == 28
    between = scheduled.network_time(jnp.float32([0.0, 0.1239, 0.9999, 1.0]))
    assert between.tolist() == [0, 123, 999, 1000]


@of("wan")
def test_samplers_and_trainers_of_wan_have_the_times_of_their_schedule(name, base, folder):
    """The trainer's policy those of the config's sampler, so that ratios are 1 before an update."""
    spec = FAMILIES[name]
    family = dataclasses.replace(spec.ours(folder)[0], scheduler=UniPcConfig(1.0))
    settings = SamplerSettings(spec.size, 36, family.solver)
    sampler = Sampler(Policy(family), all_devices(jax.devices()[:1]), settings)
    given = tiny_config(base, "full")
    given.model.folder, given.sampler.steps = str(folder), 3
    trained = make_policy(load_config(given), sampler.policy.family)
    for policy, steps in ((sampler.policy, 36), (trained, 3)):
        assert policy.family.odd_times == family.scheduled(steps, spec.size).odd_times != ()
    assert trained.family.odd_times != sampler.policy.family.odd_times


@pytest.mark.parametrize(
    ("name", "frames", "near"),
    [
        *(("wan", 8, "use 5 or 9"), ("wan", 0, "use 1"), ("wan", 2, "use 1 or 5")),
        *(("wan", 33, "use 29"), ("hunyuan", 1000, "use 997 or 1001"), ("hunyuan", 0, "use 1")),
    ],
)
def test_frames_that_do_not_fit_have_near_ones_named(name, folder, frames, near):
    family, size = FAMILIES[name].ours(folder)[0], FAMILIES[name].size
    with pytest.raises(ValueError, match=f"{near}$"):
        family.latent_shape(size._replace(frames=frames))
    assert family.latent_shape(size) == (3, 4, 8, 4)


# --------------------------------------------------------------------------------------------- chats


@of("hunyuan")
def test_the_class_of_llama_2_does_not_split_the_words_of_llama_3(name, copy):
    """The published folder names it, and transformers 5 gives it the rules of its own, whatever the file has."""
    edit(copy / "model_index.json", tokenizer=["transformers", "LlamaTokenizerFast"])
    edit(copy / "tokenizer" / "tokenizer_config.json", tokenizer_class="LlamaTokenizer")
    family = load_family(copy, max_sequence_length=FAMILIES[name].tokens)
    texts = [family.template.format(prompt) for prompt in PROMPTS]
    tokens = family.tokenize(said(*PROMPTS))
    split = transformers.LlamaTokenizerFast.from_pretrained(copy / "tokenizer")
    for ids, mask, text in zip(tokens.ids, tokens.mask, texts, strict=True):
        assert ids[mask].tolist() == llama3_backend().encode(text).ids[: len(ids)]
        assert ids[mask].tolist() != split(text).input_ids


@of("qwen_image", "hunyuan", "hunyuan15")
def test_a_tokenizer_that_splits_the_template_otherwise_is_refused(name, copy):
    path = copy / "tokenizer" / "tokenizer.json"
    own = json.loads(path.read_text())
    own["model"]["merges"] = own["model"]["merges"][:-60]
    path.write_text(json.dumps(own))
    assert "tokens for the start of the model's template" in refused(copy)


@pytest.mark.parametrize(
    "prompt",
    [
        *('a "b" and “c d”', 'twice "b" “b”', "no quotes", '""', 'open "b', '"line\nbreak"'),
        '“c" “d”',
    ],
)
def test_quoted_text_is_that_of_diffusers(prompt):
    assert quoted_text(prompt) == (extract_glyph_texts(prompt) or "")


@of("hunyuan15")
def test_the_guider_gives_the_default_guidance(name, copy):
    path = copy / "guider" / "guider_config.json"
    assert load_family(copy).default_guidance == 6
    edit(path, guidance_scale=3)
    assert load_family(copy).default_guidance == 3
    edit(path, enabled=False)
    assert load_family(copy).default_guidance == 1


@of("flux2", "zimage")
def test_a_chat_template_is_needed(name, copy):
    (copy / "tokenizer" / "chat_template.jinja").unlink()
    assert "chat_template.jinja" in refused(copy)


# -------------------------------------------------------------------------- the T5 of Stable Diffusion 3


@of("sd3")
def test_a_split_t5_encodes_as_a_whole_one(name, folder):
    """Over fsdp and tensor, by the rules that a run uses."""
    spec = FAMILIES[name]
    family, params, encode = spec.ours(folder)
    layout = ShardingRules.of(((".*", "embed", "fsdp"),), family.axes())
    group = DeviceGroup(make_mesh(jax.devices()[:4], fsdp=2, tensor=2), layout)
    frozen = read_frozen(family, folder, group)
    tree = frozen[PART]["encoder"]["block_1to2"]
    kernels = [tree["layer_0"]["SelfAttention"]["q"], tree["layer_1"]["DenseReluDense"]["wo"]]
    specs = [tuple(kernel["kernel"].sharding.spec) for kernel in kernels]
    assert specs == [(None, "fsdp", "tensor"), (None, "tensor", "fsdp")]
    sampler = Sampler(Policy(family), group, SamplerSettings(spec.size, STEPS, Ode()))
    found = sampler.encode(Weights(None, None, frozen), said(*PROMPTS)).conditioning
    expected = encode(params, family.tokenize(said(*PROMPTS)))
    for one, other in zip(found, expected, strict=True):
        close(one, other)


@of("sd3")
def test_a_t5_can_be_left_out_and_counts_one_token_then(name, folder):
    family = load_family(folder, max_sequence_length=9)
    left_out = load_family(folder, max_sequence_length=9, without=(PART,))
    clip = family.tokenizer.model_max_length
    assert (family.context_tokens, left_out.context_tokens) == (clip + 9, clip + 1)
    assert (family.heads.weighted, left_out.heads.weighted) == (False, True)
    assert PART in family.shapes() and PART not in left_out.shapes()
    # Seven of the T5's tokens and fewer of a CLIP's, then too many of the T5's alone.
    assert family.is_truncated(["a red circle", "☃ ☃ ☃ ☃ ☃"]).tolist() == [False, True]
    assert left_out.is_truncated(["a red circle", "☃ ☃"]).tolist() == [False, False]


@of("sd3")
def test_a_t5_that_is_not_there_is_refused_unless_it_is_left_out(name, copy):
    edit(copy / PART / "config.json", vocab_size=9)
    assert "tokenizer_3" in refused(copy)
    shutil.rmtree(copy / PART)
    assert refused(copy).startswith(f"{PART} is missing")
    assert load_family(copy, without=(PART,)).text_encoder_3 is None
    edit(copy / "model_index.json", text_encoder_3=[None, None])
    assert load_family(copy).text_encoder_3 is None
