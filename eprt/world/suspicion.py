"""The evidence of one rank's guard: what it last heard of its peers, its suspicions, and a watch on the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from eprt.world.rendezvous import TERMINATION, Termination

GRACE_S = 1.0  # between the store's end and the accusation: the rank that took it along is heard of meanwhile


@dataclass
class PeerRecord:
    """The record of what this rank last heard of another rank."""

    heard_at: float = field(default_factory=time.monotonic)
    ops: int = 0
    where: str = "start-up"
    ending: str = ""
    ended_at: float = 0.0
    closed: bool = False
    warned: bool = False


@dataclass(frozen=True)
class Suspicion:
    """A suspicion that a rank is lost. `rank` -1 names nobody: the store is gone."""

    rank: int
    why: str
    detail: str

    def words(self) -> str:
        return f"rank {self.rank} {self.why}: {self.detail}" if self.rank >= 0 else self.detail


def verdict_message(suspicions: list[Suspicion]) -> str:
    """Returns the message of the RankLost that these suspicions lead to."""
    lost = "; ".join(suspicion.words() for suspicion in suspicions)
    return f"{lost}. The step's outputs are discarded; restart the job, or go on without it where `World.shrink` can."


class StoreWatch:
    """Watches from a thread of its own whether the store still answers, and whether a stranger wrote that he is one of
    the ranks. A call to the store may never return.

    Args:
        store: one that no other thread uses (a clone); None: nothing is watched.
        intruded: called, in the watching thread, with (rank, words) of who is claimed twice; then the watch ends.
    """

    def __init__(
        self, store: dist.Store | None, beat_s: float, silent_after_s: float, intruded: Callable[[int, str], None]
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
        """Ends the watch. A thread inside a call that doesn't return stays behind: `stuck`."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)
        self._store = None

    @property
    def stuck(self) -> bool:
        """Returns, after `stop`, whether the thread is still inside a call."""
        return self._thread.is_alive()

    def complaint(self, now: float, somebody_ended: bool) -> str:
        """Returns what is wrong with the store, "" for nothing. An ended rank that served it explains its end."""
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
                over = bytes(store.get(TERMINATION)) if store.check([TERMINATION]) else b""
                self._asked_at = None
            except (RuntimeError, OSError) as error:
                self._error = str(error)
                return
            found = Termination.parse(over)
            if found is not None and found.why == "foreign":
                self._intruded(found.rank, found.message)
                return
