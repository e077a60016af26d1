"""The board that the guards of the ranks share: votes on who is lost, and notes by which torch's groups find their
peers. It holds what came over the guards' authenticated connections alone; the control store has no part in it."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_LOOK_S = 2e-3
_LIMIT_S = 300.0  # a last net: who makes a group waits no longer than the World's timeout
_MAX_NOTES = 100_000  # from all peers together


class Board(dist.Store):
    """One rank's copy of what the ranks told each other. A note, once told, is told to whoever connects later, too.

    Args:
        rank: this one.  ranks: all of the World; a vote that names another is refused.
        send_all: hands a message to all peers, from any thread.

    Attributes:
        votes: whom each peer goes on without, by rank, as it said last. A peer writes its own alone, here and below.
        mine: this rank's vote; None before its first.
    """

    def __init__(self, rank: int, ranks: Iterable[int], send_all: Callable[[object], None]) -> None:
        super().__init__()
        self._rank, self._ranks, self._send_all = rank, frozenset(ranks), send_all
        self._notes: dict[str, bytes] = {}
        self._own: dict[str, bytes] = {}
        self._leavers: dict[tuple[int, int], frozenset[int]] = {}
        self.votes: dict[int, frozenset[int]] = {}
        self.mine: frozenset[int] | None = None

    def vote(self, lost: Iterable[int]) -> None:
        """Tells all peers whom this rank goes on without."""
        self.mine = frozenset(lost)
        self._send_all(self._ballot())

    def name_leavers(self, lost: int, leaving: Iterable[int]) -> None:
        """Tells all peers who leaves on purpose while `lost` ranks are lost; this rank itself, where it leaves. The
        first word of each rank stands, of whichever thread: who said that it leaves can't put out others."""
        named = frozenset(leaving)
        if self._leavers.setdefault((lost, self._rank), named) is named:
            self._send_all({"leavers": [lost, sorted(named)]})

    def leavers(self, lost: int) -> dict[int, frozenset[int]]:
        """Returns who leaves on purpose while `lost` ranks are lost, by the rank that told it."""
        return {rank: named for (so_far, rank), named in list(self._leavers.items()) if so_far == lost}

    def said(self) -> list[object]:
        """Returns all messages of this rank's: what a peer that connects has to hear."""
        ballot = [] if self.mine is None else [self._ballot()]
        own = [(lost, sorted(named)) for (lost, rank), named in list(self._leavers.items()) if rank == self._rank]
        leavers = [{"leavers": [lost, named]} for lost, named in own]
        return [*ballot, *leavers, *(self._note(key, value) for key, value in list(self._own.items()))]

    def heard(self, rank: int, message: Any) -> bool:
        """Takes a peer's message in. Returns False for one that isn't for the board."""
        match message:
            case {"lost": [*ranks]} if self._are_ranks(ranks):
                self.votes[rank] = frozenset(ranks)
            case {"leavers": [int(lost), [*ranks]]} if 0 <= lost < len(self._ranks) and self._are_ranks(ranks):
                self._leavers.setdefault((lost, rank), frozenset(ranks))
            case {"note": [str(key), str(text)]} if len(self._notes) < _MAX_NOTES:
                try:
                    self._notes.setdefault(key, base64.b64decode(text, validate=True))
                except (binascii.Error, ValueError):
                    return False
            case _:
                return False
        return True

    def set(self, key: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._notes[key] = self._own[key] = raw
        self._send_all(self._note(key, raw))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._notes[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._notes for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises dist.DistStoreError where a note doesn't come in time."""
        limit_s = _LIMIT_S if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        while not self.check(keys):
            if time.monotonic() > deadline:
                raise dist.DistStoreError(f"no peer told {keys} within {limit_s:g} s")
            time.sleep(_LOOK_S)

    def keep(self, prefix: str) -> None:
        """Drops the notes of groups that are no more: all keys but those that begin so. Peers may be ahead."""
        for notes in (self._notes, self._own):
            for key in [key for key in list(notes) if not key.startswith(prefix)]:
                del notes[key]

    def _are_ranks(self, named: Iterable[object]) -> bool:
        return all(type(rank) is int and rank in self._ranks for rank in named)

    def _ballot(self) -> object:
        return {"lost": sorted(self.mine or ())}

    @staticmethod
    def _note(key: str, value: bytes) -> object:
        return {"note": [key, base64.b64encode(value).decode()]}
