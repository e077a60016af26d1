"""Measures what a planned placement brings: one layer with its experts in order, and with planned replicas.

Both run on the same uneven choices, beside what the plan's model predicts of each. Every rank draws its own tokens'
experts. Both layers hold the same experts, so their outputs must agree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eprt.balance.planner import plan_placement
from eprt.bench.experts import random_experts
from eprt.bench.layer import graph_safe, shape_config
from eprt.bench.report import Report, p50_p99, percentile, slowest
from eprt.bench.routings import RoutedLayer
from eprt.bench.timing import samples, world_of
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.errors import EprtError, RankLost
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement, SlotTable
from eprt.placement.file import PlacementFile
from eprt.plan import DECODE_TOKENS, Plan
from eprt.plan.skew import Demand, layer_time
from eprt.ranks.process import RankContext
from eprt.support import Device
from eprt.tokens import TopK
from eprt.weights import ExpertWeights
from eprt.world import World

IN_ORDER, PLANNED = "in order", "planned"
TURNS, ROUNDS, REPEATS = 3, 20, 5
TOLERANCE = 1e-2  # of the two layers' outputs against each other: bf16 sums in another order


@dataclass(frozen=True)
class PlacedCase:
    """One layer under uneven routing.

    Attributes:
        shape, dispatcher, executor: as in `LayerCase`; both layers take the pair that is chosen for experts in order.
        tokens: on every rank. Up to 128 are decode: each expert's go to one of its replicas.
        routed: the experts that they choose; a batch of its own on each rank.
        routing: its name, for the report.
        slots: [S] the planned placement.
    """

    shape: str
    tokens: int
    routed: RoutedLayer
    routing: str
    slots: tuple[int, ...]
    dispatcher: str = "auto"
    executor: str = "auto"

    @property
    def config(self) -> MoEConfig:
        return shape_config(self.shape)

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(
            dispatcher=self.dispatcher,
            executor=self.executor,
            max_tokens_per_rank=self.tokens,
            phase="decode" if self.tokens <= DECODE_TOKENS else "prefill",
        )


@dataclass(frozen=True)
class PlacedTimes:
    """One rank's result, by placement.

    Attributes:
        samples: microseconds of a call.
        predicted: microseconds by the model, route aside; none where it knows nothing of this machine.
        imbalance: max / mean of the ranks' rows.
        graph: measured in CUDA graphs.
        error: of the two layers' outputs against each other.
    """

    samples: dict[str, list[float]] = field(default_factory=dict)
    predicted: dict[str, float] = field(default_factory=dict)
    imbalance: dict[str, float] = field(default_factory=dict)
    pair: str = ""
    graph: bool = False
    error: float = 0.0
    refused: str = ""


def planned_slots(
    config: MoEConfig, ranks: int, routed: RoutedLayer, replicas: int | None, file: PlacementFile | None
) -> tuple[int, ...]:
    """Returns the physical expert slots to be measured: a file's, or planned from the routing's own counts.

    Raises:
        ConfigError: a file made for other sizes.
    """
    parallel = ParallelConfig(ranks)
    if file is not None:
        return file.placement(routed.layer, config.num_experts, parallel).slots
    slots = -(-(config.num_experts + (replicas or 0)) // ranks) * ranks
    return plan_placement(routed.counts, parallel, slots).slots


def measure_placed(context: RankContext, case: PlacedCase) -> PlacedTimes:
    """Measures this rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    layers: dict[str, ExpertParallelMoE] = {}
    try:
        runtime = case.runtime
        for name, slots in ((IN_ORDER, ()), (PLANNED, case.slots)):
            layers[name] = _layer(world, case, runtime, ExpertPlacement(case.config.num_experts, world.parallel, slots))
            plan = layers[name].plan
            runtime = replace(runtime, dispatcher=plan.dispatcher, executor=plan.executor)
        world.warmup(*layers.values())
        return _measured(world, case, layers)
    except RankLost:
        raise
    except EprtError as error:
        return PlacedTimes(refused=str(error).splitlines()[0])
    finally:
        for layer in layers.values():
            layer.close()


def _layer(world: World, case: PlacedCase, runtime: RuntimeConfig, placement: ExpertPlacement) -> ExpertParallelMoE:
    """Makes a layer whose experts have the same weights, wherever they lie."""
    torch.manual_seed(11)
    everyone = random_experts(case.config, case.config.num_experts, world.device)
    held = torch.tensor(placement.shard(world.rank).experts, device=world.device)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        return whole.index_select(0, held).view(tensor.dtype)

    experts: ExpertWeights = everyone.map(own)
    del everyone
    return ExpertParallelMoE(case.config, world, experts, runtime=runtime, placement=placement)


