"""Memory and time of a config's programs, on available devices or on accelerators that are not, and placement."""
