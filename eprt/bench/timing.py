"""Times collective calls on this rank, round by round; every round starts on all ranks together.

Times are microseconds. The stopwatches are those of `eprt.timing`; what is added here aligns the ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, wraps
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from eprt.errors import EprtError, RankLost, UnsupportedError
from eprt.garbage import without_collections
from eprt.ranks.process import RankContext
from eprt.timing import host_stopwatch
from eprt.world import World

T = TypeVar("T")
P = ParamSpec("P")

WARM_ROUNDS = 3  # of a call, not counted
_WARM_REPLAYS = 20  # a GPU that was idle takes some milliseconds of work to reach its clocks
BEHIND_TIMEOUT_S = 2400.0  # warm-up may compile kernels; a rank that dies is noticed in seconds all the same


def world_of(context: RankContext) -> World:
    """Returns the World that all measurements of this process share."""
    return context.world(timeout_s=BEHIND_TIMEOUT_S)


def or_reason(job: Callable[P, T]) -> Callable[P, T | str]:
    """Lets a job return why it can't measure something: the first line of an EprtError, or all of what can't run, one
    for each pair. A lost rank still ends the run."""

    @wraps(job)
    def measured(*args: P.args, **kwargs: P.kwargs) -> T | str:
        try:
            return job(*args, **kwargs)
        except RankLost:
            raise
        except EprtError as error:
            return str(error) if isinstance(error, UnsupportedError) else str(error).splitlines()[0]

    return measured


def settle(world: World) -> None:
    """Waits for the device's work, where there is a device."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def samples(world: World, call: Callable[[], object], *, graph: bool, rounds: int, repeats: int) -> list[float]:
    """Returns `rounds` samples of `call`.

    On CUDA, device time between events, behind a small all-reduce that aligns the ranks on the device: with `graph`, of
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
    """Returns `rounds` samples of `first` alone; `rest` follows each, given its result.

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


@lru_cache(1)  # of a process's World: all measurements share one
def _cost_of_events(world: World) -> float:
    """Returns the microseconds that two events of a graph add, from 1 and from 20 small kernels between them."""
    number, many = torch.zeros(1, device=world.device), 20
    one, all_of_them = (
        median(samples(world, lambda: number.add_(1), graph=True, rounds=11, repeats=repeats)) * repeats
        for repeats in (1, many)
    )
    return one - (all_of_them - one) / (many - 1)


def _device(
    world: World, work: Callable[[torch.cuda.Event, torch.cuda.Event], None], graph: bool, rounds: int
) -> list[float]:
    """Returns the times between the two events that `work` records.

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

    with _replays(world, aligned) if graph else nullcontext(aligned) as call:
        return [sample(call) for _ in range(rounds)]


@contextmanager
def _replays(world: World, call: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Yields the warmed replay of a CUDA graph of the call; on leaving, all ranks are done with it."""
    captured = torch.cuda.CUDAGraph()
    with without_collections(), torch.cuda.graph(captured):
        call()
    for _ in range(_WARM_REPLAYS):
        captured.replay()
    yield captured.replay
    torch.cuda.synchronize()
    world.barrier()


def _wall(world: World, call: Callable[[], T], rest: Callable[[T], object] = lambda _: None) -> float:
    world.barrier()
    took: list[float] = []
    with host_stopwatch(took):
        found = call()
    rest(found)
    return took[0]


def alternating(world: World, calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Returns the host's microseconds of each call, one entry per round; the calls alternate, so that other load on the
    machine meets all of them."""
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(WARM_ROUNDS + rounds):
        for call, times in zip(calls, found, strict=True):
            settle(world)
            times.append(_wall(world, call))
    return [times[WARM_ROUNDS:] for times in found]


@contextmanager
def clocked_calls(blocks: Sequence[nn.Module], spent: list[float]) -> Iterator[None]:
    """Appends the host's microseconds of each call of a block to `spent`."""
    running: list[AbstractContextManager[None]] = []

    def before(*_: object) -> None:
        running.append(host_stopwatch(spent))
        running[-1].__enter__()

    def after(*_: object) -> None:
        running.pop().__exit__(None, None, None)

    hooks = [block.register_forward_pre_hook(before) for block in blocks]
    hooks += [block.register_forward_hook(after) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def clocked_phases(layers: Sequence[Any], *, with_device: bool = False) -> Iterator[dict[str, list[float]]]:
    """Yields microseconds in each phase of `ExpertParallelMoE`s, in the order of their calls.

    Of the host alone, or `with_device` until the phase's work is done; waiting for other ranks counts.
    """
    found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def clock(phase: str) -> Iterator[None]:
        if with_device:
            settle(layers[0].world)
        with host_stopwatch(found[phase]):
            yield
            if with_device:
                settle(layers[0].world)

    before = [layer.observe for layer in layers]
    for layer in layers:
        layer.observe = clock
    try:
        yield found
    finally:
        for layer, observe in zip(layers, before, strict=True):
            layer.observe = observe
