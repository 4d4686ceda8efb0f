"""Runs of several processes, which are Ray actors.

`engine` connects to Ray, `launch` starts the trainer's processes, `workers` starts the other workers, calls them,
notices their loss and restarts them, `worker_process` is such a worker, and `transfer` moves arrays.
"""
