"""The final output of a run; its files are tested with whole runs."""

import pathlib

import numpy as np
import pytest
from PIL import Image

from digen_jax.inference.sampling import evaluation_to_folder
from digen_jax.logging import records
from digen_jax.logging.evaluation import Evaluation, Extremes, Sample
from digen_jax.logging.images import image_grid
from tests.logging.test_metrics import tags
from tests.parallel import toy


@pytest.mark.parametrize(
    ("training", "evaluated", "label"),
    [
        (dict(prompts__file="a.txt"), "b.txt", "held-out prompts"),
        (dict(prompts__file="a.txt"), "./a.txt", "training prompts"),
        (dict(prompts__files=("a.txt", "b.txt")), str(pathlib.Path("b.txt").resolve()), "training prompts"),
    ],
)  # fmt: skip
def test_the_label_tells_whether_evaluated_prompts_are_trained_on(
    tmp_path, monkeypatch, training, evaluated, label
):
    recipe = toy.opened(toy.config(**training, evaluation__prompts=evaluated, evaluation__every=1))
    plotted = []
    monkeypatch.setattr(records, "plot_curves", lambda _, curves, *__: plotted.append(curves))
    monkeypatch.setattr(
        records,
        "before_after",
        lambda *_, title: plotted.append(title) or Image.new("RGB", (1, 1)),
    )
    found = evaluation(frames=1)
    writer = records.Records(tmp_path, recipe, found.records, lambda: None)
    writer.start(0, [])
    for done in (0, 1):
        writer.evaluated(done, found)
    writer.conclude(1)
    writer.close()
    assert plotted[0].keys() == {"training", label} and plotted[1].startswith(label)
    assert recipe.evaluated_prompts == label


def test_table_and_places():
    held_out = [{"prompt": "a", "tag": "counting"}, {"prompt": "b"}]
    assert records.table(
        "held-out prompts", held_out, np.array([0.25, 0.75]), np.array([1.0, 0.5])
    ).split("\n") == [
        "reward on 2 held-out prompts      before   after    gain",
        "  all                              0.500   0.750  +0.250",
        "  counting                         0.250   1.000  +0.750",
    ]
    assert records.where(pathlib.Path("runs/x")).startswith(
        "In runs/x:\n  pictures/before_after.png  "
    )


def evaluation(frames: int) -> Evaluation:
    """Two clips, in which every frame has its own grey."""
    greys = np.arange(2 * frames, dtype=np.uint8).reshape(2, frames) * 20
    clips = np.broadcast_to(greys[..., None, None, None], (2, frames, 8, 8, 3))
    return Evaluation([{"prompt": "a"}, {"prompt": "b"}], clips, np.array([0.0, 1.0]))


def opened(folder: pathlib.Path) -> records.Records:
    return records.Records(folder, toy.opened(toy.config()), [], lambda: None)


def grids(found: Evaluation) -> list[Image.Image]:
    return [
        image_grid(found.clips[:, t], ["a", "b"], 6, found.scores, "after step 3")
        for t in range(found.clips.shape[1])
    ]


def test_of_clips_an_animation_lies_beside_the_picture_of_the_middle_frame(tmp_path):
    found = evaluation(frames=5)
    writer = opened(tmp_path)
    writer.show(3, found)
    writer.close()
    evaluation_to_folder(found, tmp_path / "each")

    names = [file.name for file in sorted((tmp_path / "pictures").iterdir())]
    assert names == ["step_000003.png", "step_000003.webp"]
    expected = grids(found)
    assert Image.open(tmp_path / "pictures" / "step_000003.png").tobytes() == expected[2].tobytes()
    moving = Image.open(tmp_path / "pictures" / "step_000003.webp")
    assert moving.n_frames == 5
    for t, grid in enumerate(expected):
        moving.seek(t)
        error = np.asarray(moving.convert("RGB"), float) - np.asarray(grid, float)
        assert (
            np.abs(error).mean() < 1.5
        )  # WebP is lossy; frames are 20 apart in a third of the picture
    each = Image.open(tmp_path / "each" / "00001_1.000_b.webp")
    assert each.n_frames == 5 and each.size == (8, 8)
    still = np.asarray(Image.open(tmp_path / "each" / "00001_1.000_b.png"))
    np.testing.assert_array_equal(still, found.clips[1, 2])


def test_the_best_and_worst_images_of_a_step_are_pictures_in_tensorboard_too(tmp_path):
    def sample(level: int, prompt: str, value: float) -> Sample:
        images = np.full((1, 8, 8, 3), level, np.uint8)
        return Sample([{"prompt": prompt}], images, np.float32([value]))

    found = Extremes(sample(250, "a", 1.0), sample(10, "b", 0.25))
    writer = opened(tmp_path)
    writer.extremes(7, found)
    writer.metrics.write(7, {"reward": 0.5})
    writer.close()
    for name, one in found._asdict().items():
        shown = Image.open(tmp_path / "pictures" / f"{name}_000007.png")
        prompt = one.records[0]["prompt"]
        title = f"the {name} images of step 7"
        assert shown.tobytes() == image_grid(one.images, [prompt], 6, one.values, title).tobytes()
    named = [(step, tag) for step, tag, kind in tags(tmp_path) if kind == "image"]
    assert named == [(7, "pictures/best"), (7, "pictures/worst")]


def test_of_pictures_there_are_the_same_files_as_ever(tmp_path):
    found = evaluation(frames=1)
    writer = opened(tmp_path)
    writer.show(3, found)
    writer.close()
    evaluation_to_folder(found, tmp_path / "each")
    grids(found)[0].save(tmp_path / "expected.png")
    assert [file.name for file in (tmp_path / "pictures").iterdir()] == ["step_000003.png"]
    shown = (tmp_path / "pictures" / "step_000003.png").read_bytes()
    assert shown == (tmp_path / "expected.png").read_bytes()
    names = ["00000_0.000_a.png", "00001_1.000_b.png", "grid.png"]
    assert sorted(file.name for file in (tmp_path / "each").iterdir()) == names
