"""Each learned reward against its source's formula in torch, from the files to the score."""

import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from digen_jax import learned_rewards
from digen_jax.errors import ConfigError
from digen_jax.learned_rewards.sanity_checks import image_pairs, prompt_pairs
from digen_jax.learned_rewards.scorers import (
    OPEN,
    clean_prompt,
    open_aesthetic,
    open_hpsv2,
)
from digen_jax.parallel.mesh import make_mesh
from digen_jax.parallel.placement import DeviceGroup
from digen_jax.parallel.reward_model import FrameReduction, RewardModel
from digen_jax.rewards import Rewards, RewardSettings
from digen_jax.rewards.built_in import BUILT_IN, resolve
from digen_jax.rewards.sanity_check import run_sanity_checks
from tests.learned_rewards.folders import PROMPTS, SIZE, TOKENS, Files, pictures

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@pytest.fixture(autouse=True)
def exact():
    with jax.default_matmul_precision("highest"):
        yield


def resized(images: np.ndarray, height: int, width: int, mode: str) -> torch.Tensor:
    x = torch.tensor(images.transpose(0, 3, 1, 2)) / 255
    resize = torch.nn.functional.interpolate
    return resize(x, size=(height, width), mode=mode, antialias=True, align_corners=False)


def normalised(x: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (MEAN, STD))
    return (x - mean) / std


def processed(files: Files, images: np.ndarray) -> torch.Tensor:
    processor = transformers.CLIPImageProcessorPil.from_pretrained(files.clip)
    found = processor(list(map(Image.fromarray, images))).pixel_values
    return torch.tensor(np.stack(found))


def tokens(files: Files, **options) -> dict[str, torch.Tensor]:
    tokenizer = transformers.CLIPTokenizer.from_pretrained(files.clip)
    options |= {"truncation": True, "max_length": TOKENS, "return_tensors": "pt"}
    return tokenizer(PROMPTS, **options)


def by_clip_score(files: Files, images: np.ndarray) -> torch.Tensor:
    # 40 x 56 becomes 24 x 33, of which torchvision's crop leaves out round(4.5) columns.
    pixels = normalised(resized(images, 24, 33, "bilinear")[..., 4:28])
    found = files.clip_module(pixel_values=pixels, **tokens(files, padding="max_length"))
    return found.logits_per_image.diagonal() / 30


def by_pickscore(files: Files, images: np.ndarray) -> torch.Tensor:
    model = files.clip_module
    image = model.get_image_features(processed(files, images)).pooler_output
    text = model.get_text_features(**tokens(files, padding=True)).pooler_output
    image, text = (x / x.norm(dim=-1, keepdim=True) for x in (image, text))
    return model.logit_scale.exp() * (text @ image.T).diagonal() / 26


def by_hpsv2(files: Files, images: np.ndarray) -> torch.Tensor:
    # 40 x 56 becomes 17 x 24, with bars of 3 rows above and 4 below.
    bars = torch.nn.functional.pad(resized(images, 17, 24, "bicubic"), (0, 0, 3, 4))
    tokenizer = transformers.CLIPTokenizer.from_pretrained(files.clip)
    ids = np.zeros((len(PROMPTS), TOKENS), int)
    for row, prompt in zip(ids, PROMPTS, strict=True):
        found = tokenizer(prompt).input_ids
        found = [*found[: TOKENS - 1], found[-1]] if len(found) > TOKENS else found
        row[: len(found)] = found
    return files.hps_module(normalised(bars), torch.tensor(ids))


def by_aesthetic(files: Files, images: np.ndarray) -> torch.Tensor:
    embedding = files.clip_module.get_image_features(processed(files, images)).pooler_output
    return files.head_module(embedding / embedding.norm(dim=-1, keepdim=True))[:, 0]


REWARDS = {
    "clip_score": by_clip_score,
    "pickscore": by_pickscore,
    "hpsv2": by_hpsv2,
    "aesthetic": by_aesthetic,
}


def settings(files: Files, name: str) -> dict[str, str]:
    return {
        "clip_score": {"folder": str(files.clip)},
        "pickscore": {"folder": str(files.clip), "processor": str(files.clip)},
        "hpsv2": {"file": str(files.hps), "tokenizer": str(files.clip)},
        "aesthetic": {"folder": str(files.clip), "head": str(files.head)},
    }[name]


