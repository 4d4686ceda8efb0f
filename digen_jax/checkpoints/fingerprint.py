"""A hash of what folders hold, by which results of their models can be kept for later runs."""

import hashlib
import os
import pathlib
from collections.abc import Sequence

# Files up to this size are hashed whole, of larger ones as many pieces as make about this size.
WHOLE = 2**25
PIECE = 2**16


def fingerprint(folder: str | os.PathLike[str], parts: Sequence[str]) -> str:
    """A hash of the files of a pipeline folder's components, in seconds for weights of any size.

    Of large files it has the size and 512 pieces at equal distances, from the first to the last: training changes
    weights everywhere, and a change of less than a 500th of a file may not be seen. Names of files are a part of it,
    their dates and the folder's place are not.

    Args:
      folder: of the pipeline.
      parts: its components, such as text encoders and tokenizers.

    Raises:
      ValueError: names a component that is missing or empty.
    """
    digest = hashlib.sha256()
    for part in parts:
        files = sorted(path for path in pathlib.Path(folder, part).glob("*") if path.is_file())
        if not files:
            raise ValueError(
                f"{pathlib.Path(folder, part)} holds no file, so that {part} cannot be read"
            )
        for path in files:
            digest.update(f"{part}/{path.name} {path.stat().st_size}\n".encode())
            _update(digest, path)
    return digest.hexdigest()[:32]


def _update(digest: "hashlib._Hash", path: pathlib.Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE:
            digest.update(file.read())
            return
        pieces = WHOLE // PIECE
        for piece in range(pieces):
            file.seek(piece * (size - PIECE) // (pieces - 1))
            digest.update(file.read(PIECE))
