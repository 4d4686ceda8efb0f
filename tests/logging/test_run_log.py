"""Images and results of a run; tests/run checks the files of complete runs."""

import pathlib

import av
import numpy as np
import pytest
from PIL import Image, ImageSequence

from digen_jax.inference.sampling import evaluation_to_folder
from digen_jax.logging.evaluation import Evaluation, Extremes, Sample
from digen_jax.logging.images import ANIMATIONS, check_animation, image_grid, save_frames
from digen_jax.logging.run_log import RunLog, files_table, results_table, speed
from tests.logging.test_metrics import tags
from tests.parallel import toy


def evaluation(frames: int) -> Evaluation:
    """Two clips, whose frames have different greys."""
    greys = np.arange(2 * frames, dtype=np.uint8).reshape(2, frames) * 20
    clips = np.broadcast_to(greys[..., None, None, None], (2, frames, 8, 8, 3))
    return Evaluation([{"prompt": "a"}, {"prompt": "b"}], clips, np.array([0.0, 1.0]))


def opened(folder: pathlib.Path) -> RunLog:
    return RunLog(folder, toy.opened(toy.config()), [], lambda: None)


@pytest.mark.parametrize(
    ("training", "evaluated", "label"),
    [
        (dict(prompts__file="a.txt"), "b.txt", "held-out prompts"),
        (dict(prompts__file="a.txt"), "./a.txt", "training prompts"),
        (dict(prompts__files=("a.txt", "b.txt")), str(pathlib.Path("b.txt").resolve()), "training prompts"),
    ],
)  # fmt: skip
def test_results_are_labelled_by_whether_the_prompts_are_trained_on(training, evaluated, label):
    config = toy.opened(toy.config(**training, evaluation__prompts=evaluated))
    assert config.evaluated_prompts == label


def test_tables_of_results_and_files():
    held_out = [{"prompt": "a", "tag": "counting"}, {"prompt": "b"}]
    table = results_table("held-out prompts", held_out, np.array([0.25, 0.75]), np.array([1, 0.5]))
    assert table.split("\n") == [
        "reward on 2 held-out prompts      before   after    gain",
        "  all                              0.500   0.750  +0.250",
        "  counting                         0.250   1.000  +0.750",
    ]
    assert "\n  images/before_after.png  " in files_table(pathlib.Path("runs/x"))


@pytest.mark.parametrize(
    ("line", "on_cpu", "texts"),
    [
        ({"mfu": 0.314}, False, ["12.8 clips/s (1.6 per device)", "devices 88% busy", "MFU 31%"]),
        ({}, False, ["12.8 clips/s (1.6 per device)", "devices 88% busy", "45.0 TFLOP/s per device"]),
        ({"images_per_second_per_device": 12.8}, True, ["12.8 clips/s", "45.0 TFLOP/s per device"]),
        ({"images_per_second_per_device": 12.8, "mfu": 0.314}, False, ["12.8 clips/s", "devices 88% busy", "MFU 31%"]),
    ],
)  # fmt: skip
def test_the_progress_line_has_the_utilisation_or_else_flops_per_second(line, on_cpu, texts):
    full = {"images_per_second": 12.8, "images_per_second_per_device": 1.6, "utilisation": 0.875}
    full["flops_per_second_per_device"] = 4.5e13
    assert speed(full | line, "clips", on_cpu) == texts


