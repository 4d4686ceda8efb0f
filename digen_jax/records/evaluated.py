"""Images and scores of an evaluation in a file, for comparison with a later evaluation."""

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
    """The images and scores that `save_images` wrote; None if they are missing or damaged."""
    try:
        with np.load(path) as found:
            return {name: found[name] for name in ("step", "images", "scores")}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return None
