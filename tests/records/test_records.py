"""What a run says in the end; what it writes on the way is tested with whole runs."""

import pathlib

import numpy as np

from digen_jax.records import records


def test_table_and_places():
    held_out = [{"prompt": "a", "tag": "counting"}, {"prompt": "b"}]
    assert records.table(held_out, np.array([0.25, 0.75]), np.array([1.0, 0.5])).split("\n") == [
        "reward on 2 held-out prompts      before   after    gain",
        "  all                              0.500   0.750  +0.250",
        "  counting                         0.250   1.000  +0.750",
    ]
    assert records.where(pathlib.Path("runs/x")).startswith(
        "In runs/x:\n  pictures/before_after.png  "
    )
