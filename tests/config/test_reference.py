"""docs/configuration.md is generated from the code, where every field has a comment."""

import pytest

from digen_jax.config import reference
from digen_jax.config.sections import ImagesSection
from digen_jax.errors import ConfigError
from tests.pipelines import ROOT


def test_the_configuration_reference_is_what_the_code_says():
    written = (ROOT / "docs" / "configuration.md").read_text()
    assert written == reference.document(), "run make docs, and commit docs/configuration.md"


def test_a_field_without_a_meaning_is_refused(monkeypatch):
    monkeypatch.setattr(reference, "comments", lambda kind: {"every": "", "images": "some"})
    with pytest.raises(ConfigError, match=r"images\.every has no comment"):
        reference.rows(ImagesSection, "images.")
