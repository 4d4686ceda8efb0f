"""Becomes a command that the kernel kills when its parent ends, however that ends.

python cluster_child.py PARENT COMMAND [ARGUMENT ...]

It is run as a file, without the package, because nothing may take time before the kernel knows.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h; it is kept over exec


def become(parent: int, command: list[str]) -> None:
    """Replaces this process by `command`, unless the process `parent` has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() == parent:
        os.execv(command[0], command)


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
