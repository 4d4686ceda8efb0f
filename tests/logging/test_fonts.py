import pytest
from PIL import Image, ImageDraw, ImageFont

from digen_jax.logging.fonts import FONTS, text_width, write


def written(text: str) -> bytes:
    canvas = Image.new("L", (120, 24), 255)
    write(ImageDraw.Draw(canvas), (2, 2), text, 0, 14)
    return canvas.tobytes()


def test_latin_is_matplotlibs_font():
    canvas = Image.new("L", (120, 24), 255)
    font = ImageFont.truetype(FONTS[0], 14)
    ImageDraw.Draw(canvas).text((2, 2), "Größe 3", 0, font)
    assert written("Größe 3") == canvas.tobytes()
    assert text_width("Größe 3", 14) == font.getlength("Größe 3")


@pytest.mark.parametrize("texts", ["红蓝", "あア", "한글", "，「"])
def test_letters_that_it_lacks_are_not_all_the_same_box(texts):
    first, second = map(written, texts)
    missing = written("\U0010fffd")
    assert len({first, second, missing}) == 3


def test_a_text_may_mix_scripts():
    assert text_width("a红b", 14) == text_width("ab", 14) + text_width("红", 14)
    assert written("a红b") not in (written("ab"), written("a"), written("红"))
