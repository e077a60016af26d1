"""What a rank holds against another: the record of what it last heard of it, a suspicion, and the verdict's words."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field


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
