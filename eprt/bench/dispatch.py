"""Measures dispatch + combine of every transport beside its baselines and the lower bound of the link; and what an
agreement of the ranks costs.

A row is one transport at one size: microseconds of a round trip without experts, by the slowest rank of each round, and
of its dispatch alone. The lower bound: bytes that must cross between ranks (a token once to each rank that needs it,
and its sum back) over the rate at which this machine's ranks push bytes to each other, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from eprt.bench.baselines import baselines
from eprt.bench.report import Report, Row, p50_p99, percentile, slowest
from eprt.bench.timing import first_samples, or_reason, samples, world_of
from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import Batch, chosen_ids
from eprt.conformance.oracle import relative_error
from eprt.dispatch import DISPATCHERS, Dispatched, Dispatcher, dispatcher_spec, make_dispatcher
from eprt.errors import ConfigError, UnsupportedError
from eprt.ranks.process import RankContext
from eprt.rounding import round_up
from eprt.support import Device
from eprt.timing import host_stopwatch
from eprt.tokens import PAYLOADS, TopK
from eprt.world import World

NUM_EXPERTS = 128  # at least: as many as divide over the ranks
CHECK_TOLERANCE = 1e-2  # bf16 sums; packed tokens are packed on both sides
GRAPH_ROUNDS, GRAPH_REPEATS, EAGER_ROUNDS = 50, 20, 20
PUSHED_BYTES = {"cuda": 1 << 27, "cpu": 1 << 22}  # to each peer
CTAS_PER_PEER = (8, 16, 32, 132)  # the fastest of them is the link's rate
HEADER_WORDS, WARM_EXCHANGES = 21, 50


@dataclass(frozen=True)
class DispatchCase:
    """One measurement: a dispatcher's name or a baseline's, T tokens on every rank."""

    transport: str
    hidden: int
    top_k: int
    tokens: int
    routing: Literal["uniform", "hot_expert"] = "uniform"
    payload: Literal["bf16", "fp8_block"] = "bf16"

    def __str__(self) -> str:
        return f"{self.transport}, hidden {self.hidden}, {self.tokens} tokens per rank"

    @property
    def what(self) -> str:
        return f"{self.transport}, hidden {self.hidden}, top-{self.top_k}"

    def config(self, ranks: int) -> MoEConfig:
        """Returns the layer, of as many experts on each rank."""
        return MoEConfig(round_up(NUM_EXPERTS, ranks), self.top_k, self.hidden, intermediate_size=128)

    @property
    def runtime(self) -> RuntimeConfig:
        payload = None if self.payload == "bf16" else self.payload
        return RuntimeConfig(dispatcher=self.transport, max_tokens_per_rank=self.tokens, payload=payload)

    def bytes_there(self) -> int:
        """Returns the bytes of one token that dispatch sends: payload (with scales), ids and weights."""
        facts = PAYLOADS[self.payload]
        return facts.data_bytes(self.hidden) + facts.scale_bytes(self.hidden) + 8 * self.top_k

    def row_bytes(self) -> int:
        """Returns the bytes of one token there and of its sum back, which is bf16."""
        return self.bytes_there() + 2 * self.hidden


@dataclass(frozen=True)
class DispatchTimes:
    """One rank's result.

    Attributes:
        samples: microseconds a round.
        rows_to: tokens that this rank must send to each rank.
        error: against x * sum(weights), of one call before the measurement; None where the call doesn't return that.
        graph: measured in a CUDA graph.
        dispatch: microseconds of dispatch alone, a round: tokens encoded, sent and arrived. Empty for baselines.
    """

    samples: list[float]
    rows_to: list[int]
    error: float | None = None
    graph: bool = False
    dispatch: list[float] = field(default_factory=list)


def transports(device: str) -> list[str]:
    """Names the dispatchers that can run on that kind of device, and the baselines of the same run."""
    names = [name for name, spec in DISPATCHERS.items() if device in spec.devices]
    return names + [name for name, baseline in _baselines().items() if device in baseline.devices]


def _baselines() -> dict[str, Any]:
    found = baselines()
    return {} if found is None else found.TRANSPORTS


@or_reason
def measure_dispatch(context: RankContext, case: DispatchCase) -> DispatchTimes:
    """Measures this rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    generator = torch.Generator().manual_seed(97 * case.tokens + world.rank)
    hidden = torch.randn(case.tokens, case.hidden, generator=generator).to(torch.bfloat16)
    config = case.config(world.size)
    ids = chosen_ids(case.routing, case.tokens, world.size, config, generator)
    topk = TopK(ids, torch.rand(ids.shape, generator=generator).softmax(1))
    owner = ids // (config.num_experts // world.size)
    rows_to = [int((owner == rank).any(1).sum()) for rank in range(world.size)]
    measure = _measure_baseline if case.transport in _baselines() else _measure_dispatcher
    return measure(world, case, Batch(hidden, topk), rows_to)


