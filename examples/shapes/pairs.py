"""Renders image pairs of the shapes task: for each prompt an image that satisfies it, and one of another prompt.

python -m examples.shapes.pairs runs/pairs-data 256

The arguments are the folder, with pairs.jsonl and the images, and the number of pairs.
"""

import json
import pathlib
import sys

import numpy as np
from PIL import Image

from examples.shapes.captions import train_record
from examples.shapes.render import render
from examples.shapes.scene import sample_scene


def write_pairs(folder: pathlib.Path, count: int, size: int = 32, seed: int = 0) -> pathlib.Path:
    """Writes `count` pairs of square images and pairs.jsonl, whose path is returned."""
    rng, lines = np.random.default_rng(seed), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for number in range(count):
        record, other = train_record(rng), train_record(rng)
        while other["prompt"] == record["prompt"]:
            other = train_record(rng)
        line = {"prompt": record["prompt"]}
        for field, shown in (("chosen", record), ("rejected", other)):
            line[field] = f"images/{number:05d}_{field}.png"
            pixels = np.round(render(sample_scene(shown, rng), size) * 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / line[field])
        lines.append(json.dumps(line) + "\n")
    path = folder / "pairs.jsonl"
    path.write_text("".join(lines))
    return path


if __name__ == "__main__":
    print(write_pairs(pathlib.Path(sys.argv[1]), int(sys.argv[2])))