@pytest.mark.parametrize("name", REWARDS)
def test_the_reward_on_the_host_equals_its_source(name, files):
    images = pictures()
    with torch.no_grad():
        expected = REWARDS[name](files, images).numpy()
    assert np.ptp(expected) > 0.01
    (named,) = resolve(
        [RewardSettings(name, settings=settings(files, name) | {"batch": 2})]
    ).members
    found = named.answer((images, PROMPTS, [{}] * 3)).columns[:, 0]
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.slow
def test_bfloat16_stays_close_and_keeps_the_logits_scale(files):
    images = pictures()
    for name in ("pickscore", "aesthetic"):
        opened = OPEN[name](**settings(files, name), dtype=jnp.bfloat16)
        scorer, params = opened.scorer, opened.read(None)
        scores = jax.jit(scorer.score)(params, images, scorer.tokenize(PROMPTS))
        with torch.no_grad():
            expected = REWARDS[name](files, images).numpy()
        assert scores.dtype == jnp.float32
        assert 1e-5 < np.abs(scores - expected).max() < 0.05
        if name == "pickscore":
            assert params["logit_scale"].dtype == jnp.float32


@pytest.mark.slow
def test_no_torch_is_imported(files):
    calls = "".join(
        f"learned_rewards.{BUILT_IN[name].factory}(**{settings(files, name)!r})"
        "(images, ['a red star'], [{}])\n"
        for name in REWARDS
    )
    code = (
        "import sys, numpy as np\nfrom digen_jax import learned_rewards\n"
        f"images = np.zeros((1, 24, 30, 3), np.uint8)\n{calls}sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def on_host(scorer, params, batch: int) -> RewardModel:
    group = DeviceGroup(make_mesh(jax.local_devices()[:1]))
    return RewardModel("reward", scorer, params, group, batch)


def test_batches_of_any_number_are_cut_and_padded(files):
    opened = open_aesthetic(files.clip, files.head)
    scorer, images = opened.scorer, pictures(24, 24, count=7)
    with torch.no_grad():
        expected = by_aesthetic(files, images).numpy()
    calls = set()

    class Noted:
        tokens, tokenize = scorer.tokens, staticmethod(scorer.tokenize)

        def score(self, params, images, ids):
            calls.add(len(images))
            return scorer.score(params, images, ids)

    reward = on_host(Noted(), opened.read(None), batch=4)
    assert [reward.rows(count) for count in (1, 2, 3, 4, 5, 7, 9)] == [1, 2, 4, 4, 8, 8, 12]
    np.testing.assert_allclose(reward(images, [""] * 7, [{}] * 7), expected, atol=1e-5)
    np.testing.assert_allclose(reward(images[:1], [""], [{}]), expected[:1], atol=1e-5)
    assert calls == {4, 1}  # traced sizes: the last three are padded to four
    assert reward(images[:0], [], []).shape == (0,)
    with pytest.raises(ValueError, match="batch"):
        on_host(scorer, {}, batch=0)


def test_hpsv2_cleans_prompts_as_open_clip():
    assert clean_prompt("a \u201ccat\u201d\u2019s") == 'a "cat"\'s'
    assert clean_prompt("  a cat &amp;amp; a dog &lt;3 ") == "a cat & a dog <3"


CLIPS = np.stack([pictures(seed=one) for one in range(5)], axis=1)  # of 5 frames


REDUCTIONS = [
    ({}, lambda s: s.mean(1)),
    ({"every": 2}, lambda s: s[:, ::2].mean(1)),
    ({"reduce": "first"}, lambda s: s[:, 0]),
    ({"reduce": "middle"}, lambda s: s[:, 2]),
    ({"reduce": "top", "top_share": 0.3}, lambda s: np.sort(s)[:, -2:].mean(1)),
    ({"reduce": "top", "every": 4, "top_share": 0.5}, lambda s: s[:, ::4].max(1)),
]


def test_a_clip_is_scored_by_its_frames(files):
    opened = OPEN["clip_score"](files.clip)
    reward = on_host(opened.scorer, opened.read(None), batch=2)
    frames = np.stack([reward(one, PROMPTS) for one in CLIPS.swapaxes(0, 1)], 1)
    for settings, of_frames in REDUCTIONS:
        reward.reduction = learned_rewards.ClipScore(folder="", **settings).reduction
        np.testing.assert_allclose(reward(CLIPS, PROMPTS), of_frames(frames), rtol=1e-5)


@pytest.mark.parametrize("settings", [{"reduce": "last"}, {"every": 0}, {"top_share": 0.0}])
def test_invalid_settings_of_clips_are_refused(settings):
    with pytest.raises(ValueError, match="|".join(settings)):
        FrameReduction(**settings)


def test_invalid_files_are_named(files, tmp_path):
    def refused(message, open, *given):
        with pytest.raises(ValueError, match=message):
            open(*given).read(None)

    pickscore, processor = OPEN["pickscore"], tmp_path / "preprocessor_config.json"
    missing = r"tensor layers.0.bias .* missing from .*compressed.pt"
    refused(missing, open_aesthetic, files.clip, files.hps)
    no_clip = r"head.pth has no CLIP of open_clip: tensor visual.conv1"
    refused(no_clip, open_hpsv2, files.head, files.clip)
    refused(r"none.pt is missing", open_hpsv2, tmp_path / "none.pt", files.clip)
    refused("is neither an existing folder nor a hub id", pickscore, tmp_path / "none")
    refused(r"preprocessor_config.json is missing", pickscore, files.clip, tmp_path)
    processor.write_text('{"crop_size": 20}')
    refused(f"crop_size is 20, .* image_size is {SIZE}", pickscore, files.clip, tmp_path)
    processor.write_text('{"resample": 7}')
    refused(r"preprocessor_config.json: resample must be 2", pickscore, files.clip, tmp_path)


def test_surplus_and_missing_tensors_of_open_clip_are_named(files, tmp_path):
    state = files.hps_module.state_dict()
    torch.save(
        state | {"visual.transformer.resblocks.0.ls_1.gamma": torch.ones(48)}, tmp_path / "a.pt"
    )
    with pytest.raises(ValueError, match=r"ls_1.gamma .* is unexpected"):
        open_hpsv2(tmp_path / "a.pt", files.clip).read(None)
    del state["transformer.resblocks.1.attn.in_proj_bias"]
    torch.save(state, tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r"layers.1.self_attn.._proj.bias .* is missing"):
        open_hpsv2(tmp_path / "b.pt", files.clip).read(None)


# ------------------------------------------------------------------------------------ sanity checks


def test_prompt_pairs_show_the_right_prompt():
    check = prompt_pairs(64)
    assert check.images.shape == (8, 64, 64, 3) and check.images.dtype == np.uint8
    assert check.prefers == ((0, 1), (2, 3), (4, 5), (6, 7)) and not check.verified
    for right, wrong in check.prefers:
        np.testing.assert_array_equal(check.images[right], check.images[wrong])
        assert check.prompts[right] != check.prompts[wrong]
    red = check.images[0]
    assert check.prompts[0] == "a photo of a red circle"
    assert red[32, 32, 0] > 200 > 50 > red[32, 32, 1] and np.ptp(red[2, 2].astype(int)) < 10
    assert check.images[-1].std() > 20


def test_image_pairs_have_one_prompt():
    check = image_pairs(64)
    assert check.prompts[0] == check.prompts[1] and check.prefers == ((0, 1),)
    rough = [np.abs(np.diff(image.astype(int), axis=1)).mean() for image in check.images]
    assert rough[0] < rough[1] / 2


def test_a_learned_reward_is_named_in_a_config_and_its_weights_are_read_when_it_first_scores(
    tmp_path,
):
    asked = RewardSettings("pickscore", settings={"folder": str(tmp_path), "batch": 2})
    found = pickle.loads(pickle.dumps(resolve([asked])))
    assert isinstance(found, Rewards)
    with pytest.raises(ConfigError, match=f"reward 'pickscore' raised .*{tmp_path}"):
        run_sanity_checks(found, found.score)
    with pytest.raises(ConfigError, match="no setting 'foldr'; did you mean 'folder'"):
        resolve([RewardSettings("pickscore", settings={"foldr": "x"})])
