"""The two stopwatches of eprt: one for the device, one for the host. Both report microseconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from eprt.garbage import without_collections


def device_microseconds(*calls: Callable[[], object], repeats: int = 5, rounds: int = 3) -> float:
    """Returns the device time per call, of the fastest of `rounds` replays of one CUDA graph of `repeats` of each.

    Each call is first made eagerly, so compilation and module loading stay out. Calls that read different weights keep
    the L2 cache as cold as it is in a model.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with without_collections(), torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(rounds):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return best


@contextmanager
def host_stopwatch(found: list[float]) -> Iterator[None]:
    """Appends the wall time of the block to `found`. Work that the block leaves queued on a device isn't waited for."""
    start = time.perf_counter()
    yield
    found.append((time.perf_counter() - start) * 1e6)


def host_microseconds(call: Callable[[], object], calls: int = 20) -> float:
    """Returns the mean wall time per call over `calls` calls in a row: on CUDA, what the host needs to issue one."""
    synchronize = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    found: list[float] = []
    synchronize()
    with host_stopwatch(found):
        for _ in range(calls):
            call()
    synchronize()
    return found[0] / calls
