"""Runs of several processes: rollout workers and trainers are Ray actors, started and called from one place.

`engine` connects to Ray, `launch` starts the trainer's process, `workers` starts the rollout workers, restarts them and
notices their loss, `worker_proxy` calls one worker, `worker_process` is that worker, and `transfer` moves arrays.
"""
