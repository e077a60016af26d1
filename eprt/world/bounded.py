"""Bounds calls that may never return: stores whose host stopped, groups whose members died.

torch's own timeouts don't cover them (a TCPStore call waits for its host's answer without end, torch 2.13), and nothing
wakes a thread inside one. So such a call gets a thread of its own, and the caller waits for it no longer than it likes.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from eprt.errors import RankLost

T = TypeVar("T")
_LOOK_S = 0.02


def bounded(call: Callable[[], T], limit_s: float, check: Callable[[], None] = lambda: None) -> T:
    """Returns or raises what `call()` does, from another thread.

    Args:
        check: called while waiting; what it raises ends the wait.

    Raises:
        TimeoutError: nothing came back within `limit_s`. The thread is left behind, so that this process can't end
            the ordinary way any more: at exit it leaves at once, with code 75.
    """
    done = threading.Event()
    outcome: list[tuple[T | None, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append((None, error))
        finally:
            done.set()

    deadline = time.monotonic() + limit_s
    threading.Thread(target=run, name="eprt-bounded", daemon=True).start()
    try:
        while not done.wait(_LOOK_S) and time.monotonic() < deadline:
            check()
    finally:
        if not done.is_set():
            at_exit_leave(RankLost.exit_code)
    if not outcome:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType] - None only where T is


def at_exit_leave(code: int | None = None) -> None:
    """Ends the process at interpreter exit without waiting for threads that never come back.

    Args:
        code: what to end with; None: 75 if an uncaught RankLost is what ends the interpreter, else as it would end.
    """
    pid = os.getpid()

    def leave() -> None:
        uncaught = isinstance(getattr(sys, "last_value", None), RankLost)
        if os.getpid() == pid and (code is not None or uncaught):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(RankLost.exit_code if uncaught or code is None else code)

    atexit.register(leave)
