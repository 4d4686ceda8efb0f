"""Long lists of cases: a few for `make test`, all for the slow tests."""

from collections.abc import Sequence
from typing import Any

import pytest


def quick(cases: Sequence[tuple[Any, ...]], *chosen: int) -> list[Any]:
    """`cases` for pytest.mark.parametrize, slow but for those at these places."""
    return [
        pytest.param(*case, marks=[] if place in chosen else pytest.mark.slow)
        for place, case in enumerate(cases)
    ]


def said(*prompts: str) -> list[dict]:
    """Records of prompts alone."""
    return [{"prompt": prompt} for prompt in prompts]
