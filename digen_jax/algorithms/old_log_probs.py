"""Where the behaviour policy's log-probabilities of a ratio come from."""

from typing import Literal

# "rollout": stored when sampled. "recomputed": by the trainer, from the parameters that sampled, in the gradient's
# program with its batch. "current": those of the policy being trained, without gradient, so that every ratio is 1.
OldLogProbs = Literal["rollout", "recomputed", "current"]


def choose_old_log_probs(
    choice: Literal["auto"] | OldLogProbs,
    float32: bool,
    stale: bool,
    updates: int,
    stored: bool = True,
) -> OldLogProbs:
    """What a config's `old_log_probs` means.

    "auto" is "rollout" where sampler and trainer compute in float32. Where one of them does not, ratios to
    stored log-probabilities are off by rounding: "current" if that is allowed, else "recomputed".

    Args:
      choice: as configured.
      float32: whether both compute in float32.
      stale: whether fragments may have been sampled by an older version than the step starts from.
      updates: optimizer updates a step.
      stored: whether sampling computes any; else "auto" never is "rollout".

    Raises:
      ValueError: "current" where what is trained is not always what sampled.
    """
    fresh = not stale and updates == 1
    if choice == "auto":
        if float32 and stored:
            return "rollout"
        return "current" if fresh else "recomputed"
    if choice == "current" and not fresh:
        reason = "with asynchrony" if stale else f"with {updates} updates a step"
        others = "'recomputed' or 'rollout'" if stored else "'recomputed'"
        raise ValueError(
            f"old_log_probs is 'current', but {reason} the policy being trained is not the one that "
            f"sampled: set it to {others}"
        )
    return choice
