"""Freed memory is used again, in a process of its own, because the C library is set up once in each."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from digen_jax.process.job import prepare
prepare()
import jax, jax.numpy as jnp
x = jnp.ones((4096, 4096))
double = jax.jit(lambda x: x + 1)
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    double(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is set up")
def test_a_program_is_not_given_new_pages_in_every_call():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    faults = list(map(int, done.stdout.split()))
    # A result of 64 MB has 16384 pages. In the first calls, and now and then, the heap grows.
    assert sum(pages > 0 for pages in faults) < len(faults) / 2, faults
