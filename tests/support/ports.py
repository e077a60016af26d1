"""Ports for tests that start their own ranks."""

from __future__ import annotations

import socket


def free_port() -> int:
    """On loopback, and nobody's a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
