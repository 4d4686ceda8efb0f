"""Membership against its definition, for every order in which groups may become complete."""

import itertools

import pytest

from digen_jax.scheduling.settings import Settings
from digen_jax.scheduling.step import Candidates


def defined(flat, wanted):
    """The first groups with variance by index, then those without."""
    order = [g for g, is_flat in enumerate(flat) if not is_flat]
    order += [g for g, is_flat in enumerate(flat) if is_flat]
    return order[:wanted]


def certain(flat_by_group, known, wanted, most):
    """Groups that are members whatever the unknown verdicts will be."""
    unknown = [g for g in range(most) if g not in known]
    sure = None
    for guess in itertools.product([False, True], repeat=len(unknown)):
        flat = list(flat_by_group)
        for g, is_flat in zip(unknown, guess, strict=True):
            flat[g] = is_flat
        members = set(defined(flat, wanted))
        sure = members if sure is None else sure & members
    return sure


@pytest.mark.parametrize(("wanted", "spare", "most"), [(1, 0, 3), (2, 0, 4), (2, 1, 4), (3, 1, 5)])
def test_members_are_the_first_informative_candidates_in_any_order(wanted, spare, most):
    settings = Settings(1, wanted, 1, 1, max_candidates=most, oversampled_groups=spare)
    for flat in itertools.product([False, True], repeat=most):
        for order in itertools.permutations(range(most)):
            candidates = Candidates(settings)
            known = []
            while not candidates.step_known:
                opened = [g for g in order if g < len(candidates.verdicts) and g not in known]
                group = opened[0]
                known.append(group)
                candidates.classify(group, 0.0, 0.0 if flat[group] else 1.0)
                found = {g for g in known if candidates.is_member(g)}
                sure = certain(flat, known, wanted, most).intersection(known)
                if len(known) < most:
                    # The groups that fill up are known only when all candidates are known.
                    sure = {g for g in sure if not flat[g]}
                assert found == sure
            assert {g for g in known if candidates.is_member(g)} == set(defined(flat, wanted))
            others = set(range(len(candidates.verdicts))) - set(defined(flat, wanted))
            assert set(candidates.others()) == others
