"""Which placement and which tactics are best, predicted by the real scheduler on a virtual clock.

    Problem -> candidates -> estimate (ranks all) -> predict (simulates a few) -> Plan -> table, why

`plan.py` asks the questions; `calibration.py` says where the costs come from and `memory.py` what a
device has to hold. Nothing here needs a device or JAX, except `measure.py`.
"""
