import numpy as np
import pytest
from PIL import Image

from digen_jax.logging import images as pictures

GREEN, RED, AMBER = (26, 127, 55), (207, 34, 46), (154, 103, 0)


def flat(*colours: float) -> np.ndarray:
    """One 8x8 grey image a number."""
    return np.broadcast_to(np.float32(colours)[:, None, None, None], (len(colours), 8, 8, 3))


def has(picture: Image.Image, colour: tuple, box: tuple | None = None) -> bool:
    return bool((np.asarray(picture.crop(box)) == colour).all(-1).any())


def ink(picture: Image.Image, box: tuple) -> int:
    """How many pixels of a box are dark."""
    return int((np.asarray(picture.crop(box).convert("L")) < 128).sum())


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        ((8, 8), (160, 160)),
        ((32, 16), (160, 80)),
        ((200, 200), (200, 200)),
        ((768, 384), (384, 192)),
    ],
)
def test_images_are_shown_at_a_size_people_can_see(size, shown):
    width, height = size
    image = np.full((1, height, width, 3), 0.5, np.float32)
    grid = np.asarray(pictures.image_grid(image, [""], 1))
    rows, columns = np.nonzero((grid == 128).all(-1))
    assert (np.ptp(columns) + 1, np.ptp(rows) + 1) == shown


def test_grid_grows_with_rows_and_columns():
    sizes = {
        columns: pictures.image_grid(flat(*[0.5] * 6), ["a"] * 6, columns).size
        for columns in (1, 2, 3, 6, 9)
    }
    assert sizes[6] == sizes[9]
    assert sizes[1][0] < sizes[2][0] < sizes[3][0] < sizes[6][0]
    assert sizes[1][1] > sizes[2][1] > sizes[3][1] > sizes[6][1]
    assert sizes[2][1] - 18 == 3 * (sizes[6][1] - 18)


def test_images_lie_row_by_row():
    levels = [0.2, 0.4, 0.6, 0.8]
    grid = np.asarray(pictures.image_grid(flat(*levels), [""] * 4, 2))
    centres = [np.argwhere((grid == round(level * 255)).all(-1)).mean(0) for level in levels]
    assert centres[0][0] == centres[1][0] < centres[2][0] == centres[3][0]
    assert centres[0][1] == centres[2][1] < centres[1][1] == centres[3][1]


def test_nearest_keeps_pixels_and_lanczos_smooths_them():
    checks = np.indices((8, 8)).sum(0)[None, ..., None] % 2 * np.ones(3, np.float32)
    values = {
        scale: len(np.unique(np.asarray(pictures.image_grid(checks, [""], 1, scale=scale))))
        for scale in ("nearest", "lanczos")
    }
    assert values["nearest"] <= 5 < values["lanczos"]


def test_captions_are_written_under_their_own_image():
    captions = ["a red circle", "", "two stars"]
    grid = pictures.image_grid(flat(1, 1, 1), captions, 3)
    third = grid.width // 3
    below = [
        ink(grid, (i * third, 18 + 170, (i + 1) * third, grid.height)) for i in range(len(captions))
    ]
    assert below[0] > 50
    assert below[1] == 0
    assert below[2] > 50


def test_long_captions_wrap_within_the_image():
    caption = "a photo of a purple hexagon left of an orange cross " + "x" * 60
    short, long = (pictures.image_grid(flat(1), [text], 1) for text in ("a", caption))
    assert long.width == short.width
    assert long.height >= short.height + 3 * 19
    edge = (long.width - 18, 0, long.width, long.height)
    assert ink(long, edge) == 0
    assert ink(long, (0, long.height - 18 - 19, long.width, long.height - 18)) > 0


@pytest.mark.parametrize("caption", ["x" * 10**4, "a word " * 1500])
def test_of_a_very_long_caption_the_first_lines_are_shown(caption):
    lines = pictures._wrapped(caption, 160)
    assert len(lines) == pictures.CAPTION_LINES and lines[-1].endswith("...")
    assert caption.startswith(lines[0]) and all(
        pictures.text_width(line, pictures.TEXT) <= 160 for line in lines
    )


