"""Serves every kind of graph: rows that only fill a batch up, one recorded call, and a wait that notices the lost.

On CPUs there is nothing to capture: a recording is the call itself, so all but the capture is the same code there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch

from eprt.dispatch import DISPATCHERS, Dispatcher
from eprt.experts import EXECUTORS
from eprt.garbage import without_collections
from eprt.plan import Candidate, Plan
from eprt.routing import Router
from eprt.world import World


class GraphedLayer(Protocol):
    """Says what graphs need to know of an `ExpertParallelMoE`."""

    @property
    def plan(self) -> Plan: ...

    @property
    def dispatcher(self) -> Dispatcher: ...

    @property
    def router(self) -> Router | None: ...

    @property
    def broken(self) -> str: ...


def refusal(layer: GraphedLayer) -> str:
    """Returns why a call of the layer can't be captured in a CUDA graph, or nothing."""
    return refusal_of(layer.plan, layer.dispatcher.full_validation)


def refusal_of(pair: Plan | Candidate, full_validation: bool = False) -> str:
    """Returns the same of a layer that isn't built yet."""
    dispatcher, executor = pair.dispatcher, pair.executor
    refusals = [
        (not DISPATCHERS[dispatcher].graph_safe, f"dispatcher {dispatcher} reads sizes on the host in every call"),
        (not EXECUTORS[executor].graph_safe, f"executor {executor} isn't made for fixed shapes without a host sync"),
        (full_validation, 'validate="full" reads values on the host; use "cheap"'),
    ]
    return "; ".join(reason for failed, reason in refusals if failed)


class ValidRows:
    """The number of rows of a padded batch that hold tokens, where captured kernels read it; one for each World.

    Attributes:
        count: int32 [1] on the world's device.
    """

    def __init__(self, device: torch.device) -> None:
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self._written = 0

    def write(self, rows: int) -> None:
        """Writes the number in stream order; nothing is launched where it is there already."""
        if rows != self._written:
            self.count.fill_(rows)
            self._written = rows


class Padding:
    """The rows of a batch of at most `rows` that hold no token: layers inside `applied` leave them out."""

    def __init__(self, world: World, rows: int) -> None:
        self.valid = world.resource(("valid rows",), lambda: ValidRows(world.device))
        self._world = world
        with torch.inference_mode(False):
            self._numbers = torch.arange(rows, dtype=torch.int32, device=world.device)[:, None]

    @contextmanager
    def applied(self, rows: int) -> Iterator[None]:
        """Sets `World.padding` of a batch of `rows`, computed here: in a graph it follows the number of each replay."""
        world, before = self._world, self._world.padding
        world.padding = self._numbers[:rows] >= self.valid.count
        try:
            yield
        finally:
            world.padding = before


class Pool:
    """Memory of graphs that never run at once. Lives as long as the recordings made in it: torch gives a pool up with
    its last graph, and the handle must not be used again."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    @classmethod
    def of(cls, device: torch.device) -> Pool | None:
        """Returns a new one; None on CPUs."""
        return cls() if device.type == "cuda" else None

    @classmethod
    def shared(cls, world: World) -> Pool | None:
        """Returns that of all layers of a World."""
        found = _shared_pools.get(world)
        pool = found() if found is not None else None
        if pool is None and (pool := cls.of(world.device)) is not None:
            _shared_pools[world] = ref(pool)
        return pool


_shared_pools: WeakKeyDictionary[World, ref[Pool]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Recording:
    """A call that can be made again: `play()` returns its output, which a graph's next replay overwrites."""

    play: Callable[[], Any]
    pool: Pool | None = None

    @classmethod
    def of(cls, call: Callable[[], Any], pool: Pool | None, world: World) -> Recording:
        """Records a call.

        Args:
            call: reads and writes only what stays where it is. Was made before on CUDA, so that nothing compiles now.
            pool: None on CPUs.
            world: whose collectives the call may hold; with its `close` the recording ends.
        """
        if pool is None:
            return cls(call)
        graph = torch.cuda.CUDAGraph()
        world.graphs.add(graph)
        # Other threads (NCCL's watchdog) may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=pool.handle, capture_error_mode="thread_local"):
            output = call()

        def play() -> Any:
            graph.replay()
            return output

        return cls(play, pool)


class PeerWatch:
    """Asks the dispatchers of some layers what they know of the other ranks."""

    def __init__(self, world: World, layers: Iterable[GraphedLayer]) -> None:
        self._world = world
        self._all = [layer.dispatcher for layer in layers]
        self._generation = world.generation

    def check(self) -> None:
        """Raises RankLost, WorldMismatch: what is known without a device sync."""
        self._world.raise_if_lost()
        seen: set[int] = set()
        for dispatcher in self._all:  # those that share memory know the same
            if (memory := id(dispatcher._shared())) not in seen:
                seen.add(memory)
                dispatcher.check_peers()

    @property
    def closed(self) -> bool:
        return self._world.closed or any(dispatcher.closed for dispatcher in self._all)

    @property
    def changed(self) -> bool:
        """Returns whether ranks left or were lost since `capturing`, and the kernels captured there don't know."""
        return self._generation != self._world.generation

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Surrounds a capture whose owner asks for `changed` before each replay."""
        with without_collections():
            yield
        self._generation = self._world.generation

    def wait(self) -> None:
        """Waits until this rank's GPU has done what was launched on the current stream. Raises RankLost, WorldMismatch:
        as `Collectives.finish_device_work`, and what a kernel reported."""
        self._world.finish_device_work(check=self.check)
