import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from digen_jax.checkpoints import checkpointer
from digen_jax.checkpoints.checkpointer import (
    Checkpointer,
    newest_complete,
    read_checkpoint,
    template_of,
)
from digen_jax.errors import ConfigError

ROOT = pathlib.Path(checkpointer.__file__).parents[2]


def mesh(first: int, count: int):
    devices = jax.devices()[first : first + count]
    return jax.make_mesh((count,), ("data",), axis_types=(AxisType.Auto,), devices=devices)


def state(step: int, on) -> dict:
    """The content of a run's checkpoint: sharded and replicated leaves, an optimizer's tuples, a typed key."""
    split, whole = NamedSharding(on, P("data")), NamedSharding(on, P())
    params = {
        "kernel": jax.device_put(jnp.arange(32.0).reshape(8, 4) + step, split),
        "bias": jax.device_put(jnp.full(3, step, jnp.bfloat16), whole),
    }
    adam = optax.masked(optax.adamw(1e-3), {"kernel": True, "bias": False})
    optimizer = jax.device_put(optax.chain(optax.clip(1.0), adam).init(params), whole)
    key = jax.device_put(jax.random.fold_in(jax.random.key(7), step), whole)
    return {"params": params, "optimizer": optimizer, "ema": None, "key": key}


def assert_equal(actual, expected) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a, np.float64), np.asarray(b, np.float64))


def test_restores_onto_another_mesh_and_keeps_the_newest(tmp_path):
    four, two = mesh(0, 4), mesh(5, 2)
    checkpointer = Checkpointer(tmp_path / "checkpoints", every=5, keep=2)
    for step in (5, 10, 15):
        checkpointer.save(step, state(step, four), {"position": [step, "a"], "none": None})
    checkpointer.close()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["10", "15"]

    template = template_of(state(0, two))
    again = Checkpointer(tmp_path / "checkpoints", every=5, keep=2)
    restored = again.restore_latest(template)
    assert (restored.step, restored.host) == (15, {"position": [15, "a"], "none": None})
    assert again.latest_host() == restored.host
    assert_equal(restored.arrays, state(15, two))
    assert jax.tree.map(lambda x: x.sharding, restored.arrays) == jax.tree.map(
        lambda x: x.sharding, template
    )
    # The key still gives the same draws.
    drawn = [jax.random.normal(s["key"], 3) for s in (restored.arrays, state(15, four))]
    np.testing.assert_array_equal(*map(np.asarray, drawn))
    again.close()


def test_nothing_to_restore_is_none_and_due_counts_steps(tmp_path):
    checkpointer = Checkpointer(tmp_path, every=5, keep=1)
    assert checkpointer.restore_latest({"x": jax.ShapeDtypeStruct((1,), jnp.float32)}) is None
    assert checkpointer.latest_host() is None
    assert [step for step in range(1, 12) if checkpointer.due(step)] == [5, 10]
    checkpointer.close()


def test_arrays_may_be_donated_while_the_save_goes_on(tmp_path):
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    split = NamedSharding(mesh(0, 4), P("data"))
    tree = {name: jax.device_put(jnp.zeros((4, 1 << 16)), split) for name in "ab"}
    checkpointer = Checkpointer(tmp_path, every=1, keep=9)
    for step in range(4):
        checkpointer.save(step, tree, {})
        tree = add(add(tree))
    checkpointer.close()
    for step in reversed(range(4)):
        restored = read_checkpoint(tmp_path, template_of(tree))
        assert restored.step == step
        assert all((x == 2 * step).all() for x in restored.arrays.values())
        shutil.rmtree(tmp_path / str(step))


def test_saving_a_step_twice_keeps_the_first_and_another_tree_or_shape_is_refused(tmp_path):
    checkpointer = Checkpointer(tmp_path, every=1, keep=1)
    given = {"a": jnp.zeros(4), "b": jnp.zeros(2)}
    checkpointer.save(1, given, {})
    checkpointer.save(1, {"a": jnp.ones(4), "b": jnp.zeros(2)}, {})
    restored = checkpointer.restore_latest(template_of(given))
    assert restored.arrays["a"].tolist() == [0] * 4
    for other in ({"a": jnp.zeros(4)}, {"a": jnp.zeros(5), "b": jnp.zeros(2)}):
        with pytest.raises(ValueError, match=r"b|shape"):
            checkpointer.restore_latest(template_of(other))
    checkpointer.close()


