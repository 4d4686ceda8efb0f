"""Multi-process runs on Ray actors.

`engine` connects to Ray, `launch` starts the trainer's processes, `workers` starts, calls, monitors and restarts the
other workers, `worker_process` runs in their processes, and `transfer` moves arrays.
"""
