"""Ports for servers that cannot choose one themselves."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Return a free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
