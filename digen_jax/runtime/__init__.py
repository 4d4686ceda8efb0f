"""Executes the scheduler's commands: thin code without policy.

scheduler --command--> driver --(a thread for each mesh)--> executors --> jitted programs
    ^------event-------'
"""
