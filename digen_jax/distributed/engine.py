"""The engine that runs processes on a cluster: starts actors, calls their methods, stores objects.

This is the only module that imports ray, and it does so when it connects. Nothing here is retried: the scheduler
decides what to do about lost work.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple, Protocol

from digen_jax.errors import ConfigError
from digen_jax.process.ending import STOPPED, last_word, leave

LOCAL = "local"
NAMESPACE = "digen_jax"  # of the names of processes
# Threads of an actor for each kind of call; one thread executes calls in the caller's order.
GROUPS = {"work": 1, "sync": 1, "score": 8, "control": 1, "ping": 1}
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
CONNECTING = 60.0  # seconds in which Ray starts or answers
LOOK = 2.0  # seconds between two connections to the head
HEAD_SILENCE = 6.0  # seconds without one after which it is lost
INSTALL = "install it by `pip install -r requirements-ray.txt`"

Ref = Any  # a stored object, which is freed when the last reference is
Actor = Any  # a process that executes calls


class Lost(RuntimeError):
    """A process has died, was killed or cannot be reached, or a stored object is gone."""


class Resources(NamedTuple):
    """What one process needs: accelerators of a kind, such as GPU, and CPU cores for placing it."""

    kind: str = ""
    devices: int = 0
    cpus: int = 1


class Engine(Protocol):
    """Processes and objects on a cluster. Any thread may call."""

    def start(
        self, kind: type, arguments: Sequence[tuple], resources: Resources, name: str | None = None
    ) -> list[Actor]:
        """Starts one process of class `kind` for each tuple of arguments, as soon as there are resources for all.

        By `name`, which must be unique in the cluster, other drivers find the first one.
        """

    def find(self, name: str) -> Actor:
        """The process that another driver has started under a name."""

    def call(self, actor: Actor, method: str, *arguments: Any, group: str) -> Future:
        """Calls a method in one of the threads of `GROUPS`; arguments that are references are passed as values.

        The future raises the method's own exception, or Lost.
        """

    def call_for_tree(
        self, actor: Actor, method: str, *arguments: Any, group: str
    ) -> tuple[Future, Ref]:
        """The same for a method that returns a pair: its second value stays on its node until it is asked for."""

    def coordinator_address(self, actor: Actor) -> Future:
        """(address, port) of a process, at which other nodes reach it and nothing listens yet."""

    def put(self, value: Any) -> Ref:
        """Stores a value."""

    def get(self, ref: Ref) -> Any:
        """A stored value; arrays are read-only views of it. Raises Lost."""

    def kill(self, actor: Actor) -> None:
        """Kills a process, even one that is stopped; its calls raise Lost."""

    def close(self) -> None:
        """Ends all processes that it has started."""


class RayEngine:
    """`Engine` on Ray.

    Args:
      address: "local" starts Ray on this machine; else the cluster's, "auto" or HOST:PORT.
      show: whether the output of actors is printed, with each one's name before it.
      cpus: with "local", the cores that Ray counts with.

    Raises:
      ConfigError: Ray is not installed, or there is no cluster at the address.
    """

    def __init__(self, address: str, show: bool = True, cpus: int | None = None):
        try:
            import ray
        except ImportError as error:
            raise ConfigError(f"--ray={address} needs Ray: {INSTALL}") from error
        self._ray = ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # A process of Ray ends so many seconds after the head, 60 by default.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "15")
        # By default a Ray that starts here runs actors at niceness 15: any other process would slow them down.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # Errors of calls reach the caller through their futures. Ray would also print each one's unread second result.
        os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
        # It reports that a token was found or made, at each start.
        logging.getLogger("ray._private.authentication.authentication_token_setup").disabled = True
        only_local = dict(num_cpus=cpus, include_dashboard=False) if address == LOCAL else {}
        late = threading.Timer(CONNECTING, _give_up, [address])
        late.daemon = True
        late.start()
        try:
            _reach(address)
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
            if "ersion mismatch" in reason:
                raise ConfigError(
                    f"--ray={address}: install the same Python and Ray on all nodes and here ({reason})"
                ) from error
            raise ConfigError(_no_cluster(address, reason)) from error
        finally:
            late.cancel()
        self._free: dict[Actor, Callable[[], None]] = {}  # frees each actor's placement group
        self._lock, self._closed = threading.Lock(), threading.Event()
        threading.Thread(target=self._watch_head, name="head", daemon=True).start()

    @property
    def address(self) -> str:
        """HOST:PORT, at which other processes connect to the same cluster."""
        return self._ray.get_runtime_context().gcs_address

    @property
    def nodes(self) -> list[tuple[str, dict[str, float]]]:
        """(address, resources such as {"CPU": 8.0, "GPU": 2.0}) of each node that is alive."""
        found = [one for one in self._ray.nodes() if one["Alive"]]
        return [(one["NodeManagerAddress"], one["Resources"]) for one in found]

    def most(self, kind: str) -> int:
        """How many accelerators of a kind the cluster has, or can have if an autoscaler adds nodes."""
        from ray._private.state import state

        there = sum(have.get(kind, 0) for _, have in self.nodes)
        return int(max(there, (state.get_max_resources_from_cluster_config() or {}).get(kind, 0)))

    @property
    def own_host(self) -> str:
        """The address of this process's node."""
        return self._ray.util.get_node_ip_address()

    def start(
        self, kind: type, arguments: Sequence[tuple], resources: Resources, name: str | None = None
    ) -> list[Actor]:
        """See `Engine`: one placement group, with a bundle for each process.

        Raises:
          ConfigError: no TPU slice of the cluster has so many chips in so many hosts.
          Lost: no such slice is free.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        devices = {resources.kind: resources.devices} if resources.devices else {}
        group, free = self._reserve({"CPU": resources.cpus} | devices, len(arguments))
        make = self._ray.remote(concurrency_groups=GROUPS)(kind)
        actors = [
            make.options(
                num_cpus=resources.cpus,
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
        """Returns a placement group with a bundle for each process, and a function that frees it.

        Several processes with TPUs get the hosts of one slice, because TPUs of two slices cannot be one mesh.
        """
        from ray.util.placement_group import placement_group, remove_placement_group

        chips = needed.get("TPU", 0)
        if not chips or processes == 1:
            group = placement_group([needed] * processes, strategy="PACK")
            return group, functools.partial(remove_placement_group, group)
        from ray.util.tpu import slice_placement_group

        found = {}  # (chips, chips of a host): (topology, generation)
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
                f"{processes} processes with {chips} TPUs each need a slice of {chips * processes} chips, and the "
                f"cluster has {slices}: change the sizes or hosts of config.placement"
            )
        topology, generation = found[chips * processes, chips]
        options = dict(chips_per_vm=chips, head_reservation_timeout_s=CONNECTING)
        try:
            reserved = slice_placement_group(topology, generation, needed, **options)
        except TimeoutError as error:
            raise Lost(f"no {generation} slice of {topology} is free") from error
        return reserved.slice_placement_group, reserved.shutdown

    def call(self, actor: Actor, method: str, *arguments: Any, group: str) -> Future:
        """See `Engine`."""
        bound = getattr(actor, method).options(concurrency_group=group)
        return self._future(bound.remote(*arguments))

    def call_for_tree(
        self, actor: Actor, method: str, *arguments: Any, group: str
    ) -> tuple[Future, Ref]:
        """See `Engine`."""
        bound = getattr(actor, method).options(concurrency_group=group, num_returns=2)
        first, second = bound.remote(*arguments)
        return self._future(first), second

    def find(self, name: str) -> Actor:
        """See `Engine`."""
        return self._ray.get_actor(name)

    def coordinator_address(self, actor: Actor) -> Future:
        """See `Engine`."""
        return self._future(actor.__ray_call__.remote(_coordinator_address))

    def put(self, value: Any) -> Ref:
        """See `Engine`."""
        return self._ray.put(value)

    def get(self, ref: Ref) -> Any:
        """See `Engine`."""
        try:
            return self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            raise self._own(error) from error

    def kill(self, actor: Actor) -> None:
        """See `Engine`; frees its resources once the last actor of its placement group is killed."""
        self._ray.kill(actor, no_restart=True)
        with self._lock:
            free = self._free.pop(actor, None)
            last = free not in self._free.values()
        if free is not None and last:
            free()

    def close(self) -> None:
        """See `Engine`."""
        self._closed.set()
        self._ray.shutdown()

    def _watch_head(self) -> None:
        """Ends the process when the cluster's head is lost; Ray itself would end it with code 1, and later."""
        address, heard = self.address, time.monotonic()
        while not self._closed.wait(LOOK):
            try:
                _reach(address, LOOK)
                heard = time.monotonic()
            except OSError as error:
                if time.monotonic() - heard > HEAD_SILENCE:
                    why = f"the head of the Ray cluster at {address} is lost ({error})"
                    again = (
                        "start it again, and the same command continues from the last checkpoint"
                    )
                    leave(last_word(f"{why}: {again}", STOPPED))

    def _future(self, ref: Ref) -> Future:
        found: Future = Future()

        def settle(done: Future) -> None:
            # `ref` is held here: the future of a reference that is gone is never settled rightly.
            _ = ref
            with contextlib.suppress(InvalidStateError):
                error = done.exception()
                if error is None:
                    found.set_result(done.result())
                else:
                    found.set_exception(self._own(error))

        ref.future().add_done_callback(settle)
        return found

    def _own(self, error: BaseException) -> BaseException:
        """The exception that an actor's method raised, or Lost."""
        exceptions = self._ray.exceptions
        if isinstance(error, exceptions.RayTaskError):
            cause = error.cause
            return cause if isinstance(cause, BaseException) else RuntimeError(str(error))
        if isinstance(error, exceptions.RayError):
            return Lost(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return error


def _coordinator_address(actor: object) -> tuple[str, int]:
    from ray.util import get_node_ip_address

    with socket.socket() as found:
        found.bind(("", 0))
        return get_node_ip_address(), found.getsockname()[1]


def _end_with_parent(actor: object) -> None:
    """Has the kernel kill an actor's process with its parent, Ray's process of the node.

    Otherwise it may try to report the loss to Ray for a minute, with its devices, if a driver that started Ray is
    killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _reach(address: str, seconds: float = 10.0) -> None:
    """Connects to HOST:PORT once; Ray itself tries for minutes. Raises OSError."""
    host, separator, port = address.rpartition(":")
    if separator and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=seconds).close()


def check_secure(engine: RayEngine, address: str, is_open: bool) -> None:
    """Refuses a cluster of several hosts without a token, unless `is_open`: any client could run code on it.

    Raises:
      ConfigError: how to set a token.
    """
    others = sorted({host for host, _ in engine.nodes} - {engine.own_host})
    if others and not is_open and os.environ.get("RAY_AUTH_MODE") != "token":
        raise ConfigError(
            f"--ray={address}: the cluster has other hosts ({others[0]}) and no token, so that any client can "
            "run code on all of them: create one by `ray get-auth-token --generate` and set RAY_AUTH_MODE=token for "
            "each `ray start` and here, or add --ray_open"
        )


def _no_cluster(address: str, reason: str) -> str:
    token = "" if os.environ.get("RAY_AUTH_MODE") else ", set RAY_AUTH_MODE=token if it has a token"
    return (
        f"--ray={address}: no Ray cluster answers there ({reason}): check the address{token}, or start one by "
        "`ray start --head`"
    )


def _give_up(address: str) -> None:
    """Ends the process, whose main thread is blocked in Ray."""
    leave(last_word(_no_cluster(address, f"not within {CONNECTING:g} s"), 2))


def forwarded() -> dict[str, str]:
    """The variables of this process's environment that its workers on other nodes get, too."""
    kept = ("JAX_", "XLA_", "HF_", "TPU_", "LIBTPU_", "NCCL_", "WANDB_", "DIGEN_JAX_")
    return {name: value for name, value in os.environ.items() if name.startswith(kept)}


def python_path() -> list[str]:
    """The folders from which this process imports modules, for its workers: a reward may be in one of them."""
    return [os.path.abspath(folder) for folder in sys.path]
