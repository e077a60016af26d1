"""What it costs the ranks to agree: the exchange of a header through shared memory beside the same through gloo."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from eprt.bench.report import Report, percentile, slowest
from eprt.bench.timing import world_of
from eprt.ranks.process import RankContext

WORDS = 21  # of a header
_WARM_ROUNDS = 50


def measure_exchange(context: RankContext, rounds: int) -> dict[str, list[float]]:
    """This rank's microseconds, round after round without a pause: each exchange waits for all ranks by itself.
    Collective; a job for `WorldPool.run`.

    Returns:
        by name: `step` is a whole `World.step` without anything inside; `shared` the words alone, missing where ranks
        share no memory; `gloo` the same words through sockets.
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
    for _ in range(_WARM_ROUNDS + rounds):
        start = time.perf_counter()
        call()
        found.append((time.perf_counter() - start) * 1e6)
    return found[_WARM_ROUNDS:]


def exchange_report(by_rank: list[dict[str, list[float]]], rounds: int) -> Report:
    """One row for each way: over all rounds, the slowest rank's times."""
    rows: list[dict[str, Any]] = []
    for name in by_rank[0]:
        times = slowest([rank[name] for rank in by_rank])
        row = {"exchange": name, "ranks": len(by_rank), "words": WORDS, "rounds": rounds}
        rows.append(row | {f"p{p}_us": round(percentile(times, p), 1) for p in (50, 99)})
    return Report("exchange", rows)
