import pathlib
import re
import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from digen_jax.checkpoints.checkpoint_folder import read_checkpoint
from digen_jax.checkpoints.checkpointer import Checkpointer, template_of
from digen_jax.errors import ConfigError
from tests.checkpoints.test_checkpointer import assert_equal, mesh, state


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
    with pytest.raises(ValueError, match=r"has no params/kernels: it is of another kind of run"):
        read_checkpoint(tmp_path, {"params": {"kernels": template_of(wanted)["params"]["kernel"]}})
    with pytest.raises(FileNotFoundError, match="has no checkpoint: give"):
        read_checkpoint(tmp_path / "none", template_of(wanted))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def garbage(path):
    path.write_bytes(b"\x93\xff nonsense")


DAMAGE = {
    "a bit of an array flipped": (flip, "arrays/ocdbt.process_0/d/*", r"is not what was written"),
    "an array cut": (cut, "arrays/ocdbt.process_0/d/*", r"has \d+ bytes, not \d+"),
    "no host": (shutil.rmtree, "host", "host/metadata is missing|host/commit.* is missing"),
    "garbage for host": (garbage, "host/metadata", "host/metadata has 11 bytes, not"),
    "no metadata": (pathlib.Path.unlink, "arrays/_METADATA", "arrays/_METADATA is missing"),
    "garbage for metadata": (garbage, "arrays/_METADATA", "arrays/_METADATA has 11 bytes"),
    "garbage of orbax's own": (garbage, "_CHECKPOINT_METADATA", "_METADATA cannot be read"),
    "no checksums": (pathlib.Path.unlink, "checksums.json", "it has no checksums.json"),
    "garbage for checksums": (garbage, "checksums.json", "its checksums.json cannot be read"),
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
def test_of_a_damaged_checkpoint_the_one_before_is_used_which_is_said(
    tmp_path, three, capsys, kind
):
    action, pattern, said = DAMAGE[kind]
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    action(largest(folder / "3", pattern))
    template = template_of({"x": jnp.arange(999.0)})
    before = sorted(path.name for path in folder.iterdir())

    found = read_checkpoint(folder, template)
    assert (found.step, found.host) == (2, {"position": "after 2"})
    np.testing.assert_array_equal(found.arrays["x"], np.arange(999) + 2)
    assert sorted(path.name for path in folder.iterdir()) == before
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"checkpoint 3 is damaged \(.*({said}).*\): 2 is used", line)

    checkpointer = Checkpointer(folder, every=1, keep=3)
    assert checkpointer.restore_latest(template).step == 2
    checkpointer.save(3, {"x": jnp.arange(999.0) + 3}, {})
    checkpointer.close()
    assert {path.name for path in folder.iterdir()} == {"1", "2", "3", "damaged_3"}
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert read_checkpoint(folder, template).step == 3


def test_where_no_checkpoint_is_whole_one_sentence_says_of_each_why(tmp_path, three):
    folder = tmp_path / "checkpoints"
    shutil.copytree(three, folder)
    (folder / "1" / "checksums.json").unlink()
    cut(largest(folder / "2", "arrays/ocdbt.process_0/d/*"))
    shutil.rmtree(folder / "3" / "host")
    template = template_of({"x": jnp.arange(999.0)})
    sentence = (
        r"no checkpoint in \S+ is whole \(3: host\S+ is missing; 2: \S+ has \d+ bytes, not \d+; "
        r"1: it has no checksums.json\): put a copy in its place, or choose another workdir"
    )
    for read in (read_checkpoint, lambda *_: Checkpointer(folder, 1, 3)):
        with pytest.raises(ConfigError) as caught:
            read(folder, template)
        assert re.fullmatch(sentence, str(caught.value))
    assert sorted(path.name for path in folder.iterdir()) == ["1", "2", "3"]
