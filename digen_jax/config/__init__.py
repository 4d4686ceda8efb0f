"""A config as a user writes it, and the door by which it becomes the typed recipe that a run takes."""
