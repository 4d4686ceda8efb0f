"""Image grids with captions and scores, before/after sheets, and curves."""

import functools
import importlib.util
import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from jaxtyping import Float, Int, Num, UInt8
from matplotlib.figure import Figure
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont

from digen_jax.images import to_uint8

WHITE, BLACK, GREY, OUTLINE = "#ffffff", "#24292f", "#8c959f", "#d0d7de"
GREEN, AMBER, RED = "#1a7f37", "#9a6700", "#cf222e"
SMALLEST, LARGEST = 160, 384  # longer side of an image in pixels
GAP, FRAME, BADGE = 18, 4, 28
SCORE_SIZE, CAPTION_SIZE, TITLE_SIZE = 13, 14, 18  # font sizes in pixels
LINE, TITLE_LINE = 19, 30
SPARSE = 8  # curves with fewer points are drawn with markers
CAPTION_LINES = 16  # longer captions are truncated
ANIMATIONS = ("mp4", "webp", "gif")  # file formats of clips
# matplotlib's font covers Latin, Greek, Cyrillic, Arabic and more, the other Chinese, Japanese and Korean.
FONTS = (
    Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf",
    Path(__file__).parent / "fonts" / "DroidSansFallback.ttf",
)


def image_grid(
    images: Num[np.ndarray, "n h w 3"],
    captions: Sequence[str],
    columns: int,
    scores: Float[np.ndarray, " n"] | None = None,
    title: str = "",
) -> Image.Image:
    """Draws a grid of images, row by row, with a caption below each.

    Args:
      images: Floats in [0, 1], or uint8. Small images are upscaled by an integer factor to at least 160 pixels,
        large ones are downscaled to 384.
      captions: One text per image, wrapped to the image's width.
      columns: Images per row.
      scores: One reward per image. If all are 0 or 1, they are shown as red crosses and green ticks, otherwise as
        numbers.
      title: A line above the grid.
    """
    columns_of_scores = None if scores is None else scores[:, None]
    return _sheet(images[:, None], captions, columns, columns_of_scores, [], title)


def before_after(
    before: Num[np.ndarray, "n h w 3"],
    after: Num[np.ndarray, "n h w 3"],
    prompts: Sequence[str],
    before_scores: Float[np.ndarray, " n"],
    after_scores: Float[np.ndarray, " n"],
    title: str = "",
) -> Image.Image:
    """Draws pairs of images of the same prompt, headed "before" and "after", three in a row; see `image_grid`."""
    images = np.stack([to_uint8(before), to_uint8(after)], axis=1)
    scores = np.stack([before_scores, after_scores], axis=1)
    return _sheet(images, prompts, 3, scores, ["before", "after"], title)


def save_frames(
    path: Path, frames: Sequence[Image.Image], fps: float, animation: str = "webp"
) -> None:
    """Writes the middle frame to the PNG file `path`, and several frames also as a video or animation next to it.

    Args:
      path: The PNG file.
      frames: Images of the same size.
      fps: Frames per second.
      animation: File format, one of `ANIMATIONS`; see `check_animation`.
    """
    frames[len(frames) // 2].save(path)
    if len(frames) == 1:
        return
    path = path.with_suffix(f".{animation}")
    if animation != "mp4":
        options: dict[str, Any] = dict(save_all=True, append_images=frames[1:], loop=0)
        frames[0].save(path, duration=1000 / fps, **options)
        return
    import av  # optional

    with av.open(str(path), "w") as file:
        rate = Fraction(fps).limit_denominator(1000)
        stream = file.add_stream("libx264", rate, {"crf": "17"})
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"  # which all players read
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_image(frame)))
        file.mux(stream.encode(None))


def check_animation(animation: str | None, height: int, width: int) -> str:
    """Returns the file format of clips; None means MP4 if PyAV is installed, otherwise WebP.

    Raises:
      ValueError: PyAV is not installed, or H.264 does not support the size.
    """
    has_av = importlib.util.find_spec("av") is not None
    odd = height % 2 or width % 2
    if animation is None:
        return "mp4" if has_av and not odd else "webp"
    if animation == "mp4" and not has_av:
        raise ValueError("mp4 needs PyAV: pip install -r requirements-video.txt, or choose webp")
    if animation == "mp4" and odd:
        raise ValueError("H.264 needs an even height and width: choose webp")
    return animation