def _measured(world: World, case: PlacedCase, layers: dict[str, ExpertParallelMoE]) -> PlacedTimes:
    config, T = case.config, case.tokens
    by_rank = [case.routed.draw(T, config.top_k, seed=rank) for rank in range(world.size)]
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(T, config.input_size, generator=generator).to(world.device, torch.bfloat16)
    weights = torch.rand(T, config.top_k, generator=generator).softmax(1).to(world.device)
    topk = TopK(by_rank[world.rank].to(world.device), weights)

    def call(layer: ExpertParallelMoE) -> torch.Tensor:
        return layer(x, topk, tokens_per_rank=T)

    plain, moved = (call(layer).clone() for layer in layers.values())
    error = relative_error(moved, plain)
    graph = all(graph_safe(layer) for layer in layers.values())
    found: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(TURNS):  # in turn, so that whatever else the machine does meets both
        for name, layer in layers.items():
            found[name] += samples(world, lambda: call(layer), graph=graph, rounds=ROUNDS, repeats=REPEATS)  # noqa: B023
    plan = layers[IN_ORDER].plan
    demands = {name: _demand(layer, by_rank) for name, layer in layers.items()}
    return PlacedTimes(
        found,
        _predicted(world, case, plan, demands),
        {name: demand.imbalance for name, demand in demands.items()},
        f"{plan.dispatcher} + {plan.executor}",
        graph,
        error,
    )


def _demand(layer: ExpertParallelMoE, by_rank: list[torch.Tensor]) -> Demand:
    placement, one_replica = layer.placement, layer.dispatcher.runtime.phase == "decode"
    cpu = torch.device("cpu")
    ids = [
        ids if placement.is_identity else SlotTable(placement, cpu, one_replica=one_replica, rank=rank).slots_of(ids)
        for rank, ids in enumerate(by_rank)
    ]
    return Demand.of_slots(torch.cat(ids), placement)


def _predicted(world: World, case: PlacedCase, plan: Plan, demands: dict[str, Demand]) -> dict[str, float]:
    device = Device.of(world.device)
    times = {n: layer_time(plan, case.config, world.parallel, device, d, plan.chosen) for n, d in demands.items()}
    return {name: time.us for name, time in times.items() if time is not None}


# ---- rows -----------------------------------------------------------------------------------------------------


def placed_rows(case: PlacedCase, by_rank: list[PlacedTimes]) -> list[dict[str, Any]]:
    """Returns a row for experts in order, then one for the planned placement with its gains, by the slowest rank."""
    rows: list[dict[str, Any]] = []
    first, config = by_rank[0], case.config
    p50 = {name: percentile(slowest([rank.samples[name] for rank in by_rank]), 50) for name in first.samples}
    for name in first.samples:
        predicted = first.predicted.get(name)
        rows.append(
            {
                "shape": case.shape,
                "ranks": len(by_rank),
                "tokens": case.tokens,
                "rows_per_expert": round(case.tokens * len(by_rank) * config.top_k / config.num_experts, 2),
                "phase": case.runtime.phase,
                "routing": case.routing,
                "placement": name,
                "slots": config.num_experts if name == IN_ORDER else len(case.slots),
                "pair": first.pair,
                "graph": first.graph,
                "imbalance": round(first.imbalance[name], 3),
                **p50_p99("layer", [rank.samples[name] for rank in by_rank]),
                "gain": round(p50[IN_ORDER] / p50[name], 3),
                "predicted_us": None if predicted is None else round(predicted, 1),
                "predicted_gain": None if predicted is None else round(first.predicted[IN_ORDER] / predicted, 3),
                "error": max(rank.error for rank in by_rank),
            }
        )
    return rows


def placed_report(
    cases: list[PlacedCase],
    run: Callable[[PlacedCase], list[PlacedTimes]],
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Measures the cases; `run` makes every rank call `measure_placed`. See `Report.fill`."""

    def label(case: PlacedCase, _: PlacedTimes) -> str:
        return f"{case.shape}, {case.tokens} tokens per rank"

    return Report("placement", []).fill(cases, run, placed_rows, label, keep)
