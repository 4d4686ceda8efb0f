"""The scheduler: the policy of a run, as a deterministic state machine without device or clock.

    event --> scheduler.handle --> state (steps, weights, workers, costs) --> next work of idle workers --> commands

`handle` applies an event to the state, then assigns work to every idle worker. Executors or the simulator
execute the commands and answer each with one event.
"""
