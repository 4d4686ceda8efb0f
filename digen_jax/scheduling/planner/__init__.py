"""Which placement and which tactics are best, predicted by the real scheduler on a virtual clock.

    Problem -> candidates -> estimate (ranks all) -> predict (simulates a few) -> Plan -> table, why

`plan.py` asks the questions, `simulate.py` runs the scheduler on the virtual clock; `calibration.py` says where
the costs come from and `memory.py` what a device has to hold.
"""
