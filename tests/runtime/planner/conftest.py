import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="package")
def unchecked():
    """Annotations are not checked: checking them takes twenty times as long as a simulation."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
