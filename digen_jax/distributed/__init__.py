"""Runs of several processes, which are Ray actors.

`engine` connects to Ray, `launch` starts the trainer's processes, `workers` starts the rollout workers, notices their
loss and restarts them, `worker_proxy` calls one worker, `worker_process` is that worker, `transfer` moves arrays, and
`files` checks that all nodes have the same files.
"""
