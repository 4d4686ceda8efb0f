"""Memory and time of a config's programs, on local or other accelerators, and placement."""
