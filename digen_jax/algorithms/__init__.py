"""Advantages and losses, one file an algorithm family (pure functions)."""
