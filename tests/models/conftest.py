import jax
import pytest
import torch


@pytest.fixture
def exact():
    """Products of float32 are exact, and torch keeps nothing for gradients."""
    with jax.default_matmul_precision("highest"), torch.no_grad():
        yield
