"""Prompt files, the order of their prompts in a run, and the cache of prompt embeddings."""
