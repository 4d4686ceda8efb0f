import functools

import jax
import pytest

from digen_jax.runtime import placement
from tests.compiling import users_options


@pytest.fixture(scope="module")
def exact_and_split():
    """Float32 stays float32 in every product, and small parameters are split like large ones."""
    # Not by the context manager of the same name, which other threads would not see.
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "highest")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "FSDP_MIN_SIZE", 16)
        yield
    jax.config.update("jax_default_matmul_precision", before)


@pytest.fixture(scope="module")
def optimised():
    """Programs are compiled as in a run of a user's: fused sums round otherwise in every program."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", functools.partial(jax.jit, compiler_options=users_options()))
        yield
