"""The scheduler: the whole policy of a run, as a deterministic state machine without device or clock.

    event --> scheduler.handle --> state (batches, versions, workers, costs) --> dispatch --> commands
                                                                          |
                                                       TAG: outlook --> forecast

`handle` applies an event to the state, then `dispatch` gives work to every idle worker. Executors and
the simulator execute the commands and answer each with one event.
"""
