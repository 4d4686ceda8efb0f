"""The mutations of tests/mutations.py can be applied; whether tests catch them says the script."""

import pytest

from tests.mutations import FAMILIES, MUTATIONS, ROOT, verdict
from tests.mutations import Mutation as Row


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: f"{m.family}, {m.name}")
def test_the_text_is_found_once_and_the_tests_exist(mutation):
    mutation.check()
    assert mutation.old != mutation.new
    for test in mutation.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_a_text_that_is_gone_is_named():
    row = Row("sd3", "gone", "tests/mutations.py", "no such " + "text", "", ())
    with pytest.raises(ValueError, match=r"sd3, gone: tests/mutations.py has .* 0 times, not once"):
        row.check()


def test_names_are_unique_and_every_family_has_the_kinds_it_can_have():
    assert len({(m.family, m.name) for m in MUTATIONS}) == len(MUTATIONS)
    for family in FAMILIES:
        names = {m.name for m in MUTATIONS if m.family == family}
        assert {"layer read", "pad token", "norm axis", "modulation order", "shift"} <= names


@pytest.mark.parametrize("status", [None, 0, 2, 5])
def test_only_tests_that_ran_and_failed_catch(status):
    assert verdict(1, 9) == "caught" and verdict(status, 9).startswith("NOT CAUGHT")
