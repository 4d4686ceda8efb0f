import numpy as np
import pytest
from PIL import Image

from digen_jax import rewards
from digen_jax.errors import ConfigError
from digen_jax.images import Size
from digen_jax.process.shutdown import Stopped
from digen_jax.rewards import RewardSettings
from digen_jax.rewards.built_in import resolve
from digen_jax.rewards.dry_run import KINDS, Watched, dry_run, synthetic_image
from digen_jax.rewards.errors import RewardError
from digen_jax.rewards.geneval import score_images

COLORS = {"prompt": "a red circle", "tag": "colors", "include": []}
PLAIN = {"prompt": "a cat"}


def scored(reward):
    return rewards.alone("mine:f", reward).score


def test_a_record_of_each_kind_is_tried_on_images_of_the_runs_size():
    seen = []

    def reward(images, prompts, metadata):
        assert images.dtype == np.uint8 and images.std() > 50
        seen.append((images.shape, prompts, metadata))
        return images.mean((1, 2, 3))

    many = [{"prompt": f"{n}", f"field{n}": n} for n in range(KINDS + 3)]
    dry_run(scored(reward), [[COLORS, COLORS, PLAIN, COLORS | {"prompt": "b"}], many], Size(16, 24))
    first, second = seen
    expected = [COLORS, COLORS, PLAIN, PLAIN]
    assert first == ((4, 16, 24, 3), [record["prompt"] for record in expected], expected)
    assert second[0] == (2 * KINDS, 16, 24, 3) and second[2][::2] == second[2][1::2] == many[:KINDS]
    seen.clear()  # prompts of other rewards are of another kind
    asked = [
        PLAIN | {"prompt": one, "rewards": [name]} for one, name in (("0", "x"), ("1", "mine:f"))
    ]
    dry_run(scored(reward), [[*asked, asked[1] | {"prompt": "2"}]], Size(8, 8))
    assert [prompts for _, prompts, _ in seen] == [["1", "1"]]


def test_clips_are_tried_on_clips_a_few_at_a_time(monkeypatch):
    seen = []

    def reward(images, prompts, metadata):
        seen.append(images.shape)
        assert (images[:, 0] != images[:, 1]).any()  # they move
        return images.mean((1, 2, 3, 4))

    monkeypatch.setattr("digen_jax.rewards.dry_run.PIXELS", 1)
    dry_run(scored(reward), [[COLORS, PLAIN]], Size(16, 24, 5))
    assert seen == [(2, 5, 16, 24, 3)] * 2


def test_clips_are_refused_by_a_reward_of_images():
    geneval = rewards.alone(
        "mine:f", lambda images, prompts, metadata: score_images(None, images, metadata)
    )
    for reward in (resolve([RewardSettings("shapes_geneval")]), geneval):
        with pytest.raises(ConfigError, match="set frames to 1"):
            dry_run(reward.score, [[COLORS]], Size(16, 16, 5))


@pytest.mark.parametrize("scores", [[0.5], np.float32([0.5]), 0.5])
@pytest.mark.parametrize("records", [[PLAIN], [COLORS, PLAIN | {"rewards": ["other"]}]])
def test_one_number_for_any_batch_is_refused(scores, records):
    with pytest.raises(RewardError):
        dry_run(scored(lambda *_: scores), [records], Size(8, 8))


def test_records_that_a_reward_cannot_score_are_refused():
    with pytest.raises(ConfigError, match=r"cannot score .a cat.: (?s:.*)dry run"):
        dry_run(resolve([RewardSettings()]).score, [[COLORS], [COLORS, PLAIN]], Size(32, 32))


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("np.uint8(images * 255)", "np.multiply"),
        ("np.uint8((images.astype(np.float32) * 255).round())", "multiplied by 255"),
        ("(images.mean((1, 2, 3)) * 255.0)", "multiplied by 255"),
        ("images[..., 0] - images[..., 1]", "np.subtract"),
        ("np.abs(images[:, 1:] - images[:, :-1])", "np.subtract"),
        ("-images", "np.negative"),
        ("np.power(images, 2)", "np.power"),
        ("images.__imul__(255)", "np.multiply"),
    ],
)
def test_misread_images_are_detected(line, what):
    namespace = {"np": np}
    exec(f"def reward(images, prompts, metadata):\n    {line}\n    return [0.0]", namespace)
    with pytest.raises(ConfigError) as caught:
        dry_run(scored(namespace["reward"]), [[PLAIN]], Size(16, 16))
    text = str(caught.value)
    assert "'mine:f'" in text and what in text and "astype" in text


@pytest.mark.parametrize(
    "line",
    [
        "images / 255 * 255",
        "images.astype(np.float32) * 2 - 255",
        "images[..., 0].mean((1, 2)) - images[..., 1:].mean((1, 2, 3))",
        "255 - images",
        "images.astype(int) * 255 // 256 if False else images // 2 * 2",
        "images @ np.float32([0.299, 0.587, 0.114])",
        "np.stack([images, images]).astype(np.int16) - 300",
        "(images > 127) * 255 // 255",
        "Image.fromarray(images[0]).resize((4, 4)).tobytes()",
        "np.concatenate([images, images], axis=2).sum(), np.histogram(images, 8), np.median(images)",
    ],
)
def test_images_that_are_used_as_bytes_are_accepted(line):
    def reward(images, prompts, metadata):
        eval(line, {"np": np, "images": images, "Image": Image})
        return np.zeros(len(images))

    dry_run(scored(reward), [[PLAIN]], Size(16, 16))


def test_an_error_by_watching_is_tried_again_with_plain_images():
    calls = []

    def reward(images, prompts, metadata):
        calls.append(type(images))
        if type(images) is not np.ndarray:
            raise TypeError("of a library that takes plain arrays only")
        return np.ones(len(images))

    dry_run(scored(reward), [[PLAIN]], Size(8, 8))
    assert [one.__name__ for one in calls] == ["Watched", "ndarray"]


@pytest.mark.parametrize("error", [ConfigError, Stopped])
def test_a_deliberate_error_is_raised_at_once(error):
    asked = []

    def gone(images, prompts, metadata):
        asked.append(len(prompts))
        raise error("the server does not answer")

    with pytest.raises(error, match="does not answer"):
        dry_run(scored(gone), [[{"prompt": "a"}]], Size(8, 8))
    assert asked == [2]


def test_watched_images_give_the_same_scores():
    images = np.stack([synthetic_image(16, 16)] * 2)

    def reward(images, prompts, metadata):
        grey = images.astype(np.float32) @ np.float32([0.3, 0.6, 0.1])
        return {"f": np.abs(np.diff(grey, axis=1)).mean((1, 2)), "max": images.max((1, 2, 3))}

    one, two = (
        rewards.alone("mine:f", reward).score(given, ["", ""], [{}, {}])
        for given in (images, images.view(Watched))
    )
    np.testing.assert_array_equal(one.columns, two.columns)
    assert all(type(found) is np.ndarray for found in (two.columns, *two.shown.values()))
