"""From a recipe to a plan: its programs, what they cost on available devices or on a slice, and what fits."""
