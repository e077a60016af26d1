"""Keeps garbage collection away from what a server of ranks imports: the server imports this module first.

Importing torch and transformers makes half a million objects, which no collection frees. A rank forked from the server
neither looks through them in each collection of its own nor copies their pages by writing to them.
"""

from __future__ import annotations

import atexit
import gc
import os

_SERVER = os.getpid()


def _freeze() -> None:
    if os.getpid() == _SERVER:
        gc.freeze()


def _collect_again() -> None:
    if os.getppid() == _SERVER:
        gc.enable()


def _leave() -> None:
    """Ends the server at once: what it froze isn't collected, and Triton's bindings would print all of it as leaked."""
    if os.getpid() == _SERVER:
        os._exit(0)


gc.disable()
atexit.register(_leave)
os.register_at_fork(before=_freeze, after_in_child=_collect_again)