def test_letters_beyond_ascii_have_glyphs():
    drawn = {letter: pictures.image_grid(flat(1), [letter], 1).tobytes() for letter in "äßéλж→￿"}
    assert len(set(drawn.values())) == len(drawn)


def test_scores_show_as_colour_and_mark():
    scores = np.array([1.0, 0.0, 0.25])
    one, zero, part = (pictures.image_grid(flat(0.5), [""], 1, scores[i : i + 1]) for i in range(3))
    assert has(one, GREEN) and not has(one, RED)
    assert has(zero, RED) and not has(zero, GREEN)
    assert has(part, AMBER) and not has(part, GREEN)
    mixed = pictures.image_grid(flat(0.5, 0.5, 0.5), [""] * 3, 3, scores)
    assert has(mixed, AMBER) and not has(mixed, RED) and not has(mixed, GREEN)
    headed = [
        pictures.image_grid(flat(0.5), [""], 1, s, "step 1") for s in (scores[:1], scores[2:])
    ]
    assert headed[0].width > headed[1].width  # marks are explained, numbers are not
    plain = pictures.image_grid(flat(0.5), [""], 1)
    assert not any(has(plain, colour) for colour in (GREEN, RED, AMBER))
    # Frames and badges add to the image; its other corners stay what they were.
    centre = (60, 60, 150, 150)
    assert one.crop(centre).tobytes() == plain.crop(centre).tobytes()


def test_before_and_after_stand_side_by_side_under_their_heads():
    n = 4
    before, after = flat(*[0.25] * n), flat(*[0.75] * n)
    picture = pictures.before_after(
        before, after, ["two stars"] * n, np.zeros(n), np.ones(n), columns=2, title="title"
    )
    array = np.asarray(picture)
    dark, light = (np.argwhere((array == level).all(-1)) for level in (64, 191))
    assert dark[:, 0].min() == light[:, 0].min()
    assert dark[:, 1].min() < light[:, 1].min() < dark[:, 1].max() < light[:, 1].max()
    assert has(picture, RED) and has(picture, GREEN)
    bare = pictures.before_after(before, after, [""] * n, np.zeros(n), np.ones(n), columns=2)
    assert picture.height > bare.height
    heads = np.asarray(bare.crop((0, 18, bare.width, 18 + 30)).convert("L"))
    columns = np.nonzero((heads < 200).any(0))[0]
    assert columns.min() < bare.width // 8 and columns.max() > bare.width * 3 // 4


def test_captions_must_be_as_many_as_images():
    with pytest.raises(ValueError, match="2 images need as many captions"):
        pictures.image_grid(flat(0, 1), ["one"], 2)


def test_curves_are_drawn_from_the_lines_that_have_them(tmp_path):
    lines = [{"step": 0, "evaluation/reward": 0.4}]
    for step in range(1, 31):
        lines.append({"step": step, "reward/mean": step / 60})
        if step % 10 == 0:
            lines[-1]["evaluation/reward"] = step / 50
    path = tmp_path / "curve.png"
    pictures.plot_curves(lines, {"train": "reward/mean", "held out": "evaluation/reward"}, path)
    both = np.asarray(Image.open(path).convert("RGB")).astype(int)
    blue, orange = (31, 119, 180), (255, 127, 14)
    assert (both == blue).all(-1).sum() > 200
    assert (both == orange).all(-1).sum() > 200
    pictures.plot_curves(lines, {"train": "reward/mean"}, path)
    assert not has(Image.open(path).convert("RGB"), orange)
    with pytest.raises(ValueError, match="no line of the metrics has 'reward/none'"):
        pictures.plot_curves(lines, {"x": "reward/none"}, path)


def test_running_mean_is_a_mean_of_what_is_there():
    values = np.array([1.0, 2.0, 3.0, 10.0])
    np.testing.assert_allclose(pictures.running_mean(values, 1), [1.5, 2, 5, 6.5])
    np.testing.assert_allclose(pictures.running_mean(np.full(9, 3.0), 4), np.full(9, 3.0))
