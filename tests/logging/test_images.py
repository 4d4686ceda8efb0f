import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from digen_jax.logging import images
from digen_jax.logging.images import FONTS, before_after, draw_text, image_grid, text_width

GREEN, RED, AMBER = (26, 127, 55), (207, 34, 46), (154, 103, 0)


def grey(*levels: float) -> np.ndarray:
    """One 8x8 image per level."""
    return np.broadcast_to(np.float32(levels)[:, None, None, None], (len(levels), 8, 8, 3))


def has(image: Image.Image, color: tuple) -> bool:
    return bool((np.asarray(image) == color).all(-1).any())


def ink(image: Image.Image, box: tuple) -> int:
    """Returns the number of dark pixels in a box."""
    return int((np.asarray(image.crop(box).convert("L")) < 128).sum())


@pytest.mark.parametrize(
    ("width", "height", "shown"),
    [(8, 8, (160, 160)), (32, 16, (160, 80)), (200, 200, (200, 200)), (768, 384, (384, 192))],
)
def test_small_images_are_enlarged_and_large_ones_reduced(width, height, shown):
    grid = np.asarray(image_grid(np.full((1, height, width, 3), 0.5, np.float32), [""], 1))
    rows, columns = np.nonzero((grid == 128).all(-1))
    assert (np.ptp(columns) + 1, np.ptp(rows) + 1) == shown


def test_images_are_placed_row_by_row():
    sizes = {n: image_grid(grey(*[0.5] * 6), ["a"] * 6, n).size for n in (1, 2, 3, 6, 9)}
    assert sizes[6] == sizes[9]
    assert sizes[1][0] < sizes[2][0] < sizes[3][0] < sizes[6][0]
    assert sizes[2][1] - 18 == 3 * (sizes[6][1] - 18)
    levels = [0.2, 0.4, 0.6, 0.8]
    grid = np.asarray(image_grid(grey(*levels), [""] * 4, 2))
    centres = [np.argwhere((grid == round(level * 255)).all(-1)).mean(0) for level in levels]
    assert centres[0][0] == centres[1][0] < centres[2][0] == centres[3][0]
    assert centres[0][1] == centres[2][1] < centres[1][1] == centres[3][1]
    with pytest.raises(ValueError):
        image_grid(grey(0, 1), ["one"], 2)


def test_long_captions_are_wrapped_and_truncated():
    caption = "a photo of a purple hexagon left of an orange cross " + "x" * 60
    short, long = (image_grid(grey(1), [text], 1) for text in ("a", caption))
    assert long.width == short.width and long.height >= short.height + 3 * 19
    assert ink(long, (long.width - 18, 0, long.width, long.height)) == 0
    assert ink(long, (0, long.height - 18 - 19, long.width, long.height - 18)) > 0
    for caption in ("x" * 10**4, "a word " * 1500):
        lines = images._wrapped(caption, 160)
        assert len(lines) == images.CAPTION_LINES and lines[-1].endswith("...")
        assert caption.startswith(lines[0])
        assert all(text_width(line, images.CAPTION_SIZE) <= 160 for line in lines)


def test_each_letter_is_drawn_in_the_first_font_that_has_it():
    def drawn(text: str) -> bytes:
        canvas = Image.new("L", (120, 24), 255)
        draw_text(ImageDraw.Draw(canvas), (2, 2), text, 0, 14)
        return canvas.tobytes()

    canvas = Image.new("L", (120, 24), 255)
    font = ImageFont.truetype(FONTS[0], 14)
    ImageDraw.Draw(canvas).text((2, 2), "Größe 3", 0, font)
    assert drawn("Größe 3") == canvas.tobytes()
    assert text_width("Größe 3", 14) == font.getlength("Größe 3")
    letters = "äßéλж→红蓝あア한글，「\uffff"
    assert len({drawn(letter) for letter in letters}) == len(letters)
    assert text_width("a红b", 14) == text_width("ab", 14) + text_width("红", 14)
    assert drawn("a红b") not in (drawn("ab"), drawn("a"), drawn("红"))


def test_scores_are_shown_by_color_and_badge():
    scores = np.array([1.0, 0.0, 0.25])
    one, zero, part = (image_grid(grey(0.5), [""], 1, scores[i : i + 1]) for i in range(3))
    assert has(one, GREEN) and not has(one, RED)
    assert has(zero, RED) and not has(zero, GREEN)
    assert has(part, AMBER) and not has(part, GREEN)
    mixed = image_grid(grey(0.5, 0.5, 0.5), [""] * 3, 3, scores)
    assert has(mixed, AMBER) and not has(mixed, RED) and not has(mixed, GREEN)
    titled = [image_grid(grey(0.5), [""], 1, s, "step 1") for s in (scores[:1], scores[2:])]
    assert titled[0].width > titled[1].width  # ticks are explained, numbers are not
    plain = image_grid(grey(0.5), [""], 1)
    assert not any(has(plain, color) for color in (GREEN, RED, AMBER))
    centre = (60, 60, 150, 150)
    assert one.crop(centre).tobytes() == plain.crop(centre).tobytes()


def test_before_and_after_are_side_by_side_below_their_heads():
    before, after, scores = grey(*[0.25] * 4), grey(*[0.75] * 4), (np.zeros(4), np.ones(4))
    sheet = before_after(before, after, ["two stars"] * 4, *scores, title="title")
    array = np.asarray(sheet)
    dark, light = (np.argwhere((array == level).all(-1)) for level in (64, 191))
    assert dark[:, 0].min() == light[:, 0].min()
    assert dark[:, 1].min() < light[:, 1].min() < dark[:, 1].max() < light[:, 1].max()
    assert has(sheet, RED) and has(sheet, GREEN)
    bare = before_after(before, after, [""] * 4, *scores)
    assert sheet.height > bare.height
    heads = np.asarray(bare.crop((0, 18, bare.width, 18 + 30)).convert("L"))
    columns = np.nonzero((heads < 200).any(0))[0]
    assert columns.min() < bare.width // 8 and columns.max() > bare.width * 3 // 4


def test_curves_are_plotted_from_the_lines_that_have_them(tmp_path):
    lines = [{"step": 0, "evaluation/reward": 0.4}]
    for step in range(1, 31):
        lines.append({"step": step, "reward/mean": step / 60})
        if step % 10 == 0:
            lines[-1]["evaluation/reward"] = step / 50
    path, blue, orange = tmp_path / "curve.png", (31, 119, 180), (255, 127, 14)
    images.plot_curves(lines, {"train": "reward/mean", "held out": "evaluation/reward"}, path)
    both = np.asarray(Image.open(path).convert("RGB"))
    assert (both == blue).all(-1).sum() > 200 and (both == orange).all(-1).sum() > 200
    images.plot_curves(lines, {"train": "reward/mean"}, path)
    assert not has(Image.open(path).convert("RGB"), orange)
    with pytest.raises(ValueError, match="reward/none"):
        images.plot_curves(lines, {"x": "reward/none"}, path)


@pytest.mark.parametrize(("count", "width"), [(2, 3), (36, 3), (60, 5)])
def test_smoothing_is_narrower_at_the_ends(count, width):
    values = np.random.default_rng(0).uniform(size=count)
    expected = [values[max(0, i - width) : i + width + 1].mean() for i in range(count)]
    np.testing.assert_allclose(images.smoothed(values), expected)
