"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

# Below the ports that the kernel gives to clients, else a connection could take a port before its server does. Each
# process of pytest-xdist has its own thousand.
FIRST = 11_000 + 1000 * (1 + int(os.environ.get("PYTEST_XDIST_WORKER", "gw-1").removeprefix("gw")))
_ports = itertools.cycle(range(FIRST, FIRST + 1000))


def free_port() -> int:
    """Return a port on which nothing listens. Each call returns another one."""
    for port in itertools.islice(_ports, 1000):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no port from {FIRST} to {FIRST + 999} is free")
