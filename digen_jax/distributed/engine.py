"""Actors and objects on a Ray cluster. Only this module imports ray, when it connects.

Nothing is retried here: the scheduler handles failed work.
"""

import contextlib
import ctypes
import functools
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from types import MappingProxyType
from typing import Any

from digen_jax.errors import ConfigError
from digen_jax.process.shutdown import STOPPED, exit_now, log_fatal

LOCAL = "local"
NAMESPACE = "digen_jax"  # of actor names
# Threads of an actor per concurrency group. A single thread executes calls in the caller's order.
GROUPS = {"work": 1, "sync": 1, "score": 8, "control": 1, "ping": 1}
VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Seconds until Ray's processes end after the head fails (default 60).
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    # At the default, 15, any other process on the machine slows actors down.
    "RAY_worker_niceness": "0",
    # Futures report errors. Ray would also print those of unread second results.
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}
FORWARDED = ("JAX_", "XLA_", "HF_", "TPU_", "LIBTPU_", "NCCL_", "WANDB_", "DIGEN_JAX_")
NO_DEVICES: Mapping[str, int] = MappingProxyType({})
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
CONNECT_TIMEOUT = 60.0  # seconds for Ray to start or respond
POLL = 0.5  # seconds between checks of a stop condition
REPORTING = 30.0  # seconds between reports of missing resources
AGAIN = "the same command continues from the last checkpoint"
HEAD_PERIOD = 2.0  # seconds between connection checks of the head
HEAD_TIMEOUT = 6.0  # seconds without a connection until the head is considered failed

Ref = Any  # reference to a stored object; the last one frees it
Actor = Any  # handle of a process that executes calls


class ProcessDied(RuntimeError):
    """Raised if a process died, was killed or is unreachable, or if a stored object is unavailable."""


class ObjectUnavailable(ProcessDied):
    """Raised if a stored object was lost with its node."""


