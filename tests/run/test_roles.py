"""Which mesh a process has, from its number and the command line."""

import dataclasses
import pathlib
import socket

import pytest

from digen_jax.config.sections import PlacementSection
from digen_jax.engine.placement import MeshSizes, RolloutAxes, TrainerAxes
from digen_jax.errors import ConfigError
from digen_jax.process.ports import free_port
from digen_jax.run.roles import Told, cast, take_part
from tests.remote.mesh_process import TOKEN


def sizes(rollout: int, workers: int, trainer: int) -> MeshSizes:
    return MeshSizes(RolloutAxes(data=rollout, workers=workers), TrainerAxes(data=trainer))


def placement(*counts: int, **fields) -> PlacementSection:
    return PlacementSection(**sizes(*counts)._asdict(), **fields)


@pytest.mark.parametrize(
    ("meshes", "expected"),
    [
        # One process a mesh, of any sizes.
        (sizes(4, 2, 2), [("trainer", 0, 1, 2), ("rollout 0", 0, 1, 4), ("rollout 1", 0, 1, 4)]),
        # As many devices for each.
        (
            sizes(2, 1, 4),
            [
                *(("trainer", process, 4, 1) for process in range(4)),
                *(("rollout 0", process, 2, 1) for process in range(2)),
            ],
        ),
        (
            sizes(4, 2, 4),
            [("trainer", 0, 2, 2), ("trainer", 1, 2, 2)]
            + [(f"rollout {i}", process, 2, 2) for i in range(2) for process in range(2)],
        ),
        (sizes(4, 1, 2), [("trainer", 0, 1, 2), ("rollout 0", 0, 2, 2), ("rollout 0", 1, 2, 2)]),
    ],
)
def test_every_process_has_a_part_of_one_mesh(meshes, expected):
    count = len(expected)
    found = [cast(meshes, count, process) for process in range(count)]
    assert [(role.mesh, role.process, role.processes, role.own) for role in found] == expected
    assert all(role.kind == role.mesh.split()[0] for role in found)


def test_meshes_that_share_a_job_of_jax_count_its_processes(monkeypatch):
    monkeypatch.setenv("DIGEN_JAX_TOKEN", TOKEN)
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        for process, (offset, within) in enumerate([(0, 0), (0, 1), (2, 0), (2, 1)]):
            told = Told(f"127.0.0.1:{port}", 4, process)
            shared = dataclasses.replace(told, one_job=True)
            apart, found = (take_part(placement(2, 1, 2), one) for one in (told, shared))
            assert (apart.one_job, apart.role.offset) == (False, 0)
            assert found.one_job and found.role.processes == 2
            assert (found.role.offset, found.role.process) == (offset, within)
        joins = Told(f"127.0.0.1:{port}", mesh="spare", one_job=True)
        with pytest.raises(ConfigError, match="--mesh adds a mesh to a run whose meshes are jobs"):
            take_part(placement(2, 1, 2), joins)


@pytest.mark.parametrize("processes", [2, 4, 7, 100])
def test_processes_that_cannot_share_the_meshes_are_refused(processes):
    sentence = (
        rf"{processes} processes cannot share the meshes of config\.placement, 2 of 4 devices that sample and one "
        "of 2 that trains: start 3, one for each mesh"
    )
    with pytest.raises(ConfigError, match=sentence):
        cast(sizes(4, 2, 2), processes, 0)


def test_the_command_line_says_which_part_a_process_takes(tmp_path, monkeypatch):
    apart, together = placement(1, 1, 2), placement(0, 1, 2)
    monkeypatch.setenv("DIGEN_JAX_TOKEN", TOKEN)
    with socket.socket() as leader:
        leader.bind(("127.0.0.1", 0))
        leader.listen()
        address = f"127.0.0.1:{leader.getsockname()[1]}"
        assert take_part(apart, Told()) is None
        assert take_part(apart, Told(address, 1, 0)) is None
        assert take_part(together, Told(address, 2, 0)) is None
        found = take_part(apart, Told(address, 2, 0))
        assert (found.role.mesh, found.bound, found.tls) == ("trainer", address, None)
        assert take_part(apart, Told(address, 2, 1)).role.mesh == "rollout 0"
        spare = take_part(apart, Told(address, mesh="spare", host="10.0.0.9"))
        assert (spare.role.mesh, spare.role.kind, spare.role.own) == ("spare", "rollout", 1)
        assert spare.host == "10.0.0.9" and spare.place.address == address
        for told, sentence in (
            (Told(mesh="x"), "give that one's address as --coordinator=host:port"),
            (Told("auto", mesh="x"), "give that one's address as --coordinator=host:port"),
            (Told(address, 2, 1, mesh="x"), "and neither --processes nor --process"),
            (Told(address, mesh="trainer"), "'trainer' is the name of the mesh that trains"),
            (
                Told(address, 2, 1, tls={"certificate": "c", "key": None, "authority": None}),
                "--tls_key",
            ),
            (Told(address, 4, 1, link="transfer"), "--link=transfer"),
        ):
            with pytest.raises(ConfigError, match=sentence):
                take_part(placement(2, 1, 2), told)
        with pytest.raises(ConfigError, match=r"config\.placement\.rollout\.data = 0"):
            take_part(together, Told(address, mesh="x"))
        for told in (Told(address, 2, 1), Told(address, mesh="x")):
            with pytest.raises(ConfigError, match="'auto' plans for one process only"):
                take_part(placement(1, 1, 2, sizes="auto"), told)
        files = {name: str(tmp_path / name) for name in ("certificate", "key", "authority")}
        with pytest.raises(ConfigError, match="a file for TLS cannot be read"):
            take_part(apart, Told(address, 2, 0, tls=files))
        for name in files:
            pathlib.Path(files[name]).write_text(name)
        assert take_part(apart, Told(address, 2, 0, tls=files)).tls.key.name == "key"


def test_a_process_without_the_token_waits_for_nobody(monkeypatch):
    monkeypatch.delenv("DIGEN_JAX_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="DIGEN_JAX_TOKEN must be a secret"):
        take_part(placement(1, 1, 2), Told(f"127.0.0.1:{free_port()}", 2, 1))
