"""Executes the scheduler's commands: driver, worker threads, executors, weight sync, scoring, checkpoints."""
