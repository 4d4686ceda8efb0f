"""Configurations of published models, as in their repositories, without weights.

Used for planning: `folder/OWNER/NAME` holds the JSON files of the hub repository OWNER/NAME that its family reads, and
tokenizers with special tokens only, because planning needs only the shapes of tokens. To add a model, add a folder.
Training on one of them fails at startup, because there are no weights to read.
"""

import pathlib

ROOT = pathlib.Path(__file__).parent


def published_models() -> list[str]:
    """Returns the hub ids of all models in this package."""
    return sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/model_index.json"))


def published_folder(name: str) -> pathlib.Path | None:
    """Returns the folder of a hub id, or None if it is not in this package or `name` is a local folder."""
    if pathlib.Path(name).is_dir() or name not in published_models():
        return None
    return ROOT / name
