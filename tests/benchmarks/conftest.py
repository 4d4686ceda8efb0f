import os
import signal

import jaxtyping
import numpy as np
import pytest

from digen_jax.logging.metrics import MetricsLog


def brightness(images, prompts, metadata):
    """A reward."""
    return images.mean((1, 2, 3), dtype=np.float64)


@pytest.fixture
def stop_in_third(monkeypatch):
    """stop_in_third(built): a signal ends the third run that is built, after its first step."""
    write = MetricsLog.write

    def arrange(built):
        def stop(log, step, line):
            write(log, step, line)
            if len(built) == 3 and step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        monkeypatch.setattr(MetricsLog, "write", stop)

    return arrange


@pytest.fixture(autouse=True, scope="package")
def unchecked():
    """Annotations are not checked: that would take longer than some of the waits."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
