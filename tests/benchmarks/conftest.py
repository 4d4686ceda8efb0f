import jaxtyping
import pytest


@pytest.fixture(autouse=True, scope="package")
def unchecked():
    """Annotations are not checked: that would take longer than some of the waits."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
