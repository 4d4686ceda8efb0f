"""Runs on Ray: `launch` starts the trainer, `workers` the other workers, which run `worker_process`."""
