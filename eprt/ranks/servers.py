"""Starts the two processes that ranks are forked from, which have imported torch once.

Two, because an interpreter's hash seed decides in which order it walks a set of strings. torchrun's ranks have a seed
each; ranks of one server would all have its own, and agree where torchrun's don't.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.forkserver import ForkServer

_PRELOAD = ["torch", "torch.distributed", "eprt.ranks.process", "eprt.conformance.checks"]
_SERVERS = (ForkServer(), ForkServer())
_LOCK = threading.Lock()


def preload(*modules: str) -> None:
    """Makes the ranks start with these modules imported; call it before this process starts its first rank."""
    _PRELOAD.extend(module for module in modules if module not in _PRELOAD)


def start_servers(size: int) -> None:
    """Starts the servers of a world of `size` ranks, unless they run: they import at the same time."""
    # A terminal sends Ctrl-C to them, too, and what they import would print where it was. Ranks listen again.
    resource_tracker.ensure_running()  # of multiprocessing, which unblocks the signal when it has just been started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for server in _SERVERS[:size]:
            server.set_forkserver_preload(["eprt.ranks.freezing", *_PRELOAD])
            server.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def server_of(rank: int) -> Iterator[None]:
    """Lets multiprocessing's "forkserver" processes that start inside the block come from this rank's server.

    A group of ranks r, r + s, ... with s a power of two has ranks of both: 0, 1, 1, 0, 1, 0, 0, 1, ...
    """
    server = _SERVERS[rank.bit_count() % 2]
    with _LOCK:
        before, forkserver.connect_to_new_process = forkserver.connect_to_new_process, server.connect_to_new_process
        try:
            yield
        finally:
            forkserver.connect_to_new_process = before
