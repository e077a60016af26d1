"""Measures the rate at which this machine's ranks push bytes to each other: a transport's lower bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from eprt.bench.timing import samples, world_of
from eprt.errors import ConfigError
from eprt.ranks.process import RankContext
from eprt.world import World

Call = Callable[[], object]
BYTES = {"cuda": 1 << 27, "cpu": 1 << 22}  # to each peer
CTAS_PER_PEER = (8, 16, 32, 132)  # the fastest of them is the link's rate


def push_rate(context: RankContext) -> float:
    """Returns bytes per microsecond that this rank pushes while all do. Collective; a job for `WorldPool.run`.

    On CUDA stores of the SMs into symmetric memory, on CPU an all-to-all.

    Raises:
        ConfigError: a world of one.
    """
    world = world_of(context)
    if world.group is None:
        raise ConfigError("a world of one has nobody to push to: use 2 ranks or more")
    size, cuda = BYTES[world.device.type], world.device.type == "cuda"
    with _stores(world, world.group, size) if cuda else _all_to_all(world, size) as calls:
        # In a graph: else the host's launches would count as the link's time.
        best = min(min(samples(world, call, graph=cuda, rounds=10, repeats=4)) for call in calls)
    return size * (world.size - 1) / best


@contextmanager
def _stores(world: World, group: dist.ProcessGroup, size: int) -> Iterator[list[Call]]:
    """Yields pushes by SM stores. Its frame keeps the memory alive until all ranks have stopped pushing."""
    import torch.distributed._symmetric_memory as symmetric

    from eprt.bench.push_triton import push

    words = size // 8
    memory = symmetric.empty(words * world.size, dtype=torch.int64, device=world.device)
    handle: Any = symmetric.rendezvous(memory, group)
    source = torch.ones(words, dtype=torch.int64, device=world.device)
    others = [(world.rank + step) % world.size for step in range(1, world.size)]
    places = torch.tensor([handle.buffer_ptrs[peer] + world.rank * size for peer in others], device=world.device)

    def caller(ctas: int) -> Call:
        return lambda: push(source, places, ctas)

    yield [caller(ctas) for ctas in CTAS_PER_PEER]
    torch.cuda.synchronize()
    world.barrier()


@contextmanager
def _all_to_all(world: World, size: int) -> Iterator[list[Call]]:
    source = torch.ones(size * world.size, dtype=torch.uint8)
    target = torch.empty_like(source)
    splits = [size] * world.size
    yield [lambda: world.all_to_all(target, source, splits, splits)]
