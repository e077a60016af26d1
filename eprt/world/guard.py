"""The guard finds the rank that died, hung or left, and every rank says so in the same words.

gloo names nobody and wakes nobody: a survivor sees "connection closed" with a port number, or sits out its whole
timeout. So each process of a World has one `Guard` thread that beats to every peer over connections of its own
(`eprt.world.links`), hears theirs, and agrees with them on one verdict that all raise. The control store has no part in
that: its host may be what is lost.

Faults and how they are found, measured from the moment they happen:
    exited  a process is gone: its connection closed, and on this host /proc says so too     one beat
    silent  no heartbeat (stopped, cut off, GIL held)                                        silent_after_s
    raised  the rank left its World through an exception                    1.3 s, once somebody waits for it
    left    the rank closed its World or exited                             1.3 s, once somebody waits for it
    behind  alive, but not in the operation others wait in                                   the World's timeout
    store   the control store is gone, or answers no more, and every rank is there           1.3 s; silent_after_s

A verdict is made by one rank, the lowest that nobody accuses, so that ranks that see different things at the same
moment still say the same. Whoever hears it passes it on. Ranks that go on without the lost ones (`World.shrink`) keep
their guards: what was said before counts no more then, so cases and verdicts carry how many ranks are lost for good.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

import torch.distributed as dist

from eprt.errors import RankLost, one_block
from eprt.world.links import GRACE_S, Links, LoopThread, StoreWatch
from eprt.world.process import bounded, leave_at_once, stopped
from eprt.world.rendezvous import Rendezvous
from eprt.world.verdicts import BEAT_S, PeerRecord, Suspicion, Verdicts, cut_off

logger = logging.getLogger("eprt")
T = TypeVar("T")

LINGER_S = 3.0
LAST_WORDS = "eprt: no call returned to raise this: "  # of a process that is ended, before the verdict
_WHY = ("silent", "exited", "raised", "left", "behind", "store", "foreign", "unknown")
_MAX_WORDS = 2000
_WENT_ON = "left: went on without this rank"
_last_words = threading.Lock()  # of a process with several Worlds the guard that is first says them, then all is over


class Guard(Verdicts):
    """Heartbeats and verdicts of one rank. `start` begins both; nothing waits for the peers to do the same.

    Args:
        met: the ranks that take part, and where they listen.
        silent_after_s: a peer without a heartbeat for this long is lost.
        exit_after_s: on GPU worlds the host may sit in a kernel that waits for a lost rank. This long after a verdict
            that no call has raised, the process writes a report to stderr and exits with code 75. None: never.
        store: watched, if it isn't None; one that no other thread uses (a clone).
    """

    def __init__(
        self, met: Rendezvous, silent_after_s: float, exit_after_s: float | None, store: dist.Store | None
    ) -> None:
        super().__init__(met, silent_after_s, exit_after_s)
        self._pid = os.getpid()
        self._ending = ""
        self._raised = False
        self._early: Any = None  # the verdict of ranks that are ahead
        self._links = Links(self.rank, self._members, met.key, self._greeting, self._heard, self._closed)
        self._thread = LoopThread("eprt-guard", self._begin)
        self._watch = StoreWatch(store, self._beat_s, silent_after_s)

    def start(self) -> None:
        self._thread.start()
        self._watch.start()

    def note(self, where: str | None = None) -> None:
        """Notes that this rank enters another operation. `where` names it; None is one more step of the last one."""
        self._progress = (self._progress[0] + 1, where or self._progress[1])

    @property
    def verdict_due(self) -> bool:
        """Returns whether a verdict is on its way: none stands yet, and a rank is suspected or ended without notice."""
        if self.verdict is not None or not self._thread.is_alive():
            return False
        went = (peer.closed or self._gone(rank) for rank, peer in self._peers.items() if not peer.ending)
        return bool(self._suspicions) or any(went)

    def acknowledge(self) -> None:
        """Notes that the main thread knows of the verdict, so that it isn't stuck in a call."""
        self._raised = self.verdict is not None

    @property
    def failing(self) -> bool:
        """Returns whether a verdict stands, or this rank is leaving through an exception."""
        return self.verdict is not None or self._ending.startswith("raised")

    @property
    def somebody_ended(self) -> bool:
        """Returns whether a peer has left its World, in order or not."""
        return any(peer.ending or peer.closed for peer in self._peers.values())

    @property
    def left_out(self) -> bool:
        """Returns whether peers told this rank that they go on without it."""
        return any(peer.ending == _WENT_ON for peer in self._peers.values())

    @property
    def stuck(self) -> bool:
        """Returns, after `close`, whether a thread is still inside a call that doesn't return."""
        return self._watch.is_alive()

    def bounded(self, call: Callable[[], T], limit_s: float) -> T:
        """Returns the result of `call()`, a construction that all ranks take part in. Raises RankLost rather than wait
        for a lost rank, or longer than `limit_s` for another."""
        try:
            return bounded(call, limit_s, lambda: self.raise_if_lost(self._peers))
        except TimeoutError:
            self.raise_behind(limit_s, self._peers)
            raise
        except RuntimeError as error:
            if not isinstance(error, RankLost):  # torch's words for a peer that went
                self.raise_broken(error)
            raise

    def raise_if_lost(self, waiting_for: Iterable[int] = ()) -> None:
        """Raises RankLost if there is a verdict, or if one of the ranks this one is `waiting_for` has ended."""
        if self.verdict is None:
            # What a peer sent before it ended may still be on its way: leave it a moment to complete our work.
            now = time.monotonic()
            for rank in waiting_for:
                peer = self._peers.get(rank)
                if peer is not None and peer.ending and now - peer.ended_at > GRACE_S:
                    why, _, detail = peer.ending.partition(":")
                    self._accuse(rank, why, f"{detail.strip() or 'closed its World'}; others still wait for it")
        if self.verdict is not None:
            self._raised = True
            raise RankLost(str(self.verdict), self.verdict.rank, self.verdict.why, self.verdict.ranks)

    def raise_behind(self, waited_s: float, waiting_for: Iterable[int]) -> None:
        """Names the rank that is furthest behind, after a wait of the whole timeout. Always raises RankLost."""
        rank = min((r for r in waiting_for if r in self._peers), key=lambda r: self._peers[r].ops)
        self._accuse(rank, "behind", f"alive but not in the operation the others wait in for {waited_s:.0f} s")
        self.raise_if_lost()

    def raise_broken(self, error: RuntimeError) -> None:
        """Waits for the verdict that explains a failed collective (a peer's socket closed). Always raises RankLost."""
        deadline = time.monotonic() + self._silent_after_s + 2 * self._beat_s
        while time.monotonic() < deadline and self.verdict is None:
            self.raise_if_lost(self._peers)
            time.sleep(BEAT_S / 5)
        self.raise_if_lost()
        raise RankLost(f"a collective failed and no rank could be blamed: {error}", -1, "unknown") from error

    def leave(self, ending: str) -> None:
        """Publishes that this rank ends: "left", or "raised: <what>". Idempotent; the first call stands. In a forked
        child it does nothing."""
        if not self._ending and os.getpid() == self._pid:
            self._ending = one_block(ending, _MAX_WORDS)
            self._thread.do(self._beat)
            self._tell_the_unconnected()

    def _tell_the_unconnected(self) -> None:
        """Waits, as this rank ends, for peers that are still connecting: they must hear why, too."""
        deadline = time.monotonic() + GRACE_S
        while self._thread.is_alive() and time.monotonic() < deadline and self.verdict is None:
            missing = [r for r, p in self._peers.items() if r not in self._links and not p.closed and not self._gone(r)]
            if not missing:
                self._thread.do(self._beat)
                return
            time.sleep(BEAT_S / 10)

    def close(self, linger_s: float = 0.0) -> None:
        """Stops the threads, and gives the connections to the peers and the store back.

        Args:
            linger_s: for the rank that hosts the store, which peers would miss: wait this long for them to end too.
        """
        self.leave("left")
        if os.getpid() != self._pid or self._stop.is_set():
            return
        if linger_s:
            self._linger(time.monotonic() + linger_s)
        self._stop.set()
        self._thread.do(self._links.close)
        self._thread.stop()
        self._watch.stop()
        del self.met  # its stores are connections

    def _linger(self, deadline: float) -> None:
        """Waits until every peer has ended, too. After a verdict they need no more than a moment."""
        started = time.monotonic()
        while time.monotonic() < (min(deadline, started + LINGER_S) if self.failing else deadline):
            if all(peer.ending or peer.closed or self._gone(rank) for rank, peer in self._peers.items()):
                return
            time.sleep(BEAT_S / 5)

    def absent(self) -> tuple[set[int], set[int]]:
        """Returns the peers that have ended or closed their World, for certain, and those that give no sign of life."""
        now = time.monotonic()
        ended = {rank for rank, peer in self._peers.items() if peer.ending or peer.closed or self._gone(rank)}
        return ended, {rank for rank, peer in self._peers.items() if now - peer.heard_at > self._silent_after_s} - ended

    def go_on(self, ranks: Iterable[int]) -> None:
        """Forgets the verdict and guards these ranks alone. The others are told that this rank left them."""
        self._thread.do(lambda: self._go_on(set(ranks)))

    def _go_on(self, ranks: set[int]) -> None:
        for rank in self._peers.keys() - ranks:
            self._links.send(rank, {"beat": [*self._progress, _WENT_ON]})
            self._links.drop(rank)
        self._lost += len(self._members.keys() - ranks)
        self._members = {rank: member for rank, member in self._members.items() if rank in ranks}
        self._peers = {rank: peer for rank, peer in self._peers.items() if rank in ranks}
        name = f"without {self._lost}/"
        self.board.keep(name)
        self.met = replace(self.met, members=self._members, store=dist.PrefixStore(name[:-1], self.board))
        self._suspicions, self._passed_over, self._agreed = [], set(), threading.Event()
        self.verdict, self._raised = None, False
        self._leave_if_named()
        if self._early is not None:
            self._heard(*self._early)

    def _begin(self) -> None:
        self._thread.loop.create_task(self._links.start(self.met.listener, self.met.addresses))
        self._tick(time.monotonic())

    def _tick(self, due: float) -> None:
        if self._stop.is_set():
            return
        now = time.monotonic()
        if (asleep := now - due) > self._beat_s:  # this process was stopped or starved: peers beat, nobody heard them
            for peer in self._peers.values():
                peer.heard_at = min(peer.heard_at + asleep, now)
            self._watch.put_off(asleep)
        self._beat()
        self._judge()
        self._judge_silence(now)  # not a later moment: this process may have been stopped since
        self._thread.loop.call_at(self._thread.loop.time() + self._beat_s, self._tick, now + self._beat_s)

    def _beat(self) -> None:
        self._links.send_all({"beat": [*self._progress, self._ending]}, must=bool(self._ending))

    def _judge(self) -> None:
        """Suspects the ranks whose processes are gone."""
        if self.verdict is not None or self._stop.is_set():
            return
        for rank, peer in self._expected().items():
            if self._gone(rank):
                self._propose(self._suspicion(rank, "exited", f"process {self._members[rank].pid} is gone"))
            elif peer.closed and not self._same_home(rank):
                self._propose(self._suspicion(rank, "exited", "its connections closed"))

    def _judge_silence(self, now: float) -> None:
        """Suspects the ranks that weren't heard, and the store if it didn't answer, for too long before `now`."""
        if self.verdict is not None or self._stop.is_set():
            return
        expected = self._expected()
        silent = [rank for rank, peer in expected.items() if now - peer.heard_at > self._silent_after_s]
        if silent:
            # Those that stopped with it are a beat behind at most.
            limit = self._silent_after_s - 2 * self._beat_s
            self._accuse_silent([rank for rank, peer in expected.items() if now - peer.heard_at > limit])
        if complaint := self._watch.complaint(now, self.somebody_ended):
            self._propose(Suspicion(-1, "store", complaint))

    def _expected(self) -> dict[int, PeerRecord]:
        return {rank: peer for rank, peer in self._peers.items() if not peer.ending}

    def _accuse_silent(self, silent: list[int]) -> None:
        halted = [rank for rank in silent if self._same_home(rank) and stopped(self._members[rank].pid)]
        side = sorted({self.rank, *self._expected()} - set(silent))
        near = any(map(self._same_home, silent))
        where = "" if any(map(self._met, silent)) else self._blocked(side[0], silent[0])
        if not halted and (found := cut_off(side, silent, near, where)) is not None:
            self._adopt(found[0], "silent", found[1])
            return
        for rank in halted or silent:
            never = "" if self._met(rank) else f", and never a connection{self._blocked(self.rank, rank)}"
            how = "its process is stopped" if rank in halted else f"stopped, cut off, or GIL held{never}"
            words = f"no heartbeat for {self._silent_after_s:g} s ({how})"
            self._propose(self._suspicion(rank, "silent", words))

    def _met(self, rank: int) -> bool:
        return rank in self._links or self._peers[rank].closed

    def _blocked(self, *pair: int) -> str:
        """Returns where the connection of two ranks should have been made: the higher one calls the lower."""
        called, caller = sorted(pair)
        host, port = self.met.addresses[called]
        where = f"rank {caller} can't connect to {host} port {port}, where rank {called} listens"
        return f"; {where}: is there a firewall? Or has one of them too few open files (`ulimit -n`)?"

    def _heard(self, rank: int, message: Any) -> None:
        """Handles a peer's message in the guard's thread. Peers proved who they are; what they say is still checked."""
        if rank not in self._peers:
            return
        peer = self._peers[rank]
        match message:
            case {"beat": [int(ops), str(where), str(ending)]}:
                peer.heard_at = time.monotonic()
                peer.ops, peer.where = ops, one_block(where, 200)
                if ending and not peer.ending:
                    peer.ending, peer.ended_at = one_block(ending, _MAX_WORDS), time.monotonic()
            case {"case": [int(lost), int(accused), str(why), str(detail)]} if why in _WHY:
                if lost == self._lost and self._are_ranks({accused} - {-1}):
                    self._propose(Suspicion(accused, why, one_block(detail, _MAX_WORDS)), own=False)
            case {"verdict": [int(lost), [*ranks], str(why), str(words)]} if why in _WHY:
                if lost == self._lost and self._are_ranks(ranks):
                    self._adopt(tuple(ranks), why, one_block(words, _MAX_WORDS))
                elif lost > self._lost:
                    self._early = rank, message
            case _:
                if self.board.heard(rank, message):
                    self._leave_if_named()
                elif not peer.warned:
                    logger.warning("rank %d sent what no guard understands: ignored", rank)
                    peer.warned = True

    def _leave_if_named(self) -> None:
        """Says that this rank leaves, if others name it: from then on it can't go on without them."""
        if any(self.rank in named for named in self.board.leavers(self._lost).values()):
            self.board.name_leavers(self._lost, [self.rank])

    def _closed(self, rank: int) -> None:
        if rank in self._peers:
            self._peers[rank].closed = True
            # A dying process closes its sockets before it counts as gone.
            self._thread.loop.call_later(BEAT_S / 5, self._judge)

    def _exit_if_stuck(self, verdict: RankLost) -> None:
        """Ends a process whose main thread can't be woken (a kernel or a foreign library waits for a lost rank)."""
        if self._stop.is_set() or self._raised or self.verdict is not verdict:
            return
        with _last_words:
            with suppress(AttributeError, OSError, ValueError):  # closed, or no file, as in a notebook
                sys.stderr.write(f"eprt: rank {self.rank} is stuck in a call and its world is lost; its stacks:\n")
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                sys.stderr.write(f"{LAST_WORDS}{self.verdict}\n")  # last: where logs are read
            leave_at_once(RankLost.exit_code)
