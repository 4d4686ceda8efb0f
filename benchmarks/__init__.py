"""Benchmarks of the runtime and the algorithms, which `launch/benchmark.py` runs.

`bound.py` simulates the scheduler; `runtime.py` and `cluster.py` drive the real runtime with the waits of `waits.py`
instead of device work; `ray_transport.py` measures Ray alone. `peers.py` compares a real step with an eager loop of
torch and diffusers (`eager.py`). `training.py` trains real runs over a few seeds, and `comparison.py` compares
them. `kills.py` injects faults into a run, `rewards.py` into the requests to reward servers.
"""
