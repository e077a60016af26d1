"""Finding the rank that died, hung or left, and saying so in the same words on every rank.

gloo names nobody and wakes nobody: a survivor sees "connection closed" with a port number, or sits out its whole
timeout. So each process of a World has one `Guard` thread on the control store. It publishes a heartbeat with the
rank's progress, reads the peers' heartbeats, and the first rank that finds a fault writes one verdict that all raise.

Faults and how they are found, measured from the moment they happen:
    exited  a process on this host is gone                          one beat
    silent  no heartbeat (stopped, killed elsewhere, GIL held)      silent_after_s
    raised  the rank left its World through an exception            1.3 s, once somebody waits for it
    left    the rank closed its World or exited                     1.3 s, once somebody waits for it
    behind  alive, but not in the operation others wait in          the World's timeout
    store   the control store itself is gone                        one beat
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from eprt.errors import RankLost

logger = logging.getLogger("eprt")

BEAT_S = 0.25
ENDED_GRACE_S = 1.0
LINGER_S = 3.0
EXIT_CODE = RankLost.exit_code


@dataclass
class _Peer:
    """What this rank last heard of another."""

    beat: str = ""
    heard_at: float = field(default_factory=time.monotonic)
    host: str = ""
    pid: int = 0
    ops: int = 0
    where: str = "start-up"
    ending: str = ""
    ended_at: float = 0.0


class Guard:
    """Heartbeats and verdicts of one rank. Construction is collective: every rank must have beaten once before any
    rank watches, so the caller puts a barrier between `Guard(...)` and `start()`, and one after it.

    Args:
        store: a store no other thread blocks on (a clone), under a prefix that no other World uses.
        silent_after_s: a peer without a heartbeat for this long is lost.
        exit_after_s: on GPU worlds the host may sit in a kernel that waits for the dead; this long after a verdict that
            no call has raised, the process writes a report to stderr and exits with code 75. None: never.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, silent_after_s: float, exit_after_s: float | None
    ) -> None:
        self._store = store
        self._rank = rank
        self._pid = os.getpid()
        self._home = _home()
        self._silent_after_s = silent_after_s
        self._exit_after_s = exit_after_s
        self._peers = {peer: _Peer() for peer in range(size) if peer != rank}
        self._progress = (0, "start-up")
        self._ending = ""
        self._counter = 0
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._verdict: RankLost | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, name="eprt-guard", daemon=True)
        if rank == 0:
            store.set("verdict", "")
        self._beat()

    def start(self) -> None:
        for peer in self._peers.values():
            peer.heard_at = time.monotonic()
        try:
            self._listen()  # who the peers are, in case one takes the store along before the first beat
        except (RuntimeError, OSError) as error:
            logger.debug("control store is gone at start-up: %s", error)  # the thread will find that, too
        self._thread.start()

    def note(self, where: str | None = None) -> None:
        """This rank enters another operation: `where` names it, None is one more step of the last one named."""
        self._progress = (self._progress[0] + 1, where or self._progress[1])

    @property
    def verdict(self) -> RankLost | None:
        """What the world agreed on, if anything."""
        return self._verdict

    @property
    def failing(self) -> bool:
        """Whether a verdict stands, or this rank is leaving through an exception."""
        return self._verdict is not None or self._ending.startswith("raised")

    def raise_if_lost(self, waiting_for: Iterable[int] = ()) -> None:
        """Raises RankLost if there is a verdict, or if one of the ranks this one is `waiting_for` has ended."""
        if self._verdict is None:
            # What a peer sent before it ended may still be on its way: leave it a moment to complete our work.
            now = time.monotonic()
            for rank in waiting_for:
                peer = self._peers.get(rank)
                if peer is not None and peer.ending and now - peer.ended_at > ENDED_GRACE_S:
                    why, _, detail = peer.ending.partition(":")
                    self._accuse(rank, why, f"{detail.strip() or 'closed its World'}; others still wait for it")
        if self._verdict is not None:
            self._raised = True
            raise RankLost(str(self._verdict), self._verdict.rank, self._verdict.why)

    def raise_behind(self, waited_s: float, waiting_for: Iterable[int]) -> None:
        """This rank waited for its whole timeout: name the one that is furthest behind. Always raises RankLost."""
        rank = min((r for r in waiting_for if r in self._peers), key=lambda r: self._peers[r].ops)
        self._accuse(rank, "behind", f"alive but not in the operation the others wait in for {waited_s:.0f} s")
        self.raise_if_lost()

    def raise_broken(self, error: RuntimeError) -> None:
        """A collective failed (a peer's socket closed): wait for the verdict that names the peer. Always raises."""
        deadline = time.monotonic() + self._silent_after_s + 2 * BEAT_S
        while time.monotonic() < deadline and self._verdict is None:
            self.raise_if_lost(self._peers)
            time.sleep(BEAT_S / 5)
        self.raise_if_lost()
        raise RankLost(f"a collective failed and no rank could be blamed: {error}", -1, "unknown") from error

    def leave(self, ending: str) -> None:
        """Publish that this rank is going: "left", or "raised: <what>". Idempotent; the first word stands. A forked
        child that ends isn't this rank."""
        if not self._ending and os.getpid() == self._pid:
            self._ending = ending
            try:
                self._beat()
            except (RuntimeError, OSError):
                logger.debug("control store is gone while leaving")

    def close(self, linger_s: float = 0.0) -> None:
        """Stop the thread. A thread inside a store call at interpreter exit would end the process with an abort.

        Args:
            linger_s: for the rank that hosts the store, which peers would miss: wait this long for them to end too.
        """
        self.leave("left")
        if linger_s and not self._stop.is_set() and os.getpid() == self._pid:
            self._linger(time.monotonic() + linger_s)
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout=2.0)

    def _linger(self, deadline: float) -> None:
        """Until every peer has ended, too. After a verdict they need no more than a moment."""
        started = time.monotonic()
        while time.monotonic() < (min(deadline, started + LINGER_S) if self.failing else deadline):
            try:
                with self._lock:
                    beats = self._store.multi_get([f"beat/{rank}" for rank in self._peers])
            except (RuntimeError, OSError):
                return
            heard = [json.loads(bytes(beat).decode()) for beat in beats]
            if all(ending or (home == self._home and _ended(pid)) for _, home, pid, _, _, ending in heard):
                return
            time.sleep(BEAT_S / 5)

    # ---- the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.wait(BEAT_S):
            try:
                self._beat()
                self._listen()
            except (RuntimeError, OSError, ValueError) as error:
                if not self._stop.is_set() and self._verdict is None:
                    self._store_lost(error)
            if self._verdict is not None:
                self._exit_if_stuck()
                return

    def _beat(self) -> None:
        with self._lock:
            self._counter += 1
            ops, where = self._progress
            beat = [self._counter, self._home, self._pid, ops, where, self._ending]
            self._store.set(f"beat/{self._rank}", json.dumps(beat))

    def _listen(self) -> None:
        ranks = list(self._peers)
        with self._lock:
            *beats, verdict = self._store.multi_get([f"beat/{rank}" for rank in ranks] + ["verdict"])
        if verdict:
            self._adopt(bytes(verdict).decode())
            return
        now = time.monotonic()
        for rank, raw in zip(ranks, beats, strict=True):
            peer, beat = self._peers[rank], bytes(raw).decode()
            if beat != peer.beat:
                peer.beat, peer.heard_at = beat, now
                _, peer.host, peer.pid, peer.ops, peer.where, peer.ending = json.loads(beat)
                peer.ended_at = peer.ended_at or (now if peer.ending else 0.0)
            elif not peer.ending and self._gone(peer):
                self._accuse(rank, "exited", f"process {peer.pid} on {peer.host.split()[0]} is gone")
            elif not peer.ending and now - peer.heard_at > self._silent_after_s:
                self._accuse(rank, "silent", f"no heartbeat for {now - peer.heard_at:.1f} s (stopped, or GIL held)")

    def _accuse(self, rank: int, why: str, detail: str) -> None:
        """Propose a verdict; the first proposal in the store is everybody's."""
        message = (
            f"rank {rank} {why}: {detail}; last heard of in {self._peers[rank].where}, missed by rank {self._rank} in "
            f"{self._progress[1]}. The step's outputs are discarded; restart the job."
        )
        try:
            with self._lock:
                agreed = self._store.compare_set("verdict", "", json.dumps([rank, why, message]))
            self._adopt(bytes(agreed).decode())
        except (RuntimeError, OSError) as error:
            self._store_lost(error)
            self._verdict = self._verdict or RankLost(message, rank, why)

    def _adopt(self, verdict: str) -> None:
        rank, why, message = json.loads(verdict)
        if self._verdict is None:
            self._verdict = RankLost(message, rank, why)

    def _store_lost(self, error: Exception) -> None:
        """Nothing can be agreed on any more, so the words must follow from what every rank sees."""
        logger.debug("control store is gone: %s", error)
        if any(peer.ending for peer in self._peers.values()):
            self._stop.set()  # it went with a rank that had ended: only a call that waits for that rank is lost
            return
        deadline = time.monotonic() + ENDED_GRACE_S  # a dying process closes its sockets before it counts as gone
        while not (gone := [rank for rank, peer in self._peers.items() if self._gone(peer)]):
            if time.monotonic() > deadline:
                self._verdict = RankLost("the control store is gone. Restart the job.", -1, "store")
                return
            time.sleep(BEAT_S / 5)
        message = f"rank {gone[0]} exited: its process is gone, and the control store with it. Restart the job."
        self._verdict = RankLost(message, gone[0], "exited")

    def _gone(self, peer: _Peer) -> bool:
        return peer.host == self._home and _ended(peer.pid)

    def _exit_if_stuck(self) -> None:
        """Leave a process whose main thread can't be woken (a kernel or a foreign library waits for the dead)."""
        if self._exit_after_s is None:
            return
        if self._stop.wait(self._exit_after_s) or self._raised:
            return
        sys.stderr.write(f"eprt: rank {self._rank} is stuck in a call and its world is lost; its stacks:\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.write(f"eprt: no call returned to raise this: {self._verdict}\n")  # last: where logs are read
        sys.stderr.flush()
        os._exit(EXIT_CODE)


def _home() -> str:
    """Where a process number means something: host and PID namespace. Containers may share the host's name."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.is_symlink() else ''}"


def _ended(pid: int) -> bool:
    """Whether a process of this host has ended (a zombie has)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # the second: it went between open and read
        return Path("/proc/self/stat").exists()
    except OSError:
        return False
    return state in "ZX"
