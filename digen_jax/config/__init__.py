"""A config as a user writes it, and the door where it becomes the typed recipe of a run."""
