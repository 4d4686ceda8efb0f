import jaxtyping
import pytest


@pytest.fixture(scope="module")
def unchecked():
    """Annotations are not checked: checking them takes twenty times as long as a random run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
