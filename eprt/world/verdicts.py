"""How the ranks come to one verdict: what a rank holds against another is a suspicion, which the judge is told of, and
the first verdict stands."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from eprt.errors import RankLost
from eprt.world.board import Board
from eprt.world.links import Links, LoopThread
from eprt.world.process import ended
from eprt.world.rendezvous import Rendezvous

BEAT_S = 0.25
MAX_BEAT_S = 0.5
COLLECT_S = 0.15  # between the first accusation and the verdict: what broke at the same moment is named with it
ASK_NEXT_S = 1.0  # for an answer from the rank that should decide


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


def may_go_on(ranks: Iterable[int], voters: Iterable[int]) -> bool:
    """Returns whether these of the `voters` may go on as a World without the others: they are more than half, or half
    with the lowest of them. Two parts that can't hear each other can't both, as long as voters are all that may live.
    """
    mine, all_of_them = set(ranks), set(voters)
    twice = 2 * len(mine & all_of_them)
    return twice > len(all_of_them) or (twice == len(all_of_them) and min(all_of_them, default=-1) in mine)


def cut_off(side: list[int], silent: list[int], same_host: bool, where: str) -> tuple[tuple[int, ...], str] | None:
    """Returns who is lost, and the words, if it is this side of the network that is cut off; None if the others are.

    Args:
        side: this rank and those that it hears, ascending; silent: those that it doesn't.
        same_host: whether one of the silent ranks is on this host. Then no cable lies between two equal halves.
        where: an address that nobody reached, in words, or "".
    """
    if len(silent) > len(side):
        one = len(side) == 1
        who, they = (f"rank {side[0]}", "it is") if one else (f"ranks {side}", "they are")
        hears = f"it hears none of its {len(silent)} peers" if one else f"they hear none of ranks {silent}"
        return tuple(side), verdict_message([Suspicion(-1, "silent", f"{who} silent: {hears}: {they} cut off{where}")])
    if len(silent) == len(side) and not same_host:
        first, second = sorted([side, silent])
        words = f"the network is cut in two: ranks {first} and ranks {second} don't hear each other{where}"
        return (), f"{words}. Neither half can know that it is the one to go on: restart the job."
    return None


class Verdicts:
    """One rank's part in the verdicts of all. Suspicions and cases are of the guard's thread, but for `_accuse`.

    Its arguments are those of `Guard`.

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
        self.board = Board(self.rank, self._members, self._send_all)

    def _send_all(self, message: object) -> None:
        self._thread.do(lambda: self._links.send_all(message))

    def _are_ranks(self, named: Iterable[object]) -> bool:
        return all(isinstance(rank, int) and rank in self._members for rank in named)

    def _suspicion(self, rank: int, why: str, detail: str) -> Suspicion:
        seen = f"last heard of in {self._peers[rank].where}, missed by rank {self.rank} in {self._progress[1]}"
        return Suspicion(rank, why, f"{detail}; {seen}")

    def _accuse(self, rank: int, why: str, detail: str) -> None:
        """Suspects a rank from the main thread, and returns when there is a verdict."""
        suspicion = self._suspicion(rank, why, detail)
        self._thread.do(lambda: self._propose(suspicion))
        if not self._agreed.wait(COLLECT_S + len(self._members) * ASK_NEXT_S if self._thread.is_alive() else 0.0):
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

    def _gone(self, rank: int) -> bool:
        return self._same_home(rank) and ended(self._members[rank].pid)

    def _same_home(self, rank: int) -> bool:
        return self._members[rank].home == self._members[self.rank].home

    def _exit_if_stuck(self, verdict: RankLost) -> None:
        raise NotImplementedError
