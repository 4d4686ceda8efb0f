import pathlib

import pytest
from ml_collections import ConfigDict


@pytest.fixture(scope="session")
def prompts(tmp_path_factory) -> pathlib.Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    file.write_text("a red circle\na blue star\n")
    return file


@pytest.fixture
def given(prompts) -> ConfigDict:
    """A config that leaves out everything except its prompt files."""
    file = str(prompts)
    return ConfigDict(dict(prompts=dict(file=file), evaluation=dict(prompts=file)))
