"""Measures what an agreement of the ranks costs: a header through shared memory, and the same through gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from eprt.bench.report import Report, percentile, slowest
from eprt.bench.timing import world_of
from eprt.ranks.process import RankContext
from eprt.timing import host_stopwatch

WORDS = 21  # of a header
WARM_ROUNDS = 50


def measure_exchange(context: RankContext, rounds: int) -> dict[str, list[float]]:
    """Times this rank's exchanges, round after round without a pause: each waits for all ranks by itself.

    Collective; a job for `WorldPool.run`.

    Returns:
        Microseconds by name: `step` is a whole `World.step` without anything inside; `shared` the words alone, missing
        where ranks share no memory; `gloo` the same words through sockets.
    """
    world = world_of(context)
    words, row = list(range(WORDS)), torch.arange(WORDS)

    def step() -> None:
        with world.step(world.rank):
            pass

    calls: dict[str, Callable[[], object]] = {"step": step, "gloo": lambda: world.gather_control(row)}
    if world.shares_words:
        calls["shared"] = lambda: world.gather_words(words)
    return {name: _times(call, rounds) for name, call in sorted(calls.items())}


def _times(call: Callable[[], object], rounds: int) -> list[float]:
    found: list[float] = []
    for _ in range(WARM_ROUNDS + rounds):
        with host_stopwatch(found):
            call()
    return found[WARM_ROUNDS:]


def exchange_report(by_rank: list[dict[str, list[float]]], rounds: int) -> Report:
    """Returns one row for each way: over all rounds, the slowest rank's times."""
    rows: list[dict[str, Any]] = []
    for name in by_rank[0]:
        times = slowest([rank[name] for rank in by_rank])
        row = {"exchange": name, "ranks": len(by_rank), "words": WORDS, "rounds": rounds}
        rows.append(row | {f"p{p}_us": round(percentile(times, p), 1) for p in (50, 99)})
    return Report("exchange", rows)
