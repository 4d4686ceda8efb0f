"""The process a script runs in: its devices and compile cache, signals, progress on a terminal, its end."""
