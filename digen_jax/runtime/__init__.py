"""What carries out the scheduler's commands: thin, without policy.

scheduler --command--> driver --(a thread a mesh)--> executors --> jitted programs
    ^------event-------'
"""
