"""Rendezvous at a store that still holds what earlier attempts and Worlds left there. Threads stand for ranks."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from eprt.errors import RankLost
from eprt.world import process
from eprt.world.rendezvous import Rendezvous, meet

SIZE = 3


def come(
    store: dist.Store, ranks: range | list[int], timeout_s: float = 20.0, late: int = -1
) -> list[Rendezvous | str]:
    """What each of these ranks got: a rendezvous, or the error's text."""

    def one(rank: int) -> Rendezvous | str:
        time.sleep(0.2 if rank == late else 0.0)
        try:
            return meet(store, "label", rank, range(SIZE), timeout_s, 10.0, "the store")
        except RankLost as lost:
            return f"{lost.rank} {lost.why}: {lost}"

    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(one, ranks))


@pytest.mark.parametrize("late", range(SIZE))
def test_every_rendezvous_has_a_name_of_its_own(late: int) -> None:
    store = dist.HashStore()
    names = set()
    for _ in range(3):
        found = come(store, range(SIZE), late=late)
        (name,) = {met.nonce for met in found}
        names.add(name)
    assert len(names) == 3


def test_an_attempt_that_died_on_the_way_leaves_nothing_that_misleads() -> None:
    """Rank 0 asked and ranks 0 and 1 were there; then all ended. Rank 0 is the last to come the second time."""
    store = dist.HashStore()
    assert all("ranks [2] of 3 didn't come within 0.3 s" in text for text in come(store, [0, 1], timeout_s=0.3))
    found = come(store, range(SIZE), late=0)
    assert len({met.nonce for met in found}) == 1


def test_the_generation_is_the_most_that_any_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [0, 2, 0]
    monkeypatch.setattr(process, "restarts", lambda: counts.pop() if counts else 0)
    assert [found.generation for found in come(dist.HashStore(), range(SIZE))] == [2] * SIZE


@pytest.mark.parametrize("before", [False, True])
def test_who_does_not_come_is_named(before: bool) -> None:
    for missing in range(SIZE):
        store = dist.HashStore()
        if before:  # an earlier World of the same ranks
            come(store, range(SIZE))
        rest = [rank for rank in range(SIZE) if rank != missing]
        for text in come(store, rest, timeout_s=0.3):
            assert text.startswith(f"{missing} silent: ranks [{missing}] of 3 didn't come")
