"""What the runtime gains, measured: `launch/benchmark.py` prints it.

`waits.py` stands in for device work, `runtime.py` drives the real runtime with it, `report.py` tells.
"""
