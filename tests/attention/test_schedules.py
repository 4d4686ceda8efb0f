"""The stated speed of packed attention against the compiler's schedule of it."""

import json
import subprocess
import sys

import pytest

from digen_jax.attention import packed
from digen_jax.planning.hardware import CHIPS
from tools.tpu_cycles import CORES, PACKED_SHARES

pytestmark = pytest.mark.tpu

# The chip of each slice, and the cores that share a device's work.
SLICES = {"v5e:2x2": ("TPU v5 lite", 1), "v5p:2x2x1": ("TPU v5", 2), "v6e:2x2": ("TPU v6 lite", 1)}


@pytest.mark.parametrize("tokens", [1024, 1152, 4096])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("topology", SLICES)
def test_the_schedule_takes_no_longer_than_the_stated_share_of_the_peak(topology, width, tokens):
    """An instruction word takes a cycle; all of a step's words are counted, also those that only some steps execute.

    One step of many norms the keys, so where there are many, the schedule without norms counts.
    """
    norms = tokens < 4096
    command = [sys.executable, "-m", "tests.attention.schedules", topology, str(width), str(tokens)]
    command += ["norms"] * norms
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    words = json.loads(done.stdout.splitlines()[-1])
    kind, cores = SLICES[topology]
    chip = CHIPS[kind]
    core = CORES[chip.name]
    pairs = packed.LANES // width * packed.block(tokens, tokens, 2) * tokens
    for direction, products in (("forward", 2), ("backward", 5)):
        flops = 2 * products * pairs * width
        permitted = chip.flops / core.clock / cores * min(1, width / core.array)
        share = flops / (words[direction] * permitted)
        stated = PACKED_SHARES[direction][max(128, core.array), width]
        assert stated <= share, (direction, words[direction], share)
