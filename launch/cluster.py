"""Try a run of several processes on this machine: each is started as on a host of its own.

python launch/cluster.py -n 3 -- launch/train.py --config configs/shapes_demo.py --workdir runs/shapes
python launch/cluster.py -n 3 --restarts=5 -- launch/train.py --config configs/shapes_demo.py --workdir runs/shapes

Each process gets --coordinator, --processes and --process in addition, and all share a DIGEN_JAX_TOKEN. What they print
has their numbers in front. Ctrl-C is passed on to all; once more kills them.
"""

import digen_jax.process.ctrl_c  # noqa: F401

# isort: split
import functools
import sys
from collections.abc import Sequence

from absl import flags

from digen_jax.config.command_line import cut_command, run_main
from digen_jax.process.cluster import Cluster, check_command

MOST = 1024  # more would be a typing error

_NUMBER = flags.DEFINE_integer("n", None, "Number of processes.", 1, MOST)
_RESTARTS = flags.DEFINE_integer(
    "restarts",
    0,
    "How often a process that has failed is started again, and how often the whole job is when its first one has.",
    0,
)
flags.mark_flags_as_required(["n"])


def main(command: Sequence[str]) -> int:
    """Run the command in all processes; returns the exit code of the first one."""
    check_command(command)
    return Cluster(command, _NUMBER.value, _RESTARTS.value).run()


if __name__ == "__main__":
    run_main(functools.partial(main, cut_command(sys.argv)))
