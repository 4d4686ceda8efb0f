import pytest

from digen_jax.algorithms.old_log_probs import choose_old_log_probs


@pytest.mark.parametrize(
    ("float32", "stale", "updates", "chosen"),
    [
        (True, False, 1, "rollout"),
        (True, True, 1, "rollout"),
        (True, False, 2, "rollout"),
        (False, False, 1, "current"),
        (False, True, 1, "recomputed"),
        (False, False, 2, "recomputed"),
    ],
)
def test_the_default_follows_the_dtypes_and_what_is_fresh(float32, stale, updates, chosen):
    assert choose_old_log_probs("auto", float32, stale, updates) == chosen


@pytest.mark.parametrize("choice", ["rollout", "recomputed"])
def test_what_is_chosen_is_taken(choice):
    assert choose_old_log_probs(choice, False, True, 3) == choice
    assert choose_old_log_probs("current", True, False, 1) == "current"


@pytest.mark.parametrize(
    ("stale", "updates", "reason"),
    [(True, 1, "with asynchrony"), (False, 2, "with 2 updates a step")],
)
def test_current_is_refused_where_another_policy_sampled(stale, updates, reason):
    with pytest.raises(ValueError, match=f"old_log_probs is 'current', but {reason} the policy"):
        choose_old_log_probs("current", True, stale, updates)
