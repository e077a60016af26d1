"""Where a layer's time goes, and what `ExpertParallelMoE` adds to the same steps written out by hand.

The peer of the same run calls the same router, then the unchecked halves of dispatcher and executor: no checks, no word
with the peers about the call. All ranks have the same number of tokens, routed uniformly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from eprt.bench.experts import SHAPES, random_experts
from eprt.bench.report import Report, percentile, slowest
from eprt.bench.timing import samples, world_of
from eprt.config import Activation, MoEConfig, Routing, RuntimeConfig, TokenFormat
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, EprtError, RankLost, UnsupportedError
from eprt.experts import EXECUTORS
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import make_plan
from eprt.ranks.process import RankContext
from eprt.routing import Router
from eprt.support import Device
from eprt.world import World

TINY = MoEConfig(8, 4, 128, 256, Activation(alpha=1.702, beta=1.0, limit=7.0), Routing("topk_softmax"), True, "mxfp4")
_WARM_ROUNDS = 3


def shape_config(shape: str) -> MoEConfig:
    """A layer's maths by the shape's name. Raises ConfigError for one that isn't known."""
    if shape == "tiny":
        return TINY
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape!r}: expected one of tiny, {', '.join(SHAPES)}")
    return replace(SHAPES[shape].config, routing=Routing("topk_softmax"))


@dataclass(frozen=True)
class LayerCase:
    """One layer: a shape by name, the rest as in RuntimeConfig; measured with each number of tokens on every rank."""

    shape: str
    tokens: tuple[int, ...]
    dispatcher: str = "auto"
    executor: str = "auto"
    token_format: TokenFormat | None = None
    low_precision_activations: bool = False
    rounds: int = 50

    @property
    def config(self) -> MoEConfig:
        return shape_config(self.shape)

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(
            dispatcher=self.dispatcher,
            executor=self.executor,
            token_format=self.token_format,
            low_precision_activations=self.low_precision_activations,
            max_tokens_per_rank=max(1, *self.tokens),
        )


@dataclass(frozen=True)
class LayerTimes:
    """One rank's microseconds at one number of tokens, one entry a round.

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


@dataclass(frozen=True)
class LayerFound:
    """One rank's result.

    Attributes:
        pair: "dispatcher + executor".
        times: one for each number of tokens; none if `refused` says why.
    """

    pair: str
    times: list[LayerTimes]
    refused: str = ""


def pairs_here(context: RankContext, case: LayerCase) -> tuple[list[LayerCase], list[str]]:
    """Every pair that works here as a case of its own, and a line for every other. A job for `WorldPool.run`."""
    world = world_of(context)
    try:
        plan = make_plan(case.config, world.parallel, case.runtime, Device.of(world.device))
    except UnsupportedError as error:
        return [], [str(error).splitlines()[0]]
    cases = [
        replace(case, dispatcher=c.dispatcher, executor=c.executor, token_format=c.token_format)
        for c in plan.candidates
        if c.support
    ]
    return cases, [f"{c.dispatcher} + {c.executor}: {c.support.reason}" for c in plan.candidates if not c.support]


def measure_layer(context: RankContext, case: LayerCase) -> LayerFound:
    """This rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    torch.manual_seed(world.rank)
    pair = f"{case.dispatcher} + {case.executor}"
    try:
        layer = _make_layer(world, case)
        pair = f"{layer.plan.dispatcher} + {layer.plan.executor}"
        try:
            world.warmup(layer)
            return LayerFound(pair, [_measured(layer, count, case.rounds) for count in case.tokens])
        finally:
            layer.close()
    except RankLost:
        raise
    except EprtError as error:
        return LayerFound(pair, [], str(error).splitlines()[0])


