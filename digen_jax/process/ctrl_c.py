"""Ends the process at Ctrl-C from a script's first line on: scripts import this module before anything slow.

Until `interrupt.end_by_ctrl_c` takes over nothing has to be cleaned up.
"""

import os
import signal
import sys
from os import _exit  # unguarded: see `ending.guard_exit`


def _end(number: int, frame: object) -> None:
    try:
        os.write(2, f"{os.path.basename(sys.argv[0])}: stopped by Ctrl-C\n".encode())
    finally:
        _exit(128 + number)


if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)
