"""Measures where a layer's time goes, and what `ExpertParallelMoE` adds to the same steps called directly.

The direct calls are the router, then the unchecked halves of dispatcher and executor: no checks, no agreement with
other ranks about the call. All ranks have the same number of tokens, routed uniformly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eprt.bench.experts import random_experts, random_linear, random_router
from eprt.bench.report import Row, p50_p99
from eprt.bench.shapes import shape_of
from eprt.bench.timing import WARM_ROUNDS, alternating, clocked_phases, or_reason, samples, world_of
from eprt.config import Activation, MoEConfig, Routing, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.graphs.recording import refusal
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import make_plan
from eprt.ranks.process import RankContext
from eprt.support import Device
from eprt.weights import SharedExpertWeights
from eprt.world import World

TINY = MoEConfig(8, 4, 128, 256, Activation(alpha=1.702, beta=1.0, limit=7.0), Routing("topk_softmax"), True, "mxfp4")
ROUNDS = 50


def shape_config(shape: str) -> MoEConfig:
    """Returns a layer's maths by the shape's name. Raises ConfigError for one that isn't known."""
    if shape == "tiny":
        return TINY
    return replace(shape_of(shape).config, routing=Routing("topk_softmax"))


@dataclass(frozen=True)
class LayerCase:
    """One layer: a shape by name, measured with each number of tokens on every rank, for which it gets its capacity."""

    shape: str
    tokens: tuple[int, ...]
    asked: RuntimeConfig

    def __str__(self) -> str:
        return f"{self.shape}, tokens per rank {self.tokens}, {self.asked.dispatcher} + {self.asked.executor}"

    @property
    def what(self) -> str:
        return f"{self.shape}, {self.asked.dispatcher} + {self.asked.executor}"

    @property
    def config(self) -> MoEConfig:
        return shape_config(self.shape)

    @property
    def runtime(self) -> RuntimeConfig:
        return replace(self.asked, max_tokens_per_rank=max(1, *self.tokens))

    def row(self, ranks: int, tokens: int) -> Row:
        """Returns the columns that say what was measured; `rows_per_expert` is a mean over all ranks' tokens."""
        config, activations = self.config, "fp8" if self.asked.low_precision_activations else "bf16"
        row = {"shape": self.shape, "ranks": ranks, "activations": activations, "tokens": tokens}
        return row | {"rows_per_expert": round(ranks * tokens * config.top_k / config.num_experts, 2)}


@dataclass(frozen=True)
class LayerFound:
    """One rank's result for a case.

    Attributes:
        pair: "dispatcher + executor".
        times: for each number of tokens, microseconds by name, one entry per round: of each phase, device included;
            `layer` and `by_hand`, the host's time of the layer's call and of the same steps called directly (on CPU
            with its work, on CUDA what the host needs to issue it); `layer_graph` and `by_hand_graph` where they can be
            captured.
    """

    pair: str
    times: list[dict[str, list[float]]]


def pairs_here(context: RankContext, case: LayerCase) -> tuple[list[LayerCase], list[str]]:
    """Returns each pair that works here as a case of its own, and a line for every other. A job for `WorldPool.run`."""
    world = world_of(context)
    try:
        plan = make_plan(case.config, world.parallel, case.runtime, Device.of(world.device))
    except UnsupportedError as error:
        return [], [str(error)]
    pairs = [(c.dispatcher, c.executor, c.token_format) for c in plan.candidates if c.support]
    named = [replace(case.asked, dispatcher=d, executor=e, token_format=f) for d, e, f in pairs]
    notes = [f"{c.dispatcher} + {c.executor}: {c.support.reason}" for c in plan.candidates if not c.support]
    return [replace(case, asked=asked) for asked in named], notes


@or_reason
def measure_layer(context: RankContext, case: LayerCase) -> LayerFound | str:
    """Measures this rank's share of one case. Collective; a job for `WorldPool.run`."""
    world = world_of(context)
    torch.manual_seed(world.rank)
    layer = random_layer(case.config, world, case.runtime)
    try:
        found = _times_of(layer, case)
    finally:
        layer.close()
    chosen = _pair(layer)
    return f"{chosen}: {found}" if isinstance(found, str) and chosen not in case.what else found


@or_reason
def _times_of(layer: ExpertParallelMoE, case: LayerCase) -> LayerFound:
    layer.world.warmup(layer)
    return LayerFound(_pair(layer), [_measured(layer, count) for count in case.tokens])


def _pair(layer: ExpertParallelMoE) -> str:
    return f"{layer.plan.dispatcher} + {layer.plan.executor}"


def _measured(layer: ExpertParallelMoE, tokens: int) -> dict[str, list[float]]:
    world = layer.world
    x = torch.randn(tokens, layer.config.input_size).to(world.device, torch.bfloat16)

    calls = partial(layer, x, tokens_per_rank=max(tokens, 1)), partial(_called_directly, layer, x)
    with clocked_phases([layer], with_device=True) as phases:
        for _ in range(WARM_ROUNDS + ROUNDS):
            world.barrier()
            calls[0]()
    found = {phase: times[WARM_ROUNDS:] for phase, times in phases.items()}
    found["layer"], found["by_hand"] = alternating(world, calls, ROUNDS)
    if graph_safe(layer):
        for name, call in zip(("layer_graph", "by_hand_graph"), calls, strict=True):
            found[name] = samples(world, call, graph=True, rounds=20, repeats=5)
    return found


def random_layer(config: MoEConfig, world: World, runtime: RuntimeConfig, number: int = 0) -> ExpertParallelMoE:
    """Builds a layer of random weights, made where they are used; router and shared expert are bf16."""
    local, device = ExpertPlacement(config.num_experts, world.parallel).num_local_experts, world.device
    experts, router = random_experts(config, local, device), random_router(config, device)
    shared = None
    if config.shared is not None:
        H, I = config.input_size, config.shared.intermediate_size
        shared = SharedExpertWeights(
            random_linear(device, I, H),
            random_linear(device, H, I),
            random_linear(device, I, H) if config.shared.activation.gated else None,
            random_linear(device, 1, H) if config.shared.gate else None,
        )
    return ExpertParallelMoE(config, world, experts, runtime=runtime, router=router, shared=shared, layer=number)


def _called_directly(layer: ExpertParallelMoE, x: torch.Tensor) -> torch.Tensor:
    """Does the layer's work without the layer, through the same dispatcher, so that both may alternate."""
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


def graph_safe(layer: ExpertParallelMoE) -> bool:
    """Says whether the layer's calls can be captured here."""
    return layer.world.device.type == "cuda" and not refusal(layer)


# ---- rows -----------------------------------------------------------------------------------------------------


def layer_rows(case: LayerCase, by_rank: list[LayerFound]) -> list[Row]:
    """Returns a row for each number of tokens: over all rounds, the slowest rank's times."""
    times = zip(*(rank.times for rank in by_rank), strict=True)
    return [_row(case, T, by_rank[0].pair, found) for T, found in zip(case.tokens, times, strict=True)]


def _row(case: LayerCase, tokens: int, pair: str, by_rank: Sequence[dict[str, list[float]]]) -> Row:
    row: Row = case.row(len(by_rank), tokens) | {"pair": pair, "token_format": case.asked.token_format or "auto"}
    for name in by_rank[0]:
        row |= p50_p99(name, [rank[name] for rank in by_rank])
    row["overhead_us"] = round(row["layer_p50_us"] - row["by_hand_p50_us"], 1)
    if "layer_graph" in by_rank[0]:
        row["graph_ratio"] = round(row["layer_graph_p50_us"] / row["by_hand_graph_p50_us"], 3)
    return row
