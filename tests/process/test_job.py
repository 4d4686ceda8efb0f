"""Environments as clusters set them (Slurm 22.05 and Open MPI 4.1 were looked at), read without starting anything."""

import os
import socket
import subprocess
import sys
import threading
import types

import pytest

from digen_jax.errors import ConfigError
from digen_jax.process.job import Place, own_devices, resolve_place, wait_for_port

SLURM = {
    "SLURM_JOB_ID": "4242",
    "SLURM_STEP_NODELIST": "gpu[07-08,11],old1",
    "SLURM_NTASKS": "7",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1279524864.0;tcp://192.0.2.2,10.0.0.2:42727;tcp6://[fd00::2]:43139",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
SLICES = {
    "TPU_SKIP_MDS_QUERY": "true",  # as on GKE
    "TPU_WORKER_HOSTNAMES": "tpu-0,tpu-1",
    "TPU_WORKER_ID": "1",
    "MEGASCALE_COORDINATOR_ADDRESS": "localhost:8080",
    "MEGASCALE_NUM_SLICES": "2",
    "MEGASCALE_SLICE_ID": "1",
}
TOLD = ("SLURM_", "OMPI_", "JAX_", "KUBERNETES_", "JOB_COMP", "TPU_", "MEGASCALE_", "CUDA_VISIBLE")


@pytest.fixture(autouse=True)
def nothing_tells(monkeypatch):
    for name in [name for name in os.environ if name.startswith(TOLD)]:
        monkeypatch.delenv(name)


def tell(monkeypatch, variables: dict[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def port(job: int) -> int:
    """That of jax: in the last 4096, by the job."""
    return 65535 - 4095 + job % 4096


def test_a_slurm_step_says_which_process_this_is(monkeypatch):
    tell(monkeypatch, SLURM)
    assert resolve_place("auto", None, None) == Place("gpu07", port(4242), 7, 3, (1,))


def test_open_mpi_says_which_process_this_is(monkeypatch):
    tell(monkeypatch, OPEN_MPI)
    number = 1279524864 // 4096
    assert resolve_place("auto", None, None) == Place("192.0.2.2", port(number), 2, 1, (1,))
    only6 = OPEN_MPI["OMPI_MCA_orte_hnp_uri"].replace("tcp://", "other://")
    monkeypatch.setenv("OMPI_MCA_orte_hnp_uri", only6)
    assert resolve_place("auto", None, None).address == f"[fd00::2]:{port(number)}"


def test_slices_of_tpus_say_which_process_this_is(monkeypatch):
    monkeypatch.setattr("jax._src.clusters.cloud_tpu_cluster.running_in_cloud_tpu_vm", True)
    tell(monkeypatch, SLICES)
    assert resolve_place("auto", None, None) == Place("localhost", 8482, 4, 3)


def test_what_is_given_goes_before_what_a_cluster_says(monkeypatch):
    tell(monkeypatch, SLURM | {"JAX_COORDINATOR_PORT": "77"})
    assert resolve_place("auto", 9, 8)[:4] == ("gpu07", 77, 9, 8)
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "elsewhere:88")
    assert resolve_place("auto", None, None)[:4] == ("elsewhere", 88, 7, 3)
    assert resolve_place("[::1]:1234", 2, 1)[:4] == ("::1", 1234, 2, 1)
    assert resolve_place("[::1]:1234", 2, 1).address == "[::1]:1234"
    with pytest.raises(ConfigError, match=r"--process=3 .* --processes=2"):
        resolve_place("auto", 2, None)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("SLURM_JOB_ID", "srun"),
        ("OMPI_COMM_WORLD_RANK", "Open MPI 5"),
        ("KUBERNETES_SERVICE_HOST", "install the package kubernetes"),
        ("HOME", "--coordinator=HOST:PORT"),
    ],
)
def test_without_a_cluster_the_error_has_advice(monkeypatch, name, advice):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    tell(monkeypatch, {name: "1"})
    with pytest.raises(ConfigError, match=f"--coordinator=auto .*{advice}"):
        resolve_place("auto", None, None)


