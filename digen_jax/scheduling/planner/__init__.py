"""Finds the best placement and tactics by running the real scheduler on a virtual clock.

    Problem -> proposals -> estimate (ranks all) -> predict (simulates a few) -> Plan -> table, why

`plan.py` makes and describes the plan, `simulate.py` runs the scheduler on the virtual clock,
`calibration.py` holds the sources of the costs, and `memory.py` computes the bytes on each device.
"""
