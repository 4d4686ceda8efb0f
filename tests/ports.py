"""Chooses a port for a server that is started soon, perhaps by another process, or again."""

import random
import socket

QUIET = range(20_000, 32_000)  # usually below those that the kernel gives to clients
TRIES = 100


def free_port() -> int:
    """A port at which nothing listens.

    It is one of QUIET, unless many of these are taken: no client gets it from the kernel before the server does.
    """
    for port in (*random.SystemRandom().sample(QUIET, TRIES), 0):
        with socket.socket() as found:
            try:
                found.bind(("", port))
            except OSError:
                continue
            return found.getsockname()[1]
    raise OSError("there is no free port")