def test_an_old_checkpoint_half_removed_does_no_harm(tmp_path):
    checkpointer = Checkpointer(tmp_path, every=1, keep=3)
    for step in (1, 2, 3):
        checkpointer.save(step, {"x": jnp.full(2, step)}, {})
    checkpointer.close()
    shutil.rmtree(tmp_path / "1" / "arrays")
    (tmp_path / "2" / "_CHECKPOINT_METADATA").unlink()
    again = Checkpointer(tmp_path, every=1, keep=2)
    template = template_of({"x": jnp.full(2, 0)})
    assert again.restore_latest(template).arrays["x"].tolist() == [3, 3]
    again.save(4, {"x": jnp.full(2, 4)}, {})
    again.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "4"]


CHILD = """
import os, pathlib, signal, sys
import jax, jax.numpy as jnp, numpy as np
from digen_jax.checkpoints.checkpointer import Checkpointer, SaveFailed, template_of

folder = pathlib.Path(sys.argv[1])
noise = np.random.default_rng(0).random({size})

def arrays(step):
    return {{"x": jnp.asarray(noise + step, jnp.float32), "key": jax.random.key(step)}}

{body}
"""
IN_THE_MIDDLE = """
checkpointer = Checkpointer(folder, 1, 3)
checkpointer.save(1, arrays(1), {"step": 1})
checkpointer.close()
checkpointer = Checkpointer(folder, 1, 3)

def kill(event, arguments):
    # Before the folder in which orbax has written gets its name.
    if event == "os.rename" and pathlib.Path(arguments[1]) == folder / "2":
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
checkpointer.save(2, arrays(2), {"step": 2})
checkpointer.close()
"""


def child(body: str, size: int, folder: pathlib.Path) -> subprocess.Popen:
    code = CHILD.format(size=size, body=body)
    run = [sys.executable, "-c", code, str(folder)]
    return subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def assert_whole(folder: pathlib.Path, size: int) -> int:
    """Restores the newest checkpoint, checks that its parts are of one step, and returns that step."""
    noise = np.random.default_rng(0).random(size)
    template = template_of({"x": jnp.zeros(size), "key": jax.random.key(0)})
    checkpointer = Checkpointer(folder, 1, 3)
    step, arrays, host = checkpointer.restore_latest(template)
    checkpointer.close()
    assert host == {"step": step}
    np.testing.assert_array_equal(arrays["x"], np.asarray(noise + step, np.float32))
    assert jax.random.key_data(arrays["key"]).tolist() == [0, step]
    return step


def test_killed_in_the_middle_of_a_save_the_one_before_is_there(tmp_path):
    process = child(IN_THE_MIDDLE, 1 << 22, tmp_path)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[0] == "1"
    assert names[1:] and "2" not in names
    assert assert_whole(tmp_path, 1 << 22) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


TOO_LARGE = """
import resource, time
checkpointer = Checkpointer(folder, 1, 2)
for step in (1, 2):
    checkpointer.save(step, arrays(step), {"step": step})
checkpointer.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
checkpointer.save(3, arrays(3), {"step": 3})
try:
    while True:
        time.sleep(0.05)
        checkpointer.check()
except SaveFailed as error:
    print(error)
print(checkpointer.steps(), sorted(path.name for path in folder.iterdir()))
"""


def test_a_save_that_fails_is_noticed_before_the_next_one_is_due(tmp_path):
    process = child(TOO_LARGE, 1 << 18, tmp_path)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    error, left = out.splitlines()
    assert str(tmp_path) in error and "step 3" in error and "File too large" in error
    assert left == "[1, 2] ['1', '2']"
    assert assert_whole(tmp_path, 1 << 18) == 2


