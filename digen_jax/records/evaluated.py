"""Images, scores and prompts of an evaluation in a file, for comparison with a later evaluation."""

import io
import pathlib
import zipfile
import zlib
from typing import Any

import numpy as np

from digen_jax.files import replace


def save_images(path: pathlib.Path, **arrays: Any) -> None:
    """Writes an .npz; a kill leaves the old one or the new one."""
    file = io.BytesIO()
    np.savez(file, **arrays)
    replace(path, file.getvalue())


def saved_images(path: pathlib.Path) -> dict[str, np.ndarray] | None:
    """What `save_images` wrote, at least step, images and scores; None if it is missing or damaged."""
    try:
        with np.load(path) as found:
            needed = {name: found[name] for name in ("step", "images", "scores")}
            return needed | {name: found[name] for name in found.files}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
