"""Text in pictures, in every script that one of two fonts has letters for."""

import functools
import itertools
from pathlib import Path

import matplotlib
from matplotlib.ft2font import FT2Font
from PIL import ImageDraw, ImageFont

# matplotlib's own font has Latin, Greek, Cyrillic, Arabic and more, the other one Chinese, Japanese and Korean.
FONTS = (
    Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf",
    Path(__file__).parent / "DroidSansFallback.ttf",
)


def text_width(text: str, size: int) -> float:
    """The width of a line of text, in pixels."""
    return sum(font.getlength(part) for font, part in _parts(text, size))


def write(
    draw: ImageDraw.ImageDraw, corner: tuple[float, float], text: str, colour: str, size: int
) -> None:
    """Draws a line of text whose first letter's top left corner is at `corner`, (x, y) in pixels."""
    x, y = corner
    ascent = _font(FONTS[0], size).getmetrics()[0]
    for font, part in _parts(text, size):
        # On one base line, as the fonts are not equally high.
        draw.text((x, y + ascent), part, colour, font, anchor="ls")
        x += font.getlength(part)


def _parts(text: str, size: int) -> list[tuple[ImageFont.FreeTypeFont, str]]:
    """The text cut where the font changes; what neither has is shown as the first one shows it."""
    runs = itertools.groupby(text, _path)
    return [(_font(path, size), "".join(letters)) for path, letters in runs]


def _path(letter: str) -> Path:
    return next((path for path in FONTS if ord(letter) in _letters(path)), FONTS[0])


@functools.cache
def _letters(path: Path) -> frozenset[int]:
    return frozenset(FT2Font(path).get_charmap())


@functools.cache
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(path, size)
