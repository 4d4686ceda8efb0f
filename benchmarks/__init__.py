"""Benchmarks of the runtime and the algorithms: `launch/benchmark.py` prints them.

`bound.py` simulates the scheduler. `variants.py` lists the tactics to compare, `waits.py` replaces device
work, `runtime.py` drives the real runtime with it, `report.py` prints the results. `step.py` is a real step,
which `compute.py` runs on two cores and `peers.py` next to an eager loop of torch and diffusers (`eager.py`).
`cells.py` trains real runs over a few seeds, which `asynchrony.py` and `algorithms.py` compare.
"""