def _sheet(
    images: Num[np.ndarray, "n k h w 3"],
    captions: Sequence[str],
    columns: int,
    scores: Float[np.ndarray, "n k"] | None,
    heads: Sequence[str],
    title: str,
) -> Image.Image:
    """Draws cells of k images side by side above one caption, row by row."""
    if not len(images) == len(captions) > 0:
        raise ValueError(
            f"need one caption per image: {len(images)} images, {len(captions)} captions"
        )
    cells = [[_resized(image) for image in cell] for cell in to_uint8(images)]
    width, height = cells[0][0].size
    binary = scores is not None and bool(np.isin(scores, (0, 1)).all())
    if title and binary:
        title += " (tick: score 1, cross: score 0)"
    step = width + 2 * FRAME + GAP // 2
    cell_width = step * len(cells[0]) - GAP // 2
    columns = min(columns, len(cells))
    texts = [_wrapped(caption, cell_width - 2 * FRAME) for caption in captions]
    rows = [texts[i : i + columns] for i in range(0, len(texts), columns)]
    heights = [height + 2 * FRAME + GAP // 3 + LINE * max(map(len, row)) + GAP for row in rows]
    top = GAP + (TITLE_LINE + GAP // 2 if title else 0) + (TITLE_LINE if heads else 0)

    title_width = math.ceil(text_width(title, TITLE_SIZE)) + 2 * GAP
    sheet_width = max(GAP + columns * (cell_width + GAP), title_width)
    canvas = Image.new("RGB", (sheet_width, top + sum(heights)), WHITE)
    draw = ImageDraw.Draw(canvas)
    draw_text(draw, (GAP, GAP), title, BLACK, TITLE_SIZE)
    for i, text in enumerate(texts):
        x = GAP + (i % columns) * (cell_width + GAP)
        y = top + sum(heights[: i // columns])
        for j, image in enumerate(cells[i]):
            if heads and i < columns:
                corner = (x + j * step + FRAME, y - TITLE_LINE)
                draw_text(draw, corner, heads[j], GREY, TITLE_SIZE)
            score = None if scores is None else float(scores[i, j])
            _paste(canvas, image, (x + j * step, y), score, binary)
        below = y + height + 2 * FRAME + GAP // 3
        for number, line in enumerate(text):
            draw_text(draw, (x + FRAME, below + number * LINE), line, BLACK, CAPTION_SIZE)
    return canvas


def _resized(array: UInt8[np.ndarray, "h w 3"]) -> Image.Image:
    image = Image.fromarray(array)
    longest = max(image.size)
    if longest > LARGEST:
        image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        return image
    factor = math.ceil(SMALLEST / longest)
    size = image.width * factor, image.height * factor
    return image.resize(size, Image.Resampling.LANCZOS)


def _wrapped(text: str, width: int) -> list[str]:
    """Wraps a caption to at most `CAPTION_LINES` lines of `width` pixels; breaks only words that are too long."""
    lines = [""]
    for word in text.split():
        if len(lines) > CAPTION_LINES:
            break
        if text_width(f"{lines[-1]} {word}".strip(), CAPTION_SIZE) <= width:
            lines[-1] = f"{lines[-1]} {word}".strip()
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            if text_width(lines[-1] + letter, CAPTION_SIZE) > width:
                lines.append("")
            lines[-1] += letter
            if len(lines) > CAPTION_LINES:
                break
    if len(lines) <= CAPTION_LINES:
        return lines
    last = lines[CAPTION_LINES - 1]
    while last and text_width(f"{last}...", CAPTION_SIZE) > width:
        last = last[:-1]
    return [*lines[: CAPTION_LINES - 1], f"{last}..."]


def _paste(
    canvas: Image.Image,
    image: Image.Image,
    corner: tuple[int, int],
    score: float | None,
    binary: bool,
) -> None:
    """Pastes an image with an outline, or with a frame and a badge (tick, cross or number) in its score's color."""
    x, y = corner[0] + FRAME, corner[1] + FRAME
    color = OUTLINE if score is None else AMBER
    if binary:
        color = GREEN if score else RED
    frame = 1 if score is None else FRAME
    end = (x + image.width + frame - 1, y + image.height + frame - 1)
    ImageDraw.Draw(canvas).rounded_rectangle(((x - frame, y - frame), end), frame, color)
    canvas.paste(image, (x, y))
    if score is None:
        return
    text, size, top = (
        (f"{score:.2f}", SCORE_SIZE, 6) if not binary else ("✓" if score else "✗", 20, 1)
    )
    width = text_width(text, size)
    badge = Image.new("RGB", (max(BADGE, math.ceil(width) + 12), BADGE), color)
    draw_text(ImageDraw.Draw(badge), ((badge.width - width) / 2, top), text, WHITE, size)
    canvas.paste(badge, (x + image.width - badge.width, y))


def text_width(text: str, size: int) -> float:
    """Returns the width of a line of text in pixels."""
    return sum(font.getlength(part) for font, part in _font_runs(text, size))


def draw_text(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], text: str, color: str, size: int
) -> None:
    """Draws a line of text with its top left corner at `corner`, (x, y) in pixels."""
    x, y = corner
    ascent = _font(FONTS[0], size).getmetrics()[0]
    for font, part in _font_runs(text, size):
        draw.text((x, y + ascent), part, color, font, anchor="ls")  # on a common baseline
        x += font.getlength(part)


def _font_runs(text: str, size: int) -> list[tuple[ImageFont.FreeTypeFont, str]]:
    """Splits a text into runs of one font; the first font is the fallback for missing glyphs."""

    def path_for(letter: str) -> Path:
        return next((path for path in FONTS if ord(letter) in _glyphs(path)), FONTS[0])

    runs = itertools.groupby(text, path_for)
    return [(_font(path, size), "".join(letters)) for path, letters in runs]


@functools.cache
def _glyphs(path: Path) -> frozenset[int]:
    return frozenset(FT2Font(path).get_charmap())


@functools.cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)


def plot_curves(
    metrics: Sequence[Mapping[str, Any]], curves: Mapping[str, str], path: Path | str
) -> None:
    """Plots rewards over the steps into a PNG file.

    A dense metric is drawn pale below its running mean, a sparse one, such as an evaluation, with markers.

    Args:
      metrics: Lines of metrics.jsonl; metrics may be missing in some lines.
      curves: Metric by legend label, in order.
      path: The PNG file.

    Raises:
      ValueError: No line has any of the metrics.
    """
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (name, metric) in enumerate(curves.items()):
        points = [(line["step"], line[metric]) for line in metrics if metric in line]
        if not points:
            raise ValueError(f"the metrics do not contain {metric!r}")
        steps, values = map(np.asarray, zip(*points, strict=True))
        color = f"C{number}"
        if is_dense(steps):
            axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
            axes.plot(steps, smoothed(values), color=color, label=name)
        else:
            axes.plot(steps, values, color=color, marker="o", markersize=5, label=name)
    label_axes(axes, "step", "reward")
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)


def label_axes(axes: Any, x: str, y: str) -> None:
    """Labels both axes, hides the top and right spines, and adds horizontal grid lines."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def is_dense(steps: Int[np.ndarray, " n"]) -> bool:
    """Returns whether a curve has a value at nearly every step, so that it is drawn smoothed."""
    return len(steps) >= SPARSE and bool(len(steps) > np.ptp(steps) / 2)


def smoothed(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    """Returns the running means over n // 12 or at least 3 values on either side, fewer at the ends."""
    width = max(3, len(values) // 12)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.minimum(np.arange(len(values)) + width + 1, len(values))
    first = np.maximum(np.arange(len(values)) - width, 0)
    return (sums[last] - sums[first]) / (last - first)
