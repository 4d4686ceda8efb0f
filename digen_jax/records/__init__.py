"""Files in a run's workdir: checkpoints, metrics, pictures, commands, timeline, versions."""
