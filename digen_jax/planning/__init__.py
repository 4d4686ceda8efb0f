"""From a recipe to a plan: its programs, what they cost on devices at hand or on a slice, and what fits."""
