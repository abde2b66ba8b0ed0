"""Ports for servers of the tests, on loopback."""

from __future__ import annotations

import random
import socket

# Below the range that Linux hands out to outgoing connections: a port stays ours while its server is down.
RANGE = range(20_000, 32_000)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now, and that no outgoing connection will take meanwhile."""
    for port in random.sample(RANGE, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no free port among 100 tried in {RANGE}")