def test_an_environment_that_lacks_a_variable_is_a_config_error(monkeypatch):
    tell(monkeypatch, {"OMPI_MCA_orte_hnp_uri": OPEN_MPI["OMPI_MCA_orte_hnp_uri"]})
    with pytest.raises(ConfigError, match=r"--coordinator=auto .*'OMPI_"):
        resolve_place("auto", None, None)


# ------------------------------------------------------------------------------- Kubernetes


class ApiError(Exception):
    status, reason = 403, "Forbidden"


class Api:
    """What Kubernetes answers a pod of a JobSet "tune" whose replicated job is "processes"."""

    allowed = True

    def list_namespaced_pod(self, namespace, field_selector):
        assert (namespace, field_selector) == ("here", "status.podIP=10.8.0.3")
        if not self.allowed:
            raise ApiError
        owner = types.SimpleNamespace(controller=True, kind="Job")
        labels = {"job-name": "tune-processes-0"}
        metadata = types.SimpleNamespace(labels=labels, owner_references=[owner], name="tune-x")
        return types.SimpleNamespace(items=[types.SimpleNamespace(metadata=metadata, spec=None)])

    def read_namespaced_job(self, name, namespace):
        assert (name, namespace) == ("tune-processes-0", "here")
        labels = {"jobset.sigs.k8s.io/jobset-name": "tune"}
        metadata = types.SimpleNamespace(labels=labels, name=name)
        return types.SimpleNamespace(metadata=metadata, spec=types.SimpleNamespace(parallelism=4))


@pytest.fixture
def kubernetes(monkeypatch):
    from jax._src.clusters import K8sCluster

    client = types.SimpleNamespace(
        CoreV1Api=Api, BatchV1Api=Api, exceptions=types.SimpleNamespace(ApiException=ApiError)
    )
    config = types.SimpleNamespace(load_incluster_config=lambda: None)
    module = types.SimpleNamespace(client=client, config=config)
    monkeypatch.setitem(sys.modules, "kubernetes", module)
    monkeypatch.setattr(K8sCluster, "_namespace", classmethod(lambda _: "here"))
    known = {"tune-pod": "10.8.0.3", "tune-processes-0-0.tune": "10.8.0.2"}
    monkeypatch.setattr(socket, "gethostbyname", known.__getitem__)
    kept = [vars(K8sCluster)[name].__func__ for name in ("_pod", "_job", "_controller")]
    for function in kept:
        function.cache_clear()
    tell(monkeypatch, {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "tune-pod"})
    yield
    for function in kept:
        function.cache_clear()


def test_a_jobset_says_which_process_this_is(monkeypatch, kubernetes):
    tell(monkeypatch, {"JOB_COMPLETION_INDEX": "3"})
    assert resolve_place("auto", None, None) == Place("tune-processes-0-0.tune", 55527, 4, 3)


def test_a_pod_that_may_not_ask_is_a_mistake_of_the_user(monkeypatch, kubernetes):
    monkeypatch.setattr(Api, "allowed", False)
    with pytest.raises(ConfigError, match="403") as error:
        resolve_place("auto", None, None)
    assert "\n" not in error.value.shown()


# ------------------------------------------------------------------------------- GPUs of a host


@pytest.mark.parametrize(
    ("variables", "own"),
    [
        ({}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ()),
        (SLURM | {"SLURM_NODEID": "3", "SLURM_LOCALID": "0"}, ()),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_ON_NODE": "4"}, (2, 3)),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_ON_NODE": "4"}, ()),
        (SLURM | {"CUDA_VISIBLE_DEVICES": "1"}, ()),
        (SLURM | {"CUDA_VISIBLE_DEVICES": ""}, ()),
        (OPEN_MPI | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}, (2, 3)),
        (OPEN_MPI | {"JAX_LOCAL_DEVICE_IDS": "0,3"}, (0, 3)),
    ],
)
def test_processes_of_one_host_share_the_gpus_that_all_of_them_see(monkeypatch, variables, own):
    tell(monkeypatch, variables)
    assert own_devices() == own


