"""Prompts that are encoded before a run samples: which they are, and how they come into the store."""
