"""Ranks find each other at a store that may still hold the keys of an attempt, or of a World, before."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass

import torch.distributed as dist

from eprt.errors import RankLost

_ASK_AGAIN_S = 0.01


@dataclass(frozen=True)
class Meeting:
    """What all ranks know once all are there.

    Attributes:
        name: no other meeting at any store has it.
        generation: how often the job was restarted: the most that any rank's launcher counts.
    """

    name: str
    generation: int


def restarts() -> int:
    """How often this rank's torchrun agent says that it started its ranks again; 0 without one."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def meet(store: dist.Store, rank: int, size: int, timeout_s: float) -> Meeting:
    """Wait until every rank of this attempt is here. Collective over the ranks of `store`.

    No number of torchrun's tells attempts apart: its agents share one store for all of them, and each counts restarts
    by itself, an agent whose ranks were well when another node's died not at all. So rank 0 asks under a new name; to
    that only the living answer, each with a name of its own, which rank 0 reads out.

    Raises:
        RankLost: naming the ranks that didn't come within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    own = f"{uuid.uuid4().hex} {restarts()}"
    present = _ask(store, own, size, deadline) if rank == 0 else _answer(store, own, rank, size, deadline)
    if isinstance(present, list):
        raise RankLost(
            f"ranks {present} of {size} didn't come within {timeout_s:g} s of start-up; look at their logs. "
            "Restart the job.",
            present[0],
            "silent",
        )
    return present


def _ask(store: dist.Store, own: str, size: int, deadline: float) -> Meeting | list[int]:
    """Rank 0's part: the meeting, or who is missing."""
    name = own.split()[0]
    store.set("asked", name)
    answers = [f"{name}/{peer}" for peer in range(1, size)]
    while not store.check(answers):
        if time.monotonic() > deadline:
            return _missing(store, name, range(1, size))
        time.sleep(_ASK_AGAIN_S)
    present = [own, *(store.get(answer).decode() for answer in answers)]
    store.set(f"{name}/present", "\n".join(present))
    return _meeting(name, present)


def _answer(store: dist.Store, own: str, rank: int, size: int, deadline: float) -> Meeting | list[int]:
    """The others' part. What was asked may be old; then rank 0's list has another's name in our place."""
    name, heard = "", False
    while time.monotonic() <= deadline:
        if store.check(["asked"]) and (asked := store.get("asked").decode()) != name:
            name = asked
            store.set(f"{name}/{rank}", own)
        heard = bool(name) and store.check([f"{name}/present"])
        if heard:
            present = store.get(f"{name}/present").decode().split("\n")
            if len(present) == size and present[rank] == own:
                return _meeting(name, present)
        time.sleep(_ASK_AGAIN_S)
    return [0] if heard or not name else _missing(store, name, range(1, size)) or [0]


def _missing(store: dist.Store, name: str, ranks: range) -> list[int]:
    return [peer for peer in ranks if not store.check([f"{name}/{peer}"])]


def _meeting(name: str, present: list[str]) -> Meeting:
    return Meeting(name, max(int(line.split()[1]) for line in present))
