"""The scheduler: all policy of a run, as a deterministic state machine without a device or a clock.

    event --> scheduler.handle --> state (batches, versions, workers, costs) --> dispatch --> commands
                                                                          |
                                                       TAG: outlook --> forecast

`handle` books what happened into the state, then `dispatch` gives work to whoever has none. Executors
and the simulator do what the commands say and answer each with one event.
"""
