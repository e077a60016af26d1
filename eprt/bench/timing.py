"""Microseconds of a collective call on this rank, round by round; every round starts on all ranks together."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn

from eprt.ranks.process import RankContext
from eprt.world import World

T = TypeVar("T")

_WARM_REPLAYS = 20  # a GPU that was idle takes some milliseconds of work to reach its clocks
_event_costs: WeakKeyDictionary[World, float] = WeakKeyDictionary()
BEHIND_TIMEOUT_S = 2400.0  # warm-up may compile kernels; a rank that dies is noticed in seconds all the same


def world_of(context: RankContext) -> World:
    """The World that measurements share."""
    return context.world(timeout_s=BEHIND_TIMEOUT_S)


def samples(world: World, call: Callable[[], object], *, graph: bool, rounds: int, repeats: int) -> list[float]:
    """`rounds` samples of `call`.

    On CUDA device time between events, behind a small all-reduce that aligns the ranks on the device: with `graph`, of
    `repeats` calls in one CUDA graph, divided by them; else of the eager call, the host's share included.
    On CPU wall time behind a barrier.
    """
    call()
    if world.device.type == "cpu":
        return [_wall(world, call) for _ in range(rounds)]
    calls = repeats if graph else 1

    def work(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        start.record()
        for _ in range(calls):
            call()
        end.record()

    return [time / calls for time in _device(world, work, graph, rounds)]


def first_samples(
    world: World, first: Callable[[], T], rest: Callable[[T], object], *, graph: bool, rounds: int, repeats: int
) -> list[float]:
    """`rounds` samples of `first` alone; `rest` follows each, given what it returned.

    As in `samples`, but with `graph` only the last `first` of `repeats` pairs, less what the events cost; the pairs
    before align the ranks better than the all-reduce does.
    """
    rest(first())
    if world.device.type == "cpu":
        return [_wall(world, first, rest) for _ in range(rounds)]

    def work(start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        for _ in range(repeats - 1 if graph else 0):
            rest(first())
        start.record()
        found = first()
        end.record()
        rest(found)

    cost = _cost_of_events(world) if graph else 0.0
    return [time - cost for time in _device(world, work, graph, rounds)]


def _cost_of_events(world: World) -> float:
    """Microseconds that two events of a graph add to what lies between them, from 1 and from 20 small kernels there;
    measured once."""
    if world in _event_costs:
        return _event_costs[world]
    number, many = torch.zeros(1, device=world.device), 20
    one, all_of_them = (
        median(samples(world, lambda: number.add_(1), graph=True, rounds=11, repeats=repeats)) * repeats
        for repeats in (1, many)
    )
    _event_costs[world] = one - (all_of_them - one) / (many - 1)
    return _event_costs[world]


def _device(
    world: World, work: Callable[[torch.cuda.Event, torch.cuda.Event], None], graph: bool, rounds: int
) -> list[float]:
    """Times between the two events that `work` records.

    A graph holds the all-reduce too: hosts launch their graphs tens of microseconds apart, which would count.
    """
    torch.cuda.synchronize()
    world.barrier()
    start, end = (torch.cuda.Event(enable_timing=True, external=graph) for _ in range(2))
    signal = torch.zeros(1, device=world.device)

    def aligned() -> None:
        if world.size > 1:
            dist.all_reduce(signal, group=world.group)
        work(start, end)

    def sample(call: Callable[[], None]) -> float:
        call()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1e3

    if graph:
        with _replays(world, aligned) as replay:
            return [sample(replay) for _ in range(rounds)]
    return [sample(aligned) for _ in range(rounds)]


@contextmanager
def _replays(world: World, call: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """The warmed replay of a CUDA graph of the call; on leaving, all ranks are done with it."""
    gc.collect()  # what is freed by chance during the capture could end it
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
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


@contextmanager
def clocked_calls(blocks: Sequence[nn.Module], spent: list[float]) -> Iterator[None]:
    """Microseconds of each call of a block, appended to `spent`."""
    started = [0.0]

    def before(*_: object) -> None:
        started[0] = time.perf_counter()

    def after(*_: object) -> None:
        spent.append((time.perf_counter() - started[0]) * 1e6)

    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def clocked_phases(layers: Sequence[Any]) -> Iterator[dict[str, list[float]]]:
    """The host's microseconds in each phase of `ExpertParallelMoE`s, in the order of their calls."""
    found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def clock(phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        found[phase].append((time.perf_counter() - start) * 1e6)

    before = [layer.observe for layer in layers]
    for layer in layers:
        layer.observe = clock
    try:
        yield found
    finally:
        for layer, observe in zip(layers, before, strict=True):
            layer.observe = observe
