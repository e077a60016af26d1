"""Going on without lost ranks: who is left is agreed on in the control store, and what waits for the lost is freed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

from eprt.config import ParallelConfig
from eprt.errors import RankLost
from eprt.world.bounded import bounded
from eprt.world.members import record

T = TypeVar("T")
_LOOK_S = 1e-3


@dataclass(frozen=True)
class Survivors:
    """What `World.shrink` agreed on; the same on every rank that is left.

    Attributes:
        lost: all ranks that the World goes on without, of earlier losses, too.
        completed: [W] number of the last step that each rank left without an exception; -1: none, or a lost rank.
            Ranks may differ by one: a rank that had everything it needed of the step in flight has completed it.
        next_step: a number that no step has had yet, and which the next one has unless it is given another.
    """

    lost: tuple[int, ...]
    completed: tuple[int, ...]
    next_step: int


def whole_groups(lost: Iterable[int], parallel: ParallelConfig) -> set[int]:
    """`lost` and those that can't go on without them: ranks of one attention-TP group hold their tokens together."""
    size = parallel.attention_tp_size
    return {peer for rank in lost for peer in range(rank // size * size, rank // size * size + size)}


class Ballots:
    """One decision after another on who is lost: the first proposal of a number stands. Processes that can't hear each
    other can't both go on that way.

    Args:
        store: a part of the control store that only the ranks of the World know.
        silent_s: how long it may give no answer.
    """

    def __init__(self, store: dist.Store, silent_s: float) -> None:
        self._whole, self._silent_s = store, silent_s
        self._store: dist.Store | None = None
        self.number = 0

    def client(self) -> dist.Store:
        """The store, for one attempt to make groups. A rank that dies meanwhile leaves another's thread inside a call
        to the store, and no second call gets through a client that one is inside of.

        Raises:
            RankLost: the store is gone.
        """
        clone: Callable[[], dist.Store] = self._whole.clone  # pyright: ignore
        return self._ask(clone)

    def decide(self, lost: set[int]) -> set[int]:
        """What stands under the next number, or under the last one that was decided meanwhile.

        Raises:
            RankLost: the store is gone.
        """
        store = self._store = self._store or self.client()
        self.number += 1
        while self._ask(lambda: store.check([f"lost/{self.number + 1}"])):
            self.number += 1
        mine = json.dumps({"lost": sorted(lost)})
        raw = self._ask(lambda: bytes(store.compare_set(f"lost/{self.number}", "", mine)))
        match record(raw):
            case {"lost": [*ranks]} if all(type(rank) is int for rank in ranks):
                return set(ranks)
            case _:
                message = "the record of lost ranks in the control store was overwritten by a stranger"
                raise RankLost(f"{message}. Restart the job.", -1, "foreign")

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return bounded(call, self._silent_s)
        except (TimeoutError, RuntimeError, OSError) as error:
            message = "the control store is lost, too: without it no new groups can be made"
            raise RankLost(f"{message} ({type(error).__name__}). Restart the job.", -1, "store") from error


def free_device(
    device: torch.device, groups: list[dist.ProcessGroup], release: Callable[[], None], limit_s: float
) -> None:
    """This rank's GPU has nothing more to do for the step that was in flight.

    Args:
        groups: whose collectives are given up.
        release: lets kernels go on that wait in memory of ours; called again and again.

    Raises:
        RankLost: a kernel goes on waiting.
    """
    if device.type != "cuda":
        return
    for group in groups:
        with suppress(TimeoutError, RuntimeError):  # what it leaves running is waited for below
            bounded(lambda group=group: abort(group, device), limit_s)
    idle = torch.cuda.Event()
    idle.record()
    deadline = time.monotonic() + limit_s
    while not idle.query():
        release()
        if time.monotonic() > deadline:
            message = f"a kernel on this rank's GPU still waits for a lost rank after {limit_s:g} s and can't be freed"
            raise RankLost(f"{message} (flashinfer's and deepep's can't). Restart the job.", -1, "unknown")
        time.sleep(_LOOK_S)


def abort(group: dist.ProcessGroup, device: torch.device) -> None:
    """End the group's collectives, also those that a kernel waits in."""
    backend = group._get_backend(device)
    if callable(end := getattr(backend, "abort", None)):
        end()
