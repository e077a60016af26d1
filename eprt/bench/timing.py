"""Microseconds of a collective call on this rank, round by round; every round starts on all ranks together."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from eprt.conformance.rank_process import RankContext
from eprt.world import World

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
        gc.collect()  # what is freed by chance during the capture could end it
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for _ in range(repeats):
                call()
        for _ in range(_WARM_REPLAYS):
            captured.replay()
        found = [_device(world, captured.replay) / repeats for _ in range(rounds)]
        torch.cuda.synchronize()
        world.barrier()
        return found
    return [_device(world, call) for _ in range(rounds)]


def _wall(world: World, call: Callable[[], object]) -> float:
    world.barrier()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _device(world: World, call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if world.size > 1:
        dist.all_reduce(torch.zeros(1, device=world.device), group=world.group)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3
