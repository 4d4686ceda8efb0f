"""The scheduler: the policy of a run, as a deterministic state machine without device or clock (see `scheduler`)."""
