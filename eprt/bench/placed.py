"""Measures what a planned placement brings: one layer with its experts in order, and with planned replicas.

Both run on the same uneven choices, beside what the plan's model predicts of each. Every rank draws its own tokens'
experts. Both layers hold the same experts, so their outputs must agree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from eprt.bench.experts import random_experts
from eprt.bench.layer import LayerCase, graph_safe
from eprt.bench.report import Row, p50_p99, percentile, slowest
from eprt.bench.routings import RoutedLayer, demand_of
from eprt.bench.timing import or_reason, samples, world_of
from eprt.config import RuntimeConfig
from eprt.conformance.oracle import layer_of, relative_error
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import DECODE_TOKENS
from eprt.plan.skew import layer_time
from eprt.ranks.process import RankContext
from eprt.rounding import round_up
from eprt.support import Device
from eprt.tokens import TopK
from eprt.world import World

IN_ORDER, PLANNED = "in order", "planned"
TURNS, ROUNDS, REPEATS = 3, 20, 5
TOLERANCE = 1e-2  # of the two layers' outputs against each other: bf16 sums in another order


@dataclass(frozen=True, kw_only=True)
class PlacedCase(LayerCase):
    """One layer under uneven routing; both layers take the pair that is chosen for experts in order.

    Attributes:
        tokens: one number, on every rank. Up to 128 are decode: each expert's go to one of its replicas.
        routed: the experts that they choose; a batch of its own on each rank.
        routing: its name, for the report.
        slots: [S] the planned placement.
    """

    routed: RoutedLayer
    routing: str
    slots: tuple[int, ...]

    @property
    def what(self) -> str:
        return f"{self.shape}, {self.tokens[0]} tokens per rank"

    @property
    def phase(self) -> Literal["decode", "prefill"]:
        return "decode" if max(self.tokens) <= DECODE_TOKENS else "prefill"


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

    samples: dict[str, list[float]]
    predicted: dict[str, float]
    imbalance: dict[str, float]
    pair: str
    graph: bool
    error: float


@or_reason
def measure_placed(context: RankContext, case: PlacedCase) -> PlacedTimes:
    """Measures this rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    layers: dict[str, ExpertParallelMoE] = {}
    try:
        runtime = replace(case.runtime, phase=case.phase)
        for name, slots in ((IN_ORDER, ()), (PLANNED, case.slots)):
            layers[name] = _layer(world, case, runtime, ExpertPlacement(case.config.num_experts, world.parallel, slots))
            plan = layers[name].plan
            runtime = replace(runtime, dispatcher=plan.dispatcher, executor=plan.executor)
        world.warmup(*layers.values())
        return _measured(world, case, layers)
    finally:
        for layer in layers.values():
            layer.close()


def _layer(world: World, case: PlacedCase, runtime: RuntimeConfig, placement: ExpertPlacement) -> ExpertParallelMoE:
    """Makes a layer whose experts have the same weights, wherever they lie."""
    torch.manual_seed(11)
    everyone = random_experts(case.config, case.config.num_experts, world.device)
    return layer_of(world, case.config, everyone, runtime, placement)


def _measured(world: World, case: PlacedCase, layers: dict[str, ExpertParallelMoE]) -> PlacedTimes:
    config, [T] = case.config, case.tokens
    by_rank = [case.routed.draw(T, config.top_k, seed=rank) for rank in range(world.size)]
    generator = torch.Generator().manual_seed(world.rank)
    x = torch.randn(T, config.input_size, generator=generator).to(world.device, torch.bfloat16)
    weights = torch.rand(T, config.top_k, generator=generator).softmax(1).to(world.device)
    topk = TopK(by_rank[world.rank].to(world.device), weights)
    calls = {name: partial(layer, x, topk, tokens_per_rank=T) for name, layer in layers.items()}
    plain, moved = (call().clone() for call in calls.values())
    graph = all(graph_safe(layer) for layer in layers.values())
    found: dict[str, list[float]] = {name: [] for name in layers}
    for _ in range(TURNS):  # in turn, so that whatever else the machine does meets both
        for name, call in calls.items():
            found[name] += samples(world, call, graph=graph, rounds=ROUNDS, repeats=REPEATS)
    plan, device = layers[IN_ORDER].plan, Device.of(world.device)
    demands = {name: demand_of(by_rank, layer.placement, case.phase == "decode") for name, layer in layers.items()}
    times = {n: layer_time(plan, config, world.parallel, device, d) for n, d in demands.items()}
    return PlacedTimes(
        found,
        {name: time.us for name, time in times.items() if time is not None},
        {name: demand.imbalance for name, demand in demands.items()},
        f"{plan.dispatcher} + {plan.executor}",
        graph,
        relative_error(moved, plain),
    )


# ---- rows -----------------------------------------------------------------------------------------------------


def placed_rows(case: PlacedCase, by_rank: list[PlacedTimes]) -> list[Row]:
    """Returns a row for experts in order, then one for the planned placement with its gains, by the slowest rank."""
    first, config, [T], rows = by_rank[0], case.config, case.tokens, list[Row]()
    p50 = {name: percentile(slowest([rank.samples[name] for rank in by_rank]), 50) for name in first.samples}
    common = case.row(len(by_rank), T)
    common |= {"phase": case.phase, "routing": case.routing, "pair": first.pair, "graph": first.graph}
    common["error"] = max(rank.error for rank in by_rank)
    for name, imbalance in first.imbalance.items():
        predicted = first.predicted.get(name)
        row = {
            "placement": name,
            "slots": round_up(config.num_experts, len(by_rank)) if name == IN_ORDER else len(case.slots),
            "imbalance": round(imbalance, 3),
            "gain": round(p50[IN_ORDER] / p50[name], 3),
            "predicted_us": None if predicted is None else round(predicted, 1),
            "predicted_gain": None if predicted is None else round(first.predicted[IN_ORDER] / predicted, 3),
        }
        rows.append(common | row | p50_p99("layer", [rank.samples[name] for rank in by_rank]))
    return rows
