"""Pictures for people: grids of images with their prompts, before and after, and curves."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Num, UInt8
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from digen_jax.images import to_uint8
from digen_jax.logging.fonts import text_width, write

PAPER, INK, PALE, EDGE = "#ffffff", "#24292f", "#8c959f", "#d0d7de"
GOOD, MIDDLING, BAD = "#1a7f37", "#9a6700", "#cf222e"
SMALLEST, LARGEST = 160, 384
GAP, FRAME, BADGE = 18, 4, 28
NUMBER, TEXT, HEADING = 13, 14, 18  # heights of letters
LINE, HEADING_LINE = 19, 30
CAPTION_LINES = 16  # of a longer caption the rest is left out
FRAMES_A_SECOND = 8  # of an animation; nothing says how fast a clip is
SCALES = {"nearest": Image.Resampling.NEAREST, "lanczos": Image.Resampling.LANCZOS}


def image_grid(
    images: Num[np.ndarray, "n h w 3"],
    captions: Sequence[str],
    columns: int,
    scores: Float[np.ndarray, " n"] | None = None,
    title: str = "",
    scale: Literal["nearest", "lanczos"] = "lanczos",
) -> Image.Image:
    """A grid of images, row by row, with the caption under each.

    Args:
      images: float in [0, 1], or bytes. Small ones are enlarged by a whole factor to 160 pixels or
        more, large ones reduced to 384.
      captions: one text an image, wrapped to its width.
      columns: images in a row.
      scores: a reward an image. Where all are 1 or 0, a tick and a green frame stand for 1, a cross and a
        red one for 0; else each image has its number.
      title: a line above everything.
      scale: how small images are enlarged; "nearest" shows their pixels.
    """
    marks = None if scores is None else scores[:, None]
    return _sheet(images[:, None], captions, columns, marks, [], title, scale)


def save_frames(path: Path, frames: Sequence[Image.Image]) -> None:
    """The middle frame as a PNG file `path`; of several all, as an animated WebP next to it."""
    frames[len(frames) // 2].save(path)
    if len(frames) > 1:
        frames[0].save(
            path.with_suffix(".webp"),
            save_all=True,
            append_images=frames[1:],
            duration=1000 // FRAMES_A_SECOND,
        )


def before_after(
    before: Num[np.ndarray, "n h w 3"],
    after: Num[np.ndarray, "n h w 3"],
    prompts: Sequence[str],
    before_scores: Float[np.ndarray, " n"],
    after_scores: Float[np.ndarray, " n"],
    columns: int = 3,
    title: str = "",
    scale: Literal["nearest", "lanczos"] = "lanczos",
) -> Image.Image:
    """Pairs of images of the same prompt, side by side under the heads "before" and "after".

    Args as in `image_grid`; `columns` counts pairs.
    """
    images = np.stack([to_uint8(before), to_uint8(after)], axis=1)
    scores = np.stack([before_scores, after_scores], axis=1)
    return _sheet(images, prompts, columns, scores, ["before", "after"], title, scale)


def _sheet(
    images: Num[np.ndarray, "n k h w 3"],
    captions: Sequence[str],
    columns: int,
    scores: Float[np.ndarray, "n k"] | None,
    heads: Sequence[str],
    title: str,
    scale: str,
) -> Image.Image:
    """Cells of k images side by side over one caption, laid out row by row."""
    if not len(images) == len(captions) > 0:
        raise ValueError(
            f"{len(images)} images need as many captions, at least one, not {len(captions)}"
        )
    pictures = [[_resized(one, scale) for one in cell] for cell in to_uint8(images)]
    width, height = pictures[0][0].size
    marked = scores is not None and bool(np.isin(scores, (0, 1)).all())
    if title and marked:
        title += " (tick: score 1, cross: score 0)"
    step = width + 2 * FRAME + GAP // 2
    cell = step * len(pictures[0]) - GAP // 2
    columns = min(columns, len(pictures))
    texts = [_wrapped(caption, cell - 2 * FRAME) for caption in captions]
    rows = [texts[i : i + columns] for i in range(0, len(texts), columns)]
    heights = [height + 2 * FRAME + GAP // 3 + LINE * max(map(len, row)) + GAP for row in rows]
    top = GAP + (HEADING_LINE + GAP // 2 if title else 0) + (HEADING_LINE if heads else 0)

    across = max(GAP + columns * (cell + GAP), math.ceil(text_width(title, HEADING)) + 2 * GAP)
    canvas = Image.new("RGB", (across, top + sum(heights)), PAPER)
    draw = ImageDraw.Draw(canvas)
    write(draw, (GAP, GAP), title, INK, HEADING)
    for i, text in enumerate(texts):
        x = GAP + (i % columns) * (cell + GAP)
        y = top + sum(heights[: i // columns])
        for j, picture in enumerate(pictures[i]):
            if heads and i < columns:
                write(draw, (x + j * step + FRAME, y - HEADING_LINE), heads[j], PALE, HEADING)
            score = None if scores is None else float(scores[i, j])
            _paste(canvas, picture, (x + j * step, y), score, marked)
        below = y + height + 2 * FRAME + GAP // 3
        for number, line in enumerate(text):
            write(draw, (x + FRAME, below + number * LINE), line, INK, TEXT)
    return canvas


def _resized(image: UInt8[np.ndarray, "h w 3"], scale: str) -> Image.Image:
    """Enlarged by a whole factor, so that pixels stay square, or reduced."""
    picture = Image.fromarray(image)
    longest = max(picture.size)
    if longest > LARGEST:
        picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
        return picture
    factor = math.ceil(SMALLEST / longest)
    return picture.resize((picture.width * factor, picture.height * factor), SCALES[scale])


def _wrapped(text: str, width: int) -> list[str]:
    """At most `CAPTION_LINES` lines no wider than `width` pixels, broken within a word only where it must be."""
    lines = [""]
    for word in text.split():
        if len(lines) > CAPTION_LINES:
            break
        if text_width(f"{lines[-1]} {word}".strip(), TEXT) <= width:
            lines[-1] = f"{lines[-1]} {word}".strip()
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            if text_width(lines[-1] + letter, TEXT) > width:
                lines.append("")
            lines[-1] += letter
            if len(lines) > CAPTION_LINES:
                break
    if len(lines) <= CAPTION_LINES:
        return lines
    last = lines[CAPTION_LINES - 1]
    while last and text_width(f"{last}...", TEXT) > width:
        last = last[:-1]
    return [*lines[: CAPTION_LINES - 1], f"{last}..."]


def _paste(
    canvas: Image.Image,
    picture: Image.Image,
    corner: tuple[int, int],
    score: float | None,
    marked: bool,
) -> None:
    """Puts a picture inside its frame; with a score, in the score's colour and with its badge."""
    x, y = corner
    # Without a score a hairline remains, or a white image would have no edge on white paper.
    frame = 1 if score is None else FRAME
    start = (x + FRAME - frame, y + FRAME - frame)
    end = (x + FRAME + picture.width + frame - 1, y + FRAME + picture.height + frame - 1)
    colour = EDGE if score is None else _colour(score, marked)
    ImageDraw.Draw(canvas).rounded_rectangle((start, end), frame, colour)
    canvas.paste(picture, (x + FRAME, y + FRAME))
    if score is not None:
        badge = _badge(score, marked)
        canvas.paste(badge, (x + FRAME + picture.width - badge.width, y + FRAME), badge)


