"""The pictures of a report, as WebP in data URLs."""

import base64
import io
import pathlib
import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Num, UInt8
from PIL import Image

from digen_jax.images import to_uint8
from digen_jax.logging.report_reading import Run

QUALITY = 82
SMALL = 1 << 16  # pixels up to which a picture is written without loss
LARGEST = 768  # pixels of a longer side, of one image of a pair
MOST = 40  # steps whose pictures a report has
SHEETS = ("step", "best", "worst")  # in `workdir`/pictures, NAME_000020.png


class Pair(NamedTuple):
    """The images of an evaluation prompt before tuning and at the newest evaluation, from the same noise."""

    prompt: str
    before: str
    after: str
    scores: tuple[float, float]


class Shown(NamedTuple):
    """The pictures that were drawn after a step, by their names in SHEETS; "" where there is none."""

    step: int
    sheets: dict[str, str]


def pairs(run: Run) -> tuple[int, list[Pair]] | None:
    """(the step of the newer images, pairs of images); None before there are two evaluations."""
    if (found := run.evaluated()) is None:
        return None
    before, after = found
    count = min(len(before["images"]), len(after["images"]))
    prompts = run.prompts(before)

    def pair(i: int) -> Pair:
        images = (_url(_limited(one["images"][i])) for one in found)
        return Pair(prompts[i], *images, tuple(float(one["scores"][i]) for one in found))

    return int(after["step"]), list(map(pair, range(count)))


def shown(run: Run) -> list[Shown]:
    """The pictures on the way, of at most MOST steps, evenly chosen."""
    folder = run.workdir / "pictures"
    files: dict[int, dict[str, pathlib.Path]] = {}
    for path in sorted(folder.glob("*.png")):
        if match := re.fullmatch(rf"({'|'.join(SHEETS)})_(\d+)\.png", path.name):
            files.setdefault(int(match[2]), {})[match[1]] = path
    steps = [step for step in sorted(files) if step <= run.step]
    if len(steps) > MOST:
        steps = [steps[i] for i in np.linspace(0, len(steps) - 1, MOST).round().astype(int)]
    found = [Shown(step, {n: _file_url(files[step].get(n)) for n in SHEETS}) for step in steps]
    return [one for one in found if any(one.sheets.values())]


def _file_url(path: pathlib.Path | None) -> str:
    """A picture's file; the animation next to it, if it is of clips; "" for one that is just being written."""
    if path is None:
        return ""
    try:
        moving = path.with_suffix(".webp")
        return _data_url(moving.read_bytes()) if moving.exists() else _url(Image.open(path))
    except (OSError, SyntaxError):  # Pillow raises SyntaxError for a broken PNG
        return ""


def _limited(image: Num[np.ndarray, "h w 3"]) -> Image.Image:
    made: UInt8[np.ndarray, "h w 3"] = to_uint8(image)
    picture = Image.fromarray(made)
    picture.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    return picture


def _url(picture: Image.Image) -> str:
    file = io.BytesIO()
    small = picture.width * picture.height <= SMALL
    options: dict[str, Any] = {"lossless": True} if small else {"quality": QUALITY}
    picture.convert("RGB").save(file, "webp", method=4, **options)
    return _data_url(file.getvalue())


def _data_url(webp: bytes) -> str:
    return "data:image/webp;base64," + base64.b64encode(webp).decode()
