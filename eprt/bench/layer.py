"""Where a layer's time goes, and what `ExpertParallelMoE` adds to the same steps written out by hand.

The peer of the same run calls the same router, then the unchecked halves of dispatcher and executor: no checks, no word
with the peers about the call. All ranks have the same number of tokens, routed uniformly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from eprt.bench.experts import SHAPES, random_experts
from eprt.bench.report import Report, percentile, slowest
from eprt.bench.timing import samples, world_of
from eprt.config import Activation, MoEConfig, Routing, RuntimeConfig
from eprt.conformance.rank_process import RankContext
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError
from eprt.experts import EXECUTORS
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.routing import Router
from eprt.world import World

TINY = MoEConfig(8, 4, 128, 256, Activation(alpha=1.702, beta=1.0, limit=7.0), Routing("topk_softmax"), True, "mxfp4")
_WARM_ROUNDS = 3


@dataclass(frozen=True)
class LayerCase:
    """One measurement: a shape by name, T tokens on each rank, names as in RuntimeConfig."""

    shape: str
    tokens: int
    dispatcher: str = "auto"
    executor: str = "auto"
    rounds: int = 50

    @property
    def config(self) -> MoEConfig:
        if self.shape == "tiny":
            return TINY
        return replace(SHAPES[self.shape].config, routing=Routing("topk_softmax"))


@dataclass(frozen=True)
class LayerTimes:
    """One rank's microseconds, one entry a round.

    Attributes:
        phases: by name, device included.
        layer, by_hand: the whole call in host time: on CPU with its work, on CUDA what the host needs to issue it.
        layer_graph, by_hand_graph: in a CUDA graph; empty where there is none.
        pair: "dispatcher + executor".
    """

    phases: dict[str, list[float]]
    layer: list[float]
    by_hand: list[float]
    layer_graph: list[float]
    by_hand_graph: list[float]
    pair: str


def measure_layer(context: RankContext, case: LayerCase) -> LayerTimes:
    """This rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    torch.manual_seed(world.rank)
    layer = _make_layer(world, case)
    try:
        world.warmup(layer)
        x = torch.randn(case.tokens, case.config.input_size).to(world.device, torch.bfloat16)
        whole: Callable[[], object] = lambda: layer(x, tokens_per_rank=max(case.tokens, 1))  # noqa: E731
        bare: Callable[[], object] = lambda: _by_hand(layer, x)  # noqa: E731
        phases = _phases(layer, whole, case.rounds)
        ours, theirs = _in_turn(world, whole, bare, case.rounds)
        graphs: list[list[float]] = [[], []]
        if _graph_safe(layer):
            graphs = [samples(world, call, graph=True, rounds=20, repeats=5) for call in (whole, bare)]
        pair = f"{layer.plan.dispatcher} + {layer.plan.executor}"
        return LayerTimes(phases, ours, theirs, graphs[0], graphs[1], pair)
    finally:
        layer.close()


def _make_layer(world: World, case: LayerCase) -> ExpertParallelMoE:
    config = case.config
    local = ExpertPlacement(config.num_experts, world.parallel).num_local_experts
    weight = torch.randn(config.num_experts, config.input_size).to(torch.bfloat16)
    runtime = RuntimeConfig(dispatcher=case.dispatcher, executor=case.executor, max_tokens_per_rank=max(case.tokens, 1))
    experts = random_experts(config, local, world.device)
    return ExpertParallelMoE(
        config, world, experts, runtime=runtime, router=Router(weight, config.routing, config.top_k)
    )


def _by_hand(layer: ExpertParallelMoE, x: torch.Tensor) -> torch.Tensor:
    """The layer's work without the layer. Its calls are the dispatcher's, too, so that both may alternate."""
    router, dispatcher, executor = layer.router, layer.dispatcher, layer.executor
    if router is None:
        raise ConfigError("the bench's layer has a router of its own: this one has none")
    sent = dispatcher.send(x, router(x), max(x.shape[0], 1))
    y = dispatcher.output_buffer(sent.handle)
    y = torch.empty_like(sent.tokens.hidden.data) if y is None else y
    if y.numel():
        executor.run(sent.tokens, y)
    return dispatcher.bring_back(y, sent.handle)


def _phases(layer: ExpertParallelMoE, call: Callable[[], object], rounds: int) -> dict[str, list[float]]:
    """Each phase with its work on the device; waiting for other ranks counts."""
    found: dict[str, list[float]] = defaultdict(list)
    on_gpu = layer.world.device.type == "cuda"

    def now() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def clock(phase: str) -> Iterator[None]:
        start = now()
        yield
        found[phase].append((now() - start) * 1e6)

    before, layer.observe = layer.observe, clock
    try:
        for _ in range(_WARM_ROUNDS + rounds):
            layer.world.barrier()
            call()
    finally:
        layer.observe = before
    return {phase: times[_WARM_ROUNDS:] for phase, times in found.items()}


def _in_turn(
    world: World, ours: Callable[[], object], theirs: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Host time of the two, alternating, so that whatever else the machine does meets both."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_WARM_ROUNDS + rounds):
        for call, found in zip((ours, theirs), times, strict=True):
            if world.device.type == "cuda":
                torch.cuda.synchronize()
            world.barrier()
            start = time.perf_counter()
            call()
            found.append((time.perf_counter() - start) * 1e6)
    return times[0][_WARM_ROUNDS:], times[1][_WARM_ROUNDS:]


def _graph_safe(layer: ExpertParallelMoE) -> bool:
    safe = DISPATCHERS[layer.plan.dispatcher].graph_safe and EXECUTORS[layer.plan.executor].graph_safe
    return safe and layer.world.device.type == "cuda"


# ---- rows -----------------------------------------------------------------------------------------------------


def layer_row(case: LayerCase, by_rank: list[LayerTimes]) -> dict[str, Any]:
    """One row of the report: over all rounds, the slowest rank's times."""

    def both(name: str, values: list[list[float]]) -> dict[str, float]:
        times = slowest(values)
        return {f"{name}_p50_us": round(percentile(times, 50), 1), f"{name}_p99_us": round(percentile(times, 99), 1)}

    row: dict[str, Any] = {"shape": case.shape, "ranks": len(by_rank), "tokens": case.tokens, "pair": by_rank[0].pair}
    for phase in PHASES:
        row |= both(phase, [rank.phases[phase] for rank in by_rank])
    row |= both("layer", [rank.layer for rank in by_rank]) | both("by_hand", [rank.by_hand for rank in by_rank])
    row["overhead_us"] = round(row["layer_p50_us"] - row["by_hand_p50_us"], 1)
    if by_rank[0].layer_graph:
        row |= both("layer_graph", [rank.layer_graph for rank in by_rank])
        row |= both("by_hand_graph", [rank.by_hand_graph for rank in by_rank])
        row["graph_ratio"] = round(row["layer_graph_p50_us"] / row["by_hand_graph_p50_us"], 3)
    return row


def layer_report(
    cases: list[LayerCase],
    run: Callable[[LayerCase], list[LayerTimes]],
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measure the cases; `run` makes every rank call `measure_layer`. `keep` sees what was found so far."""
    report = Report("layer", [])
    for case in cases:
        report.rows.append(layer_row(case, run(case)))
        keep(report)
    return report
