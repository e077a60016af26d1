"""Microseconds of a collective call on this rank, round by round; every round starts on all ranks together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from eprt.conformance.rank_process import RankContext
from eprt.world import World

T = TypeVar("T")

_WARM_REPLAYS = 20  # a GPU that was idle takes some milliseconds of work to reach its clocks
BEHIND_TIMEOUT_S = 2400.0  # warm-up may compile kernels; a rank that dies is noticed in seconds all the same


def world_of(context: RankContext) -> World:
    """The World that measurements share."""
    return context.world(timeout_s=BEHIND_TIMEOUT_S)


def samples(world: World, call: Callable[[], object], *, graph: bool, rounds: int, repeats: int) -> list[float]:
    """`rounds` samples of `call`.

    On CUDA device time between events, behind a small all-reduce that aligns the ranks on the device: with `graph`,
    replays of a CUDA graph of `repeats` calls, divided by them; else the eager call, the host's share included.
    On CPU wall time behind a barrier.
    """
    call()
    if world.device.type == "cpu":
        return [_wall(world, call) for _ in range(rounds)]
    torch.cuda.synchronize()
    world.barrier()
    if graph:
        with _replays(world, [call] * repeats) as replay:
            return [_device(world, replay) / repeats for _ in range(rounds)]
    return [_device(world, call) for _ in range(rounds)]


def first_samples(
    world: World, first: Callable[[], T], rest: Callable[[T], object], *, graph: bool, rounds: int, repeats: int
) -> list[float]:
    """`rounds` samples of `first` alone; `rest` follows each, given what it returned.

    As in `samples`, but with `graph` only the last `first` of `repeats` pairs, between events that the graph records:
    hosts launch their graphs some microseconds apart, which the first pair waits for.
    """

    def pair() -> None:
        rest(first())

    pair()
    if world.device.type == "cpu":
        return [_wall(world, first, rest) for _ in range(rounds)]
    torch.cuda.synchronize()
    world.barrier()
    start, end = (torch.cuda.Event(enable_timing=True, external=graph) for _ in range(2))

    def timed() -> None:
        start.record()
        found = first()
        end.record()
        rest(found)

    def sample(call: Callable[[], object]) -> float:
        _align(world)
        call()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    if graph:
        with _replays(world, [*[pair] * (repeats - 1), timed]) as replay:
            return [sample(replay) for _ in range(rounds)]
    return [sample(timed) for _ in range(rounds)]


@contextmanager
def _replays(world: World, calls: Sequence[Callable[[], object]]) -> Iterator[Callable[[], None]]:
    """The warmed replay of a CUDA graph of the calls; on leaving, all ranks are done with it."""
    gc.collect()  # what is freed by chance during the capture could end it
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for call in calls:
            call()
    for _ in range(_WARM_REPLAYS):
        captured.replay()
    yield captured.replay
    torch.cuda.synchronize()
    world.barrier()


def _wall(world: World, call: Callable[[], T], rest: Callable[[T], object] = lambda _: None) -> float:
    world.barrier()
    start = time.perf_counter()
    found = call()
    took = (time.perf_counter() - start) * 1e6
    rest(found)
    return took


def _align(world: World) -> None:
    if world.size > 1:
        dist.all_reduce(torch.zeros(1, device=world.device), group=world.group)


def _device(world: World, call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    _align(world)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3
