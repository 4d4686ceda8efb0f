"""The configurations of published models, as their repositories have them, without weights.

They are for planning: `folder/OWNER/NAME` holds the JSON files of the hub repository OWNER/NAME that its family reads,
and tokenizers with the special tokens alone, because only the shapes of tokens matter there. Another model is another
folder. Training on one of them ends before it starts, as there are no weights to read.
"""

import pathlib

ROOT = pathlib.Path(__file__).parent


def published_models() -> list[str]:
    """The hub ids of all models whose configuration is here."""
    return sorted(str(path.parent.relative_to(ROOT)) for path in ROOT.glob("*/*/model_index.json"))


def published_folder(name: str) -> pathlib.Path | None:
    """The folder of a hub id; None: it is not here, or `name` is a local folder."""
    if pathlib.Path(name).is_dir() or name not in published_models():
        return None
    return ROOT / name
