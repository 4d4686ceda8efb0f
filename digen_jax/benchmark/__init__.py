"""What the runtime gains and the algorithms learn, measured: `launch/benchmark.py` prints it.

`variants.py` says what is compared, `waits.py` stands in for device work, `runtime.py` drives the real
runtime with it, `report.py` tells. `compute.py` is real work on two cores. `cells.py` are real runs over a few
seeds, which `asynchrony.py` and `algorithms.py` compare.
"""