def _measured(layer: ExpertParallelMoE, tokens: int, rounds: int) -> LayerTimes:
    world = layer.world
    x = torch.randn(tokens, layer.config.input_size).to(world.device, torch.bfloat16)

    def whole() -> object:
        return layer(x, tokens_per_rank=max(tokens, 1))

    def bare() -> object:
        return _by_hand(layer, x)

    phases = _phases(layer, whole, rounds)
    ours, theirs = _in_turn(world, whole, bare, rounds)
    graphs: list[list[float]] = [[], []]
    if graph_safe(layer):
        graphs = [samples(world, call, graph=True, rounds=20, repeats=5) for call in (whole, bare)]
    return LayerTimes(phases, ours, theirs, graphs[0], graphs[1])


def _make_layer(world: World, case: LayerCase) -> ExpertParallelMoE:
    config = case.config
    local = ExpertPlacement(config.num_experts, world.parallel).num_local_experts
    weight = torch.randn(config.num_experts, config.input_size).to(torch.bfloat16)
    experts = random_experts(config, local, world.device)
    return ExpertParallelMoE(
        config, world, experts, runtime=case.runtime, router=Router(weight, config.routing, config.top_k)
    )


def _by_hand(layer: ExpertParallelMoE, x: torch.Tensor) -> torch.Tensor:
    """The layer's work without the layer. Its calls are the dispatcher's, too, so that both may alternate."""
    router, dispatcher, executor = layer.router, layer.dispatcher, layer.executor
    if router is None:
        raise ConfigError("the bench's layer has a router of its own: this one has none")
    topk, most = router(x), dispatcher.capacity.max_tokens_per_rank
    outputs: list[torch.Tensor] = []
    for start in range(0, max(x.shape[0], 1), most):  # in rounds, where the dispatcher carries no more at once
        some = x[start : start + most]
        sent = dispatcher.send(some, topk.narrow(start, most), max(some.shape[0], 1))
        y = dispatcher.output_buffer(sent.handle)
        y = torch.empty_like(sent.tokens.hidden.data) if y is None else y
        if y.numel():
            executor.run(sent.tokens, y)
        outputs.append(dispatcher.bring_back(y, sent.handle))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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


def graph_safe(layer: ExpertParallelMoE) -> bool:
    """Whether its calls can be captured here."""
    safe = DISPATCHERS[layer.plan.dispatcher].graph_safe and EXECUTORS[layer.plan.executor].graph_safe
    return safe and layer.world.device.type == "cuda"


# ---- rows -----------------------------------------------------------------------------------------------------


def layer_rows(case: LayerCase, by_rank: list[LayerFound]) -> list[dict[str, Any]]:
    """A row of the report for each number of tokens: over all rounds, the slowest rank's times."""
    return [
        _row(case, tokens, by_rank[0].pair, [rank.times[number] for rank in by_rank])
        for number, tokens in enumerate(case.tokens)
    ]


def _row(case: LayerCase, tokens: int, pair: str, by_rank: list[LayerTimes]) -> dict[str, Any]:
    def both(name: str, values: list[list[float]]) -> dict[str, float]:
        times = slowest(values)
        return {f"{name}_p50_us": round(percentile(times, 50), 1), f"{name}_p99_us": round(percentile(times, 99), 1)}

    rows_per_expert = tokens * len(by_rank) * case.config.top_k / case.config.num_experts
    activations = "fp8" if case.low_precision_activations else "bf16"
    row: dict[str, Any] = {"shape": case.shape, "ranks": len(by_rank), "activations": activations, "tokens": tokens}
    row |= {"rows_per_expert": round(rows_per_expert, 2), "pair": pair, "token_format": case.token_format or "auto"}
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
    run: Callable[[LayerCase], list[LayerFound]],
    keep: Callable[[Report], None] = lambda _: None,
    notes: Sequence[str] = (),
) -> Report:
    """Measure the cases; `run` makes every rank call `measure_layer`. A refusal becomes a note. `keep` sees what was
    found so far."""
    report = Report("layer", [], notes=list(notes))
    for case in cases:
        by_rank = run(case)
        if refused := next((rank.refused for rank in by_rank if rank.refused), ""):
            report.notes.append(f"{case.shape}, {by_rank[0].pair}: {refused}")
        else:
            report.rows.extend(layer_rows(case, by_rank))
        keep(report)
    return report