def _measure_dispatcher(world: World, case: DispatchCase, batch: Batch, rows_to: list[int]) -> DispatchTimes:
    spec = dispatcher_spec(case.transport)
    config = case.config(world.size)
    if not (verdict := spec.supports(config, world.parallel, case.runtime, Device.of(world.device))):
        raise UnsupportedError(verdict.reason)
    dispatcher = make_dispatcher(case.transport, world, config, case.runtime)
    try:
        world.warmup(dispatcher)
        own = batch.to(world.device)
        error = _check(dispatcher, case, batch, own)
        graph = spec.graph_safe and world.device.type == "cuda"
        trip = _RoundTrip(dispatcher, own.hidden, own.topk)
        there = partial(first_samples, world, trip.dispatch, trip.combine)
        times, alone = (_sampled(graph, measure) for measure in (partial(samples, world, trip), there))
        return DispatchTimes(times, rows_to, error, graph, dispatch=alone)
    finally:
        dispatcher.close()


def _measure_baseline(world: World, case: DispatchCase, batch: Batch, rows_to: list[int]) -> DispatchTimes:
    baseline = _baselines()[case.transport]
    if case.payload != "bf16":
        raise UnsupportedError("measured with bf16 tokens only")
    own, config = batch.to(world.device), case.config(world.size)
    with baseline.make(world, config, own.hidden, own.topk) as call:
        returned, error = call(), None
        if baseline.sums and isinstance(returned, torch.Tensor):
            error = relative_error(returned, transport.weighted_sums(batch, torch.ones(config.num_experts), None))
        graph = world.device.type == "cuda"
        return DispatchTimes(_sampled(graph, partial(samples, world, call)), rows_to, error, graph)


def _sampled(graph: bool, measure: Callable[..., list[float]]) -> list[float]:
    return measure(graph=graph, rounds=GRAPH_ROUNDS if graph else EAGER_ROUNDS, repeats=GRAPH_REPEATS)


@dataclass(frozen=True)
class _RoundTrip:
    """A round trip: dispatch, then combine of what an executor would have left, in buffers that are made once."""

    dispatcher: Dispatcher
    hidden: torch.Tensor
    topk: TopK
    outputs: dict[torch.Size, torch.Tensor] = field(default_factory=dict)

    def __call__(self) -> torch.Tensor:
        return self.combine(self.dispatch())

    def dispatch(self) -> Dispatched:
        return self.dispatcher.dispatch(self.hidden, self.topk, self.hidden.shape[0])

    def combine(self, sent: Dispatched) -> torch.Tensor:
        output = self.dispatcher.output_buffer(sent.handle)
        if output is None:
            data = sent.tokens.hidden.data
            shape = torch.Size((*data.shape[:-1], self.hidden.shape[1]))
            if shape not in self.outputs:
                self.outputs[shape] = torch.zeros(shape, dtype=self.hidden.dtype, device=self.hidden.device)
            output = self.outputs[shape]
        return self.dispatcher.combine(output, sent.handle)


def _check(dispatcher: Dispatcher, case: DispatchCase, batch: Batch, own: Batch) -> float:
    """Returns error of one round trip through experts that return their input."""
    ones = torch.ones(dispatcher.config.num_experts)
    sent = dispatcher.dispatch(own.hidden, own.topk, case.tokens)
    output = transport.scale_experts(sent.tokens, dispatcher.shard, ones, torch.bfloat16)
    returned = dispatcher.combine(output, sent.handle)
    return relative_error(returned, transport.weighted_sums(batch, ones, case.runtime.payload))