@pytest.mark.parametrize("frames", [1, 5])
def test_clips_have_an_animation_next_to_the_grid_of_middle_frames(tmp_path, frames):
    found = evaluation(frames)
    log = opened(tmp_path)
    log.show(3, found)
    log.close()
    evaluation_to_folder(found, tmp_path / "each", 10)

    animated = [".webp"] if frames > 1 else []
    names = {file.name for file in (tmp_path / "images").iterdir()}
    assert names == {f"step_000003{suffix}" for suffix in [".png", *animated]}
    stems = ["00000_0.000_a", "00001_1.000_b"]
    expected = {stem + suffix for stem in stems for suffix in [".png", *animated]}
    assert {file.name for file in (tmp_path / "each").iterdir()} == {*expected, "grid.png"}
    still = np.asarray(Image.open(tmp_path / "each" / "00001_1.000_b.png"))
    np.testing.assert_array_equal(still, found.clips[1, frames // 2])

    grids = [
        image_grid(found.clips[:, t], ["a", "b"], 6, found.scores, "after step 3")
        for t in range(frames)
    ]
    shown = tmp_path / "images" / "step_000003.png"
    assert Image.open(shown).tobytes() == grids[frames // 2].tobytes()
    if animated:
        animation = Image.open(shown.with_suffix(".webp"))
        assert animation.n_frames == frames
        for t, grid in enumerate(grids):
            animation.seek(t)
            error = np.asarray(animation.convert("RGB"), float) - np.asarray(grid, float)
            # WebP is lossy; frames are 20 apart in a third of the image.
            assert np.abs(error).mean() < 1.5
        clip = Image.open(tmp_path / "each" / "00001_1.000_b.webp")
        assert clip.n_frames == frames and clip.size == (8, 8)
        clip.load()
        assert clip.info["duration"] == 100
        evaluation_to_folder(found, tmp_path / "videos", 20, "mp4")
        with av.open(str(tmp_path / "videos" / "00001_1.000_b.mp4")) as file:
            assert file.streams.video[0].average_rate == 20
            assert len(list(file.decode(video=0))) == frames


@pytest.mark.parametrize("animation", ANIMATIONS)
def test_clips_are_written_as_videos(tmp_path, animation):
    greys = np.arange(9, dtype=np.uint8)[:, None, None, None] * 25
    clip = np.broadcast_to(greys, (9, 16, 32, 3))
    save_frames(tmp_path / "a.png", [Image.fromarray(frame) for frame in clip], 10, animation)
    if animation == "mp4":
        with av.open(str(tmp_path / "a.mp4")) as file:
            assert file.streams.video[0].average_rate == 10
            found = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    else:
        with Image.open(tmp_path / f"a.{animation}") as file:
            found = [frame.convert("RGB") for frame in ImageSequence.Iterator(file)]
            assert file.info["duration"] == 100 and file.info["loop"] == 0
    assert len(found) == 9 and np.abs(np.stack(found) - np.float32(clip)).max() < 6


def test_a_format_that_cannot_be_written_is_refused(monkeypatch):
    assert [check_animation(None, 16, side) for side in (16, 17)] == ["mp4", "webp"]
    with pytest.raises(ValueError, match="even"):
        check_animation("mp4", 16, 17)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert check_animation(None, 16, 16) == "webp" and check_animation("gif", 16, 17) == "gif"
    with pytest.raises(ValueError, match=r"requirements-video\.txt"):
        check_animation("mp4", 16, 16)


def test_the_best_and_worst_images_of_a_step_are_also_in_tensorboard(tmp_path):
    def sample(level: int, prompt: str, value: float) -> Sample:
        images = np.full((1, 8, 8, 3), level, np.uint8)
        return Sample([{"prompt": prompt}], images, np.float32([value]))

    found = Extremes(sample(250, "a", 1.0), sample(10, "b", 0.25))
    log = opened(tmp_path)
    log.extremes(7, found)
    log.metrics.write(7, {"reward": 0.5})
    log.close()
    for name, one in found._asdict().items():
        shown = Image.open(tmp_path / "images" / f"{name}_000007.png")
        prompt, title = one.records[0]["prompt"], f"the {name} images of step 7"
        assert shown.tobytes() == image_grid(one.images, [prompt], 6, one.values, title).tobytes()
    named = [(step, tag) for step, tag, kind in tags(tmp_path) if kind == "image"]
    assert named == [(7, "images/best"), (7, "images/worst")]
