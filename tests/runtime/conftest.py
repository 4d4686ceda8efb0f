import jax
import pytest

from digen_jax.runtime import placement


@pytest.fixture(scope="module")
def exact_and_split():
    """Float32 stays float32 in every product, and small parameters are split like large ones."""
    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "FSDP_MIN_SIZE", 16)
        yield
