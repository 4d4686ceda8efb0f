"""plan.py for TPU slices, with the real compiler, as a user runs it."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.pipelines import ROOT
from tests.tiny_runs import pipeline

pytestmark = pytest.mark.tpu

# Without a rollout worker, so that the meshes of the config are those that are chosen.
TINY = (
    *("--config=configs/shapes_flow_grpo.py", "--config.batch.groups=2", "--config.batch.images=8"),
    *("--config.sampler.chunk=16", "--config.trainer.micro_batch=16", "--config.sampler.steps=4"),
    *("--config.evaluation.batch=16", "--config.placement.rollout.data=0"),
    *("--config.placement.mode=given", "--config.placement.trainer.fsdp=2"),
)  # fmt: skip
SLICES = {"v5e:2x4": 8, "v5p:2x2x1": 4, "v6e:2x2": 4}


def run(folder, *command):
    """A process as a user starts it, with a cache in a folder: the tests' own flags are for quick compilation."""
    given = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    given |= {"PYTHONPATH": str(ROOT)} | ({"XDG_CACHE_HOME": str(folder)} if folder else {})
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=ROOT, env=given
    )


@pytest.fixture(scope="module")
def planned(base, tmp_path_factory):
    """plan.py's output for a slice; compiled programs are cached."""
    folder = tmp_path_factory.mktemp("cache")

    def plan(name, script="launch/plan.py"):
        images = f"--config.placement.trainer.data={SLICES[name] // 2}"
        model = f"--config.model.folder={pipeline(base)}"
        return run(folder, script, f"--topology={name}", *TINY, images, model)

    return plan


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_is_planned(planned, name):
    done = planned(name)
    assert done.returncode == 0, done.stderr
    text = done.stdout
    assert f"{name}: {SLICES[name]} devices" in text and "not run" in text
    rows = {line.split()[0]: line.split() for line in reversed(text.splitlines()) if line}
    for program in ("generate", "train"):
        _, devices, peak, seconds, needed, counted, share, remat = next(
            line.split() for line in text.splitlines() if re.match(rf"{program} +\d+ ", line)
        )
        assert int(devices) == SLICES[name] and 0 < float(peak) < 1 and 0 < float(seconds) < 1
        # In so small a network what is not the transformer's counts, too: see test_work for the equality.
        assert float(counted) > 0.95 * float(needed) > 0
        assert share.endswith("%") and remat.endswith("%")
    assert "it fits (estimated)" in text and rows["*"][1] == "colocated"


def test_cycles_are_listed_by_layer(planned):
    done = planned("v5e:2x4", "tools/tpu_cycles.py")
    assert done.returncode == 0, done.stderr
    train = done.stdout.partition("\ntrain: ")[2].partition("\nupdate: ")[0]
    assert "all-reduce" in train and "transformer_blocks_0" in train


def test_a_second_time_nothing_is_compiled(planned):
    planned("v6e:2x2")
    done = planned("v6e:2x2")
    assert done.returncode == 0 and ": compiled before" in done.stdout
    assert "compiling for" not in done.stdout


# Plain products of a transformer of width 1536: sixteen sequences of Stable Diffusion 3.5 at 512 x 512. Only the
# compiler's cycles count: a program of one product also has to fetch its operands, which a network does meanwhile.
SHARES = """
import json, sys
import jax, jax.numpy as jnp
from digen_jax.planning.hardware import chip_of, topology_devices
from tools.tpu_cycles import COMPILER, Cycles
device = topology_devices(sys.argv[1])[0]
chip, place, shares = chip_of(device.device_kind), jax.sharding.SingleDeviceSharding(device), []
for m, k, n in ((17632, 1536, 1536), (17632, 1536, 6144), (17632, 6144, 1536)):
    factors = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in ((m, k), (k, n))]
    text = jax.jit(jnp.matmul).lower(*factors).compile().as_text()
    shares.append(2 * m * k * n / chip.flops / Cycles(text, chip).seconds(COMPILER))
print(json.dumps(shares))
"""


@pytest.mark.parametrize(
    ("name", "least", "most"), [("v5p:2x2x1", 0.94, 0.98), ("v6e:2x2", 0.71, 0.90)]
)
def test_plain_products_come_close_to_the_peak(tmp_path, name, least, most):
    done = run(tmp_path, "-c", SHARES, name)
    assert done.returncode == 0, done.stderr
    assert all(least < share < most for share in json.loads(done.stdout)), done.stdout


def test_an_unknown_slice_is_one_line(tmp_path):
    done = run(tmp_path, "launch/plan.py", "--topology=v9:2x2", *TINY)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "plan.py: --topology=v9:2x2 is no slice that the TPU compiler knows" in done.stderr


MEMORY = """
import jax, jax.numpy as jnp
from digen_jax.planning.estimate import CompiledProgram
from digen_jax.planning.hardware import topology_devices

def layer(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T), None

def loss(ws, x):
    y, _ = jax.lax.scan(jax.checkpoint(layer), x, ws)
    return jnp.square(y.astype(jnp.float32)).mean()

place = jax.sharding.SingleDeviceSharding(topology_devices("v5e:1x1")[0])
shapes = (8, 1024, 4096), (320 * 1024, 1024)
given = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=place) for shape in shapes)
compiled = jax.jit(jax.grad(loss)).lower(*given).compile()
report, found = compiled.memory_analysis(), CompiledProgram.of(compiled)
print(report.argument_size_in_bytes, report.temp_size_in_bytes, found.peak, found.temporaries)
"""


def test_temporaries_of_a_tpu_that_share_memory_count_once():
    """All temporaries in the compiler's report need more than a v5e's 15.75 GiB, and still it compiles for a v5e."""
    done = run(None, "-c", MEMORY)
    arguments, temporaries, peak, counted = map(int, done.stdout.split())
    assert arguments + temporaries > 15.75 * 2**30 > peak == arguments + counted
