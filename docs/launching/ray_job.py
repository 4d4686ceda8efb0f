"""Starts the same command once on each of several nodes of a Ray cluster, and ends with the first process's exit code.

ray job submit --working-dir . -- python docs/launching/ray_job.py --processes=2 --gpus=8 -- \
    python launch/train.py --config=... --workdir=/shared/runs/tuned

Ray chooses the nodes, starts the processes and shows what they print. The command gets `--coordinator`, `--processes`
and `--process`, and its environment the job's token.
"""

import argparse
import os
import secrets
import socket
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class Host:
    """A process on a node of its own; Ray hides GPUs that are not the actor's."""

    def address(self) -> str:
        """The node's host:port, at a port that is free now."""
        with socket.socket() as free:
            free.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"

    def run(self, command: list[str], token: str) -> int:
        """Runs a command to its end, which comes at the latest with that of the actor; its exit code."""
        together = ["setpriv", "--pdeathsig", "KILL", *command]
        return subprocess.run(together, env=os.environ | {"DIGEN_JAX_TOKEN": token}).returncode


def main() -> int:
    """Waits for the nodes, starts all processes, and waits for the first one."""
    parser = argparse.ArgumentParser(usage="%(prog)s --processes=N --gpus=G -- python launch/...")
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("--gpus", type=float, default=0, help="of each process")
    parser.add_argument("--cpus", type=float, default=1, help="of each process")
    parser.add_argument("--strategy", default="STRICT_SPREAD", help="a node for each process")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()

    ray.init()
    resources = {"CPU": given.cpus} | ({"GPU": given.gpus} if given.gpus else {})
    group = placement_group([resources] * given.processes, strategy=given.strategy)
    ray.get(group.ready())
    hosts = [
        ray.remote(Host)
        .options(
            num_cpus=given.cpus,
            num_gpus=given.gpus,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=process
            ),
        )
        .remote()
        for process in range(given.processes)
    ]
    first = f"--coordinator={ray.get(hosts[0].address.remote())}"
    token = os.environ.get("DIGEN_JAX_TOKEN", secrets.token_hex(16))
    ends = [
        host.run.remote(
            [*given.command, first, f"--processes={given.processes}", f"--process={process}"], token
        )
        for process, host in enumerate(hosts)
    ]
    return ray.get(ends[0])


if __name__ == "__main__":
    sys.exit(main())
