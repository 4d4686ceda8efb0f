"""A config, completed and checked at the door; behind it the settings that each part of a run takes."""