def test_a_part_can_be_read_by_another_program(tmp_path):
    checkpointer = Checkpointer(tmp_path, every=1, keep=2)
    checkpointer.save(3, state(3, mesh(0, 4)), {"done": 3})
    checkpointer.close()
    half = tmp_path / "4.orbax-checkpoint-tmp"
    half.mkdir()
    wanted = {"params": state(3, mesh(4, 2))["params"]}
    step, arrays, host = read_checkpoint(tmp_path, template_of(wanted))
    assert (step, host) == (3, {"done": 3})
    assert_equal(arrays, wanted)
    assert half.is_dir()
    with pytest.raises(ValueError, match="params/kernels"):
        read_checkpoint(tmp_path, {"params": {"kernels": template_of(wanted)["params"]["kernel"]}})
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "none")):
        read_checkpoint(tmp_path / "none", template_of(wanted))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def garbage(path):
    path.write_bytes(b"\x93\xff nonsense")


ARRAYS = "arrays/ocdbt.process_0/d/*"
DAMAGE = {
    "a bit of an array flipped": (flip, ARRAYS),
    "an array truncated": (cut, ARRAYS),
    "no host": (shutil.rmtree, "host"),
    "garbage for host": (garbage, "host/metadata"),
    "no metadata": (pathlib.Path.unlink, "arrays/_METADATA"),
    "garbage for metadata": (garbage, "arrays/_METADATA"),
    "garbage for orbax's own": (garbage, "_CHECKPOINT_METADATA"),
    "no checksums": (pathlib.Path.unlink, "checksums.json"),
    "garbage for checksums": (garbage, "checksums.json"),
}


def largest(folder, pattern):
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """Checkpoints of steps 1 to 3."""
    folder = tmp_path_factory.mktemp("three")
    checkpointer = Checkpointer(folder, every=1, keep=3)
    for step in (1, 2, 3):
        arrays = {"x": jnp.arange(999.0) + step}
        checkpointer.save(step, arrays, {"position": f"after {step}"})
    checkpointer.close()
    return folder


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_found_and_named_without_a_change(tmp_path, three, capsys, kind):
    action, pattern = DAMAGE[kind]
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    damaged = largest(folder / "3", pattern)
    action(damaged)
    before = sorted(folder.rglob("*"))
    assert newest_complete(folder) == (2, [3])
    assert sorted(folder.rglob("*")) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("checkpoint 3 is damaged ") and damaged.name in line


def test_instead_of_a_damaged_checkpoint_the_one_before_is_used(tmp_path, three, capsys):
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    flip(largest(folder / "3", ARRAYS))
    template = template_of({"x": jnp.arange(999.0)})
    found = read_checkpoint(folder, template)
    assert (found.step, found.host) == (2, {"position": "after 2"})
    np.testing.assert_array_equal(found.arrays["x"], np.arange(999) + 2)
    capsys.readouterr()
    checkpointer = Checkpointer(folder, every=1, keep=3)
    assert checkpointer.restore_latest(template).step == 2
    checkpointer.save(3, {"x": jnp.arange(999.0) + 3}, {})
    checkpointer.close()
    assert {path.name for path in folder.iterdir()} == {"1", "2", "3", "damaged_3"}
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert read_checkpoint(folder, template).step == 3


def test_orbax_does_not_notice_a_flipped_bit(tmp_path, three):
    """The reason for checksums of our own."""
    folder = shutil.copytree(three / "3", tmp_path / "3")
    flip(largest(folder, ARRAYS))
    with ocp.PyTreeCheckpointer() as reader:
        found = reader.restore(folder / "arrays")
    assert (np.asarray(found["x"]) != np.arange(999.0) + 3).any()


def test_without_a_complete_checkpoint_an_error_says_why_of_each(tmp_path, three):
    folder = shutil.copytree(three, tmp_path / "checkpoints")
    (folder / "1" / "checksums.json").unlink()
    cut(largest(folder / "2", ARRAYS))
    shutil.rmtree(folder / "3" / "host")
    template = template_of({"x": jnp.arange(999.0)})
    for read in (read_checkpoint, lambda *_: Checkpointer(folder, 1, 3)):
        with pytest.raises(ConfigError, match=r"3: host.*; 2: .* bytes.*; 1: .*checksums\.json"):
            read(folder, template)
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]
