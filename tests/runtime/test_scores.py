import json

import numpy as np

from digen_jax import rewards
from digen_jax.runtime.scores import received, sent


def test_what_is_not_there_crosses_to_other_processes_as_nothing():
    columns = np.float32([[0.1, np.nan], [1e-30, 3e38]])
    text = json.dumps(sent(columns), allow_nan=False)
    found = received(json.loads(text))
    assert found.columns.dtype == np.float32 and isinstance(found, rewards.Scores)
    np.testing.assert_array_equal(found.columns, columns)
