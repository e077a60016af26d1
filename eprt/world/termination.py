"""How a rendezvous ends without a World: the record of it, for ranks that wait and ranks that come later, and a store
that is gone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch.distributed as dist

from eprt.errors import EprtError, RankLost, WorldMismatch, one_block
from eprt.world.process import boot_id, boot_time, bounded, number_of, record, started_at

T = TypeVar("T")

TERMINATION = "over"  # the key of the termination record
AGENT = "torchrun's agent"  # who serves a store, for messages


@dataclass(frozen=True)
class Termination:
    """The record that ends a rendezvous or a World. It is written to the store once; every rank that still waits reads
    it and raises the same error.

    Attributes:
        why: of a RankLost, or "mismatch".
        ranks: who is to blame.
        boot, at: the kernel it was written on, and when, in seconds of that kernel's clock.
    """

    why: str
    ranks: tuple[int, ...]
    message: str
    boot: str = field(default_factory=boot_id)
    at: float = field(default_factory=boot_time)

    @classmethod
    def parse(cls, raw: bytes) -> Termination | None:
        match record(raw):
            case {
                "why": str(why),
                "ranks": [*ranks],
                "message": str(message),
                "boot": str(boot),
                "at": float(at),
            } if all(type(rank) is int for rank in ranks):
                return cls(why, tuple(ranks), one_block(message), boot, at)
            case _:
                return None

    def of_this_attempt(self, host: str) -> bool:
        """Tells whether this process belongs to the attempt that ended so, before it came; else to a later one.

        Stores that ranks serve, or a host engine, end with their attempt. torchrun's agents keep theirs over restarts,
        if they may restart ranks at all, and end all ranks before they start any again. Clocks of two hosts don't tell
        which was first.
        """
        if host != AGENT or not number_of("TORCHELASTIC_MAX_RESTARTS"):
            return True
        return bool(self.boot) and self.boot == boot_id() and started_at() < self.at

    @property
    def error(self) -> EprtError:
        if self.why == "mismatch":
            return WorldMismatch(self.message)
        return RankLost(self.message, self.ranks[0] if self.ranks else -1, self.why, self.ranks)


def ask(call: Callable[[], T], silent_s: float, host: str) -> T:
    """Returns what a call to the store does. Raises RankLost where the store doesn't answer, or is gone."""
    try:
        return bounded(call, silent_s)
    except (TimeoutError, dist.DistNetworkError) as error:
        why, what = "exited", f"is gone while ranks met: {host} ended"
        if isinstance(error, TimeoutError):
            why, what = "silent", f"gave no answer for {silent_s:g} s: {host} is stopped or cut off"
        rank = 0 if host == "rank 0" else -1
        message = f"the control store {what}. Restart the job."
        raise RankLost(message, rank, "store" if rank < 0 else why) from error
