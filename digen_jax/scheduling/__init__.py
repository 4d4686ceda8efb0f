"""The scheduler: all policy of a run, as a deterministic state machine without a device or a clock.

    event --> scheduler.handle --> state (batches, versions, workers, costs) --> policy --> commands
                                                                          |
                                                       TAG: outlook --> forecast

`handle` books what happened into the state, then `policy` gives work to whoever has none. Executors
and the simulator do what the commands say and answer each with one event.
"""