def dispatch_rows(case: DispatchCase, by_rank: list[DispatchTimes], bytes_per_us: float) -> list[Row]:
    """Returns the one row of a case."""
    sent = [sum(rank.rows_to) - rank.rows_to[r] for r, rank in enumerate(by_rank)]
    received = [sum(rank.rows_to[r] for rank in by_rank) - by_rank[r].rows_to[r] for r in range(len(by_rank))]
    busiest = max(max(pair) for pair in zip(sent, received, strict=True))
    floor_us = busiest * case.row_bytes() / bytes_per_us
    times = slowest([rank.samples for rank in by_rank])
    p50 = percentile(times, 50)
    there = slowest([rank.dispatch for rank in by_rank])
    row = {
        **asdict(case),
        "ranks": len(by_rank),
        "p50_us": round(p50, 2),
        "p99_us": round(percentile(times, 99), 2),
        "graph": by_rank[0].graph,
        "remote_rows": sum(sent),
        "remote_bytes": sum(sent) * case.row_bytes(),
        "floor_us": round(floor_us, 2),
        "floor_share": round(floor_us / p50, 3),
        "dispatch_us": round(percentile(there, 50), 2) if there else None,
        "dispatch_floor_us": round(busiest * case.bytes_there() / bytes_per_us, 2),
        "error": max((rank.error for rank in by_rank if rank.error is not None), default=None),
    }
    return [row]


# ---- the link's rate ----------------------------------------------------------------------------------------------


def push_rate(context: RankContext) -> float:
    """Returns bytes per microsecond that this rank pushes while all do. Collective; a job for `WorldPool.run`.

    On CUDA stores of the SMs into symmetric memory, on CPU an all-to-all.

    Raises:
        ConfigError: a world of one.
    """
    world = world_of(context)
    if world.group is None:
        raise ConfigError("a world of one has nobody to push to: use 2 ranks or more")
    size, cuda = PUSHED_BYTES[world.device.type], world.device.type == "cuda"
    with _stores(world, world.group, size) if cuda else _all_to_all(world, size) as calls:
        # In a graph: else the host's launches would count as the link's time.
        best = min(min(samples(world, call, graph=cuda, rounds=10, repeats=4)) for call in calls)
    return size * (world.size - 1) / best


@contextmanager
def _stores(world: World, group: dist.ProcessGroup, size: int) -> Iterator[list[Callable[[], object]]]:
    """Yields pushes by SM stores. Its frame keeps the memory alive until all ranks have stopped pushing."""
    import torch.distributed._symmetric_memory as symmetric

    from eprt.bench.push_triton import push

    words = size // 8
    memory = symmetric.empty(words * world.size, dtype=torch.int64, device=world.device)
    handle: Any = symmetric.rendezvous(memory, group)
    source = torch.ones(words, dtype=torch.int64, device=world.device)
    others = [(world.rank + step) % world.size for step in range(1, world.size)]
    places = torch.tensor([handle.buffer_ptrs[peer] + world.rank * size for peer in others], device=world.device)

    yield [partial(push, source, places, ctas) for ctas in CTAS_PER_PEER]
    torch.cuda.synchronize()
    world.barrier()


@contextmanager
def _all_to_all(world: World, size: int) -> Iterator[list[Callable[[], object]]]:
    source = torch.ones(size * world.size, dtype=torch.uint8)
    target = torch.empty_like(source)
    splits = [size] * world.size
    yield [lambda: world.all_to_all(target, source, splits, splits)]


# ---- agreement ----------------------------------------------------------------------------------------------------


def measure_exchange(context: RankContext, rounds: int) -> dict[str, list[float]]:
    """Times this rank's exchanges, round after round without a pause: each waits for all ranks by itself.

    Collective; a job for `WorldPool.run`.

    Returns:
        Microseconds by name: `step` is a whole `World.step` without anything inside; `shared` the words alone, missing
        where ranks share no memory; `gloo` the same words through sockets.
    """
    world = world_of(context)
    words, row = list(range(HEADER_WORDS)), torch.arange(HEADER_WORDS)

    def step() -> None:
        with world.step(world.rank):
            pass

    calls: dict[str, Callable[[], object]] = {"step": step, "gloo": lambda: world.gather_control(row)}
    if world.shares_words:
        calls["shared"] = lambda: world.gather_words(words)
    found: dict[str, list[float]] = {name: [] for name in sorted(calls)}
    for name, times in found.items():
        for _ in range(WARM_EXCHANGES + rounds):
            with host_stopwatch(times):
                calls[name]()
    return {name: times[WARM_EXCHANGES:] for name, times in found.items()}


def exchange_report(by_rank: list[dict[str, list[float]]], rounds: int) -> Report:
    """Returns one row for each way: over all rounds, the slowest rank's times."""
    sizes = {"ranks": len(by_rank), "words": HEADER_WORDS, "rounds": rounds}
    names = by_rank[0]
    return Report("exchange", [{"exchange": n, **sizes, **p50_p99("", [r[n] for r in by_rank])} for n in names])