class RayEngine:
    """Connection to a Ray cluster. Thread-safe.

    Args:
      address: "local" to start Ray on this machine, "auto", or the cluster's HOST:PORT.
      show: Whether to print the output of actors, prefixed by their names.
      cpus: Number of cores for Ray with "local".

    Raises:
      ConfigError: Ray is not installed, or no cluster is reachable at the address.
    """

    def __init__(self, address: str, show: bool = True, cpus: int | None = None):
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                f"--ray={address} needs Ray: install it by `pip install -r requirements-ray.txt`"
            ) from error
        self._ray = ray
        for name, value in VARIABLES.items():
            os.environ.setdefault(name, value)
        # It reports at each start that a token was found or created.
        logging.getLogger("ray._private.authentication.authentication_token_setup").disabled = True
        only_local = dict(num_cpus=cpus, include_dashboard=False) if address == LOCAL else {}
        text = _no_cluster(address, f"not within {CONNECT_TIMEOUT:g} s")
        # By then the main thread is blocked in Ray.
        late = threading.Timer(CONNECT_TIMEOUT, lambda: exit_now(log_fatal(text, 2)))
        late.daemon = True
        late.start()
        try:
            _connect(address, 10.0)
            ray.init(
                address=address,
                namespace=NAMESPACE,
                log_to_driver=show,
                configure_logging=False,
                logging_level=logging.ERROR,
                **only_local,
            )
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            message = _no_cluster(address, reason)
            if "ersion mismatch" in reason:
                message = f"--ray={address}: install one Python and Ray on all nodes ({reason})"
            raise ConfigError(message) from error
        finally:
            late.cancel()
        self._free: dict[Actor, Callable[[], None]] = {}  # by actor: frees its placement group
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch_head, name="head", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT of the cluster, for other processes to connect to."""
        return self._ray.get_runtime_context().gcs_address

    @property
    def nodes(self) -> list[tuple[str, dict[str, float]]]:
        """(address, resources such as {"CPU": 8.0, "GPU": 2.0}) of each live node."""
        found = [one for one in self._ray.nodes() if one["Alive"]]
        return [(one["NodeManagerAddress"], one["Resources"]) for one in found]

    def most(self, kind: str) -> int:
        """Returns the cluster's accelerators of a kind, including those that an autoscaler can add."""
        from ray._private.state import state

        there = sum(have.get(kind, 0) for _, have in self.nodes)
        return int(max(there, (state.get_max_resources_from_cluster_config() or {}).get(kind, 0)))

    def check_secure(self, given: str, is_open: bool) -> None:
        """Rejects a multi-host cluster without a token, unless `is_open`, because any client can run code on it.

        Raises:
          ConfigError: The cluster has no token.
        """
        others = {host for host, _ in self.nodes} - {self._ray.util.get_node_ip_address()}
        if others and not is_open and os.environ.get("RAY_AUTH_MODE") != "token":
            raise ConfigError(
                f"--ray={given}: any client can run code on the cluster's hosts ({min(others)} and others), as it has "
                "no token: create one by `ray get-auth-token --generate` and set RAY_AUTH_MODE=token for each "
                "`ray start` and here, or add --ray_open"
            )

    def start(
        self,
        kind: type,
        arguments: Sequence[tuple],
        devices: Mapping[str, int] = NO_DEVICES,
        name: str | None = None,
    ) -> list[Actor]:
        """Starts processes as soon as the cluster has resources for all of them.

        Args:
          kind: Class of the processes.
          arguments: Constructor arguments of each process.
          devices: Accelerators of each process by kind, such as {"GPU": 2}, in addition to a CPU core.
          name: Unique name under which other drivers can `find` the first process.

        Raises:
          ConfigError: No TPU slice of the cluster has the requested chips and hosts.
          ProcessDied: No such slice is free.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group, free = self._reserve({"CPU": 1, **devices}, len(arguments))
        make = self._ray.remote(concurrency_groups=GROUPS)(kind)
        actors = [
            make.options(
                num_cpus=1,
                num_gpus=devices.get("GPU", 0),
                resources={kind: count for kind, count in devices.items() if kind != "GPU"},
                max_restarts=0,
                max_task_retries=0,
                name=name if number == 0 else None,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            ).remote(*given)
            for number, given in enumerate(arguments)
        ]
        for actor in actors:
            actor.__ray_call__.remote(_end_with_parent)
        with self._lock:
            self._free |= dict.fromkeys(actors, free)
        return actors

    def _reserve(self, needed: dict[str, int], processes: int) -> tuple[Any, Callable[[], None]]:
        """Returns a placement group with one bundle per process, and a function that frees it.

        Several processes with TPUs get the hosts of one slice, because a mesh cannot span slices.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        chips = needed.get("TPU", 0)
        if not chips or processes == 1:
            group = placement_group([needed] * processes, strategy="PACK")
            return group, functools.partial(remove_placement_group, group)
        from ray.util.tpu import slice_placement_group

        found = {}  # (topology, generation) by (chips, chips per host)
        for node in self._ray.nodes():
            labels, there = node.get("Labels") or {}, int(node["Resources"].get("TPU", 0))
            if node["Alive"] and (topology := labels.get("ray.io/tpu-topology")):
                generation = labels["ray.io/tpu-pod-type"].rpartition("-")[0]
                size = math.prod(map(int, topology.split("x")))
                found[size, there] = topology, generation
        if (chips * processes, chips) not in found:
            have = [f"{size} chips ({of_host} per host)" for size, of_host in sorted(found)]
            slices = f"slices of {' and '.join(have)}" if have else "no slices"
            raise ConfigError(
                f"{processes} processes with {chips} TPUs each need a slice of {chips * processes} chips, but "
                f"the cluster has {slices}: change the sizes or hosts of config.placement"
            )
        topology, generation = found[chips * processes, chips]
        options = dict(chips_per_vm=chips, head_reservation_timeout_s=CONNECT_TIMEOUT)
        try:
            reserved = slice_placement_group(topology, generation, needed, **options)
        except TimeoutError as error:
            raise ProcessDied(f"no {generation} slice of {topology} is free") from error
        return reserved.slice_placement_group, reserved.shutdown

    def find(self, name: str) -> Actor:
        """Returns a named process that another driver started."""
        return self._ray.get_actor(name)

    def call(self, actor: Actor, method: str, *arguments: Any, group: str) -> Future:
        """Calls a method in a concurrency group of `GROUPS`; reference arguments are passed by value.

        The future raises the method's exception or ProcessDied.
        """
        bound = getattr(actor, method).options(concurrency_group=group)
        return self._future(bound.remote(*arguments))

    def call_pair(self, actor: Actor, method: str, *sent: Any, group: str) -> tuple[Future, Ref]:
        """Like `call`, for a method that returns a pair. The second value stays on its node until requested."""
        bound = getattr(actor, method).options(concurrency_group=group, num_returns=2)
        first, second = bound.remote(*sent)
        return self._future(first), second

    def coordinator_address(self, actor: Actor) -> Future:
        """Returns a future (address, free port) at which other nodes can reach a process."""
        return self._future(actor.__ray_call__.remote(_free_address))

    def put(self, value: Any) -> Ref:
        """Stores a value."""
        return self._ray.put(value)

    def get(self, ref: Ref) -> Any:
        """Returns a stored value; its arrays are read-only views. Raises ProcessDied."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise self._raised(error) from error

    def kill(self, actor: Actor) -> None:
        """Kills a process, even a suspended one; its calls raise ProcessDied.

        The resources of processes started together are freed when the last of them is killed.
        """
        self._ray.kill(actor, no_restart=True)
        with self._lock:
            free = self._free.pop(actor, None)
            last = free not in self._free.values()
        if free is not None and last:
            free()

    def close(self) -> None:
        """Ends all processes that this connection started."""
        self._closed.set()
        self._ray.shutdown()

    def _watch_head(self) -> None:
        """Exits when the cluster's head fails; Ray itself would exit later, with code 1."""
        address, connected = self.address, time.monotonic()
        while not self._closed.wait(HEAD_PERIOD):
            try:
                _connect(address, HEAD_PERIOD)
                connected = time.monotonic()
            except OSError as error:
                if time.monotonic() - connected > HEAD_TIMEOUT:
                    text = f"the head of the Ray cluster at {address} does not answer ({error})"
                    exit_now(log_fatal(f"{text}: start it again; {AGAIN}", STOPPED))

    def _future(self, ref: Ref) -> Future:
        found: Future = Future()

        def settle(done: Future) -> None:
            _ = ref  # Ray may not settle the future of a freed reference
            error = done.exception()
            with contextlib.suppress(InvalidStateError):  # the caller has set an error meanwhile
                if error is None:
                    found.set_result(done.result())
                else:
                    found.set_exception(self._raised(error))

        ref.future().add_done_callback(settle)
        return found

    def _raised(self, error: BaseException) -> BaseException:
        """Converts a Ray error to the method's exception or ProcessDied."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            cause = error.cause
            if not isinstance(cause, exceptions.RayError):  # else an argument could not be read
                return cause if isinstance(cause, BaseException) else RuntimeError(str(error))
            error = cause
        if not isinstance(error, exceptions.RayError):
            return error
        kind = ProcessDied
        if isinstance(error, exceptions.ObjectLostError):
            kind = ObjectUnavailable
        first_line = str(error).strip().partition("\n")[0]
        return kind(f"{type(error).__name__}: {first_line}")


def _free_address(actor: object) -> tuple[str, int]:
    from ray.util import get_node_ip_address

    with socket.socket() as found:
        found.bind(("", 0))
        return get_node_ip_address(), found.getsockname()[1]


def _end_with_parent(actor: object) -> None:
    """Makes the kernel kill a process together with its parent, the node's Ray process.

    Otherwise, after its driver is killed, the process may keep its devices for a minute while it tries to reach Ray.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _connect(address: str, seconds: float) -> None:
    """Tests the connection to HOST:PORT once; Ray itself retries for minutes. Raises OSError."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def _no_cluster(address: str, reason: str) -> str:
    token = "" if os.environ.get("RAY_AUTH_MODE") else ", set RAY_AUTH_MODE=token if it has a token"
    return (
        f"--ray={address}: no Ray cluster answers there ({reason}): check the address{token}, or start one by "
        "`ray start --head`"
    )


def wait_for_resources(
    started: Sequence[Future],
    name: str,
    needed: str,
    stops: Callable[[], Any],
    quiet: Callable[[], bool] = lambda: False,
) -> None:
    """Waits for calls of processes that the cluster may not have resources for yet, or until `stops` is true.

    Reports every 30 s, unless `quiet`, that `name` waits for `needed`.
    """
    begin = reported = time.monotonic()
    while wait(started, POLL).not_done and not stops():
        if (now := time.monotonic()) - reported > REPORTING and not quiet():
            reported = now
            text = f"{name} has waited {now - begin:.0f} s for {needed}: see `ray status`"
            print(text, file=sys.stderr, flush=True)


def surroundings() -> tuple[dict[str, str], str, list[str]]:
    """Returns (environment variables, working directory, import path) to reproduce in processes on other nodes."""
    variables = {name: text for name, text in os.environ.items() if name.startswith(FORWARDED)}
    return variables, os.getcwd(), [os.path.abspath(folder) for folder in sys.path]
