"""Benchmarks of the runtime and the algorithms: `launch/benchmark.py` prints them.

`variants.py` lists the tactics to compare, `waits.py` replaces device work, `runtime.py` drives the real
runtime with it, `report.py` prints the results. `compute.py` is real work on two cores. `cells.py` trains
real runs over a few seeds, which `asynchrony.py` and `algorithms.py` compare.
"""
