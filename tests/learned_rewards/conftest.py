import pytest

from tests.learned_rewards.folders import Files, write


@pytest.fixture(scope="session")
def files(tmp_path_factory) -> Files:
    """Files of all rewards, which tests do not change."""
    return write(tmp_path_factory.mktemp("learned"))