def _colour(score: float, marked: bool) -> str:
    return {1.0: GOOD, 0.0: BAD}[score] if marked else MIDDLING


def _badge(score: float, marked: bool) -> Image.Image:
    """A tick, a cross or a number on the score's colour; drawn large and reduced for smooth edges."""
    number = "" if marked else f"{score:.2f}"
    width = BADGE if not number else math.ceil(text_width(number, NUMBER)) + 12
    large = Image.new("RGBA", (width * 4, BADGE * 4))
    draw = ImageDraw.Draw(large)
    draw.rounded_rectangle((0, -40, width * 4 + 40, BADGE * 4 - 1), 32, _colour(score, marked))
    if marked and score == 1:
        draw.line([(30, 56), (50, 76), (86, 34)], PAPER, 13, joint="curve")
    elif marked:
        draw.line([(36, 34), (80, 78)], PAPER, 13)
        draw.line([(36, 78), (80, 34)], PAPER, 13)
    badge = large.resize((width, BADGE), Image.Resampling.LANCZOS)
    if number:
        write(ImageDraw.Draw(badge), (7, 6), number, PAPER, NUMBER)
    return badge


def plot_curves(
    metrics: Sequence[Mapping[str, Any]],
    curves: Mapping[str, str],
    path: Path | str,
    label: str = "reward",
) -> None:
    """Draws metrics over the steps into a PNG file.

    A curve with a value at nearly every step is drawn pale with its running mean over it; one with
    few values, such as an evaluation, with its points.

    Args:
      metrics: lines of metrics.jsonl; a line need not have every metric.
      curves: the metric to draw for each name in the legend, in order.
      path: the PNG file.
      label: what the vertical axis shows.

    Raises:
      ValueError: a metric is in no line.
    """
    figure = Figure(figsize=(7.5, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    for number, (name, metric) in enumerate(curves.items()):
        points = [(line["step"], line[metric]) for line in metrics if metric in line]
        if not points:
            raise ValueError(f"no line of the metrics has {metric!r}: it cannot be drawn")
        steps, values = map(np.asarray, zip(*points, strict=True))
        _draw_curve(axes, steps, values, name, f"C{number}", dense=len(points) > len(metrics) / 2)
    label_axes(axes, "step", label)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)


def label_axes(axes: Any, x: str, y: str) -> None:
    """Labels both axes and removes lines that are not needed."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.25)


def _draw_curve(axes: Any, steps: Any, values: Any, name: str, colour: str, dense: bool) -> None:
    if not dense or len(steps) < 8:
        axes.plot(steps, values, color=colour, marker="o", markersize=5, label=name)
        return
    axes.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
    axes.plot(steps, running_mean(values, max(3, len(values) // 12)), color=colour, label=name)


def running_mean(values: Float[np.ndarray, " n"], width: int) -> Float[np.ndarray, " n"]:
    """The mean over up to `width` values to either side, fewer at the ends."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    last = np.minimum(np.arange(len(values)) + width + 1, len(values))
    first = np.maximum(np.arange(len(values)) - width, 0)
    return (sums[last] - sums[first]) / (last - first)
