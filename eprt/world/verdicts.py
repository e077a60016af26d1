"""How the ranks come to one verdict: who suspects a rank tells the judge, and the first verdict stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable

from eprt.errors import RankLost
from eprt.world.board import Board
from eprt.world.links import Links, LoopThread
from eprt.world.process import ended
from eprt.world.rendezvous import Rendezvous
from eprt.world.suspicion import PeerRecord, Suspicion, verdict_message

BEAT_S = 0.25
MAX_BEAT_S = 0.5
COLLECT_S = 0.15  # between the first accusation and the verdict: what broke at the same moment is named with it
ASK_NEXT_S = 1.0  # for an answer from the rank that should decide


class Verdicts:
    """One rank's part in the verdicts of all. Suspicions and cases are of the guard's thread, but for `_accuse`.

    Args:
        met: the ranks that take part, and where they listen.
        silent_after_s: a peer without a heartbeat for this long is lost.
        exit_after_s: see `Guard`.

    Attributes:
        verdict: what the ranks agreed on, if anything.
        board: what the ranks tell each other when they go on without lost ones.
    """

    _links: Links
    _thread: LoopThread

    def __init__(self, met: Rendezvous, silent_after_s: float, exit_after_s: float | None) -> None:
        self.met = met
        self.rank, self._members = met.rank, met.members
        self._silent_after_s = silent_after_s
        self._exit_after_s = exit_after_s
        self._beat_s = min(max(BEAT_S, silent_after_s / 20), MAX_BEAT_S)
        self._peers = {peer: PeerRecord() for peer in self._members if peer != self.rank}
        self._progress = (0, "start-up")
        self.verdict: RankLost | None = None
        self._agreed = threading.Event()
        self._suspicions: list[Suspicion] = []
        self._passed_over: set[int] = set()  # ranks that were asked for a verdict and gave none
        self._stop = threading.Event()
        self._lost = 0  # for good: what is said with another number is of another time
        self.board = Board(self._members, self._send)

    def _are_ranks(self, named: Iterable[object]) -> bool:
        return all(isinstance(rank, int) and rank in self._members for rank in named)

    def _suspicion(self, rank: int, why: str, detail: str) -> Suspicion:
        seen = f"last heard of in {self._peers[rank].where}, missed by rank {self.rank} in {self._progress[1]}"
        return Suspicion(rank, why, f"{detail}; {seen}")

    def _accuse(self, rank: int, why: str, detail: str) -> None:
        """Suspects a rank from the main thread, and returns when there is a verdict."""
        suspicion = self._suspicion(rank, why, detail)
        self._thread.do(lambda: self._propose(suspicion))
        if not self._agreed.wait(COLLECT_S + len(self._members) * ASK_NEXT_S if self._thread.alive else 0.0):
            self._adopt((rank,), why, verdict_message([suspicion]))

    def _propose(self, suspicion: Suspicion, own: bool = True) -> None:
        """Adds a suspicion in the guard's thread. A rank is suspected once."""
        if self.verdict is not None:
            if not own:
                self._pass_on()
            return
        if any(known.rank == suspicion.rank for known in self._suspicions):
            return
        self._suspicions.append(suspicion)
        if own:
            self._tell(suspicion)
        if len(self._suspicions) == 1:
            self._thread.loop.call_later(COLLECT_S, self._decide)

    def _judges(self) -> list[int]:
        """Returns who may decide, in order: ranks that can be reached and that nobody suspects."""
        doubted = {suspicion.rank for suspicion in self._suspicions} | self._passed_over
        recent = time.monotonic() - self._silent_after_s / 2 - self._beat_s
        doubted |= {rank for rank, peer in self._peers.items() if peer.ending or peer.heard_at < recent}
        return sorted({*(rank for rank in self._peers if rank in self._links and rank not in doubted), self.rank})

    def _tell(self, suspicion: Suspicion) -> None:
        judge = self._judges()[0]
        if judge != self.rank:
            self._links.send(judge, {"case": [self._lost, suspicion.rank, suspicion.why, suspicion.detail]})

    def _decide(self) -> None:
        """Makes the verdict if this rank is the one to decide; else asks that rank, and waits."""
        if self.verdict is not None or self._stop.is_set():
            return
        judge = self._judges()[0]
        if judge != self.rank:
            self._tell(self._suspicions[0])
            self._passed_over.add(judge)
            self._thread.loop.call_later(ASK_NEXT_S, self._decide)
            return
        first = self._suspicions[0]
        together = ("exited", "silent")
        named = [
            suspicion
            for suspicion in self._suspicions
            if suspicion is first or (suspicion.why in together and first.why in together)
        ]
        named.sort(key=lambda suspicion: suspicion.rank)
        self._adopt(
            tuple(suspicion.rank for suspicion in named if suspicion.rank >= 0), first.why, verdict_message(named)
        )

    def _adopt(self, ranks: tuple[int, ...], why: str, words: str) -> None:
        """Adopts a verdict; the first one stands. Called from the guard's thread, or another once that has ended."""
        if self.verdict is not None:
            return
        self.verdict = RankLost(words, ranks[0] if ranks else -1, why, ranks)
        self._agreed.set()
        self._pass_on()
        if self._exit_after_s is not None and self._thread.here:
            self._thread.loop.call_later(self._exit_after_s, self._exit_if_stuck, self.verdict)

    def _pass_on(self) -> None:
        if self._thread.here:
            for message in self._said():
                self._links.send_all(message)

    def _said(self) -> list[object]:
        found = self.verdict
        return [] if found is None else [{"verdict": [self._lost, list(found.ranks), found.why, str(found)]}]

    def _greeting(self) -> list[object]:
        """Returns what a peer that connects late has to hear."""
        return [*self._said(), *self.board.said()]

    def _send(self, message: object) -> None:
        """Sends from any thread."""
        self._links.send_all(message) if self._thread.here else self._thread.do(lambda: self._links.send_all(message))

    def _gone(self, rank: int) -> bool:
        return self._same_home(rank) and ended(self._members[rank].pid)

    def _same_home(self, rank: int) -> bool:
        return self._members[rank].home == self._members[self.rank].home

    def _exit_if_stuck(self, verdict: RankLost) -> None:
        raise NotImplementedError
