"""Watching the control store from a thread of its own: a call to it may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from eprt.world.over import OVER, Over

GRACE_S = 1.0  # between the store's end and the accusation: the rank that took it along is heard of meanwhile


class StoreWatch:
    """Whether the store still answers, and whether a stranger wrote there that he is one of the ranks.

    Args:
        store: one that no other thread uses (a clone); None: nothing is watched.
        intruded: called, in the watching thread, with (rank, words) of who is claimed twice; then the watch ends.
    """

    def __init__(
        self,
        store: dist.Store | None,
        beat_s: float,
        silent_after_s: float,
        intruded: Callable[[int, str], None],
    ) -> None:
        self._store, self._intruded = store, intruded
        self._beat_s, self._silent_after_s = beat_s, silent_after_s
        self._asked_at: float | None = None
        self._error: str | None = None
        self._gone_at: float | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="eprt-store-watch", daemon=True)

    def start(self) -> None:
        if self._store is not None:
            self._thread.start()

    def stop(self) -> None:
        """Leaves a thread behind that is inside a call which doesn't return: `stuck`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._store = None

    @property
    def stuck(self) -> bool:
        """After `stop`: whether the thread is still inside a call."""
        return self._thread.is_alive()

    def complaint(self, now: float, somebody_ended: bool) -> str:
        """What is wrong with the store, if anything that no ended rank explains; called again and again."""
        if self._error is not None:
            self._gone_at = self._gone_at or now
            if not somebody_ended and now - self._gone_at > GRACE_S:  # else only who waits for that rank is lost
                return "the control store is gone, its host ended (torchrun's agent?)"
        elif self._asked_at is not None and now - self._asked_at > self._silent_after_s + 2 * self._beat_s:
            return f"the control store gave no answer for {self._silent_after_s:g} s: its host is stopped or cut off"
        return ""

    def _watch(self) -> None:
        store = self._store
        while store is not None and not self._stop.wait(self._beat_s):
            try:
                self._asked_at = time.monotonic()
                over = bytes(store.get(OVER)) if store.check([OVER]) else b""
                self._asked_at = None
            except (RuntimeError, OSError) as error:
                self._error = str(error)
                return
            found = Over.parse(over)
            if found is not None and found.why == "foreign":
                self._intruded(found.rank, found.message)
                return
