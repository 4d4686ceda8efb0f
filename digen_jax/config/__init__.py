"""The config of a run: its fields, their checks, and loading it from a file or the command line."""