def test_gpus_without_equal_shares_are_refused(monkeypatch):
    tell(monkeypatch, SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2"})
    with pytest.raises(ConfigError, match="3 GPUs"):
        own_devices()
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "first")
    with pytest.raises(ConfigError, match="JAX_LOCAL_DEVICE_IDS"):
        own_devices()


@pytest.mark.parametrize(
    ("given", "fields"),
    [
        ((None, 2, None), "--coordinator"),
        ((None, None, 0), "--coordinator"),
        (("here:1234", 2, None), "--process,"),
        (("here", 2, 1), "--coordinator=here must"),
        (("here:99999", 2, 1), "--coordinator=here:99999 must"),
        (("here:1234", 2, 5), "--process=5 must .* --processes=2"),
        (("here:1234", 0, 0), "--process=0 must .* --processes=0"),
    ],
)
def test_an_invalid_place_is_refused(given, fields):
    with pytest.raises(ConfigError, match=fields):
        resolve_place(*given)


def test_a_single_process_joins_nothing():
    assert resolve_place(None, None, None) is None


def test_a_coordinator_is_waited_for_up_to_a_timeout(capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        place = bound.getsockname()
        with pytest.raises(ConfigError, match=f"--coordinator=127.0.0.1:{place[1]} .* 0.3 s"):
            wait_for_port(*place, seconds=0.3, pause=0.1)
        assert capsys.readouterr().err.count("\n") == 1
        later = threading.Timer(0.3, bound.listen)
        later.start()
        wait_for_port(*place, seconds=60, pause=0.1)
        later.join()


def test_a_first_process_whose_peers_do_not_join_ends():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    program = (
        "from digen_jax.process.job import join_job, resolve_place; "
        f"join_job(resolve_place({address!r}, 3, 0), seconds=1.5)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 2
    waiting, ended = [line for line in done.stderr.splitlines() if address in line]
    assert "2 more processes" in waiting and "--processes" in ended


# ------------------------------------------------------------------------- devices, cache, memory

DETECTED = """
import jax
from digen_jax.process.job import resolve_place
place = resolve_place("auto", None, None)
print(*place[:4], *place.devices, jax._src.xla_bridge.backends_are_initialized(), jax.distributed.is_initialized())
"""
PREPARED = """
from digen_jax.process.job import prepare
prepare(cpu_devices=3)
import jax
from absl import logging as absl_logging
print(len(jax.devices()), jax.config.jax_compilation_cache_dir, absl_logging.get_verbosity())
"""
ALLOCATING = """
import resource
import jax.numpy as jnp
x = jnp.ones((4096, 4096))
double = jax.jit(lambda x: x + 1)
for _ in range(40):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    double(x).block_until_ready()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def printed(program: str, folder, **variables: str) -> list[str]:
    unset = ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")
    own = {name: value for name, value in os.environ.items() if name not in unset}
    own |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder)} | variables
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=own)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_detection_starts_nothing_and_devices_and_cache_are_set(tmp_path):
    told = SLURM | {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    detected, prepared, *faults = printed(DETECTED + PREPARED + ALLOCATING, tmp_path, **told)
    assert detected == f"gpu07 {port(4242)} 7 3 2 3 False False"
    assert prepared == f"3 {tmp_path / 'digen_jax' / 'xla'} -2"
    if sys.platform == "linux":  # glibc reuses freed memory
        # A result of 64 MB has 16384 pages. In the first calls, and now and then, the heap grows.
        assert sum(int(pages) > 0 for pages in faults) < len(faults) / 2, faults


def test_devices_and_cache_of_the_environment_are_kept(tmp_path):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    cache = {"JAX_COMPILATION_CACHE_DIR": "elsewhere"}
    assert printed(PREPARED, tmp_path, **flags, **cache) == ["2 elsewhere -2"]
