"""Draws for batch invariance: the same tokens in ever other batches, at other places, on other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eprt.bench.experts import random_experts
from eprt.config import MoEConfig, Routing, RuntimeConfig
from eprt.conformance.oracle import shard_weights
from eprt.layer import ExpertParallelMoE
from eprt.models.published import published_layer
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK
from eprt.world import World
from support.builders import distinct_experts, recorded
from support.cases.expert_cases import make_config, make_weights

TOKENS, OTHERS, MOST = 24, 40, 32  # known tokens, tokens that only fill batches up, tokens of a rank
SHAPES = {"gpt-oss-20b": "gpt-oss-20b", "qwen3-30b": "Qwen3-30B-A3B"}  # published widths


def config_of(weight_format: str, bias: bool = False, hidden: int = 96) -> MoEConfig:
    config = make_config(weight_format, bias=bias)
    return replace(config, num_experts=8, top_k=3, hidden_size=hidden, intermediate_size=hidden // 96 * 64)


def build(
    world: World, weight_format: str, bias: bool, hidden: int, shape: str = "", **runtime: Any
) -> ExpertParallelMoE:
    """A layer with random numbers; `shape`: of a published model, on a GPU."""
    if shape:
        config = replace(published_layer(SHAPES[shape]), routing=Routing(), shared=None)
        torch.manual_seed(world.rank)
        share = random_experts(
            config, ExpertPlacement(config.num_experts, world.parallel).num_local_experts, world.device
        )
    else:
        config = config_of(weight_format, bias, hidden)
        placement = ExpertPlacement(config.num_experts, world.parallel)
        share = shard_weights(make_weights(config), config, placement.shard(world.rank))
    settings = RuntimeConfig(**{"max_tokens_per_rank": MOST, "batch_invariant": True} | runtime)
    return ExpertParallelMoE(config, world, share, runtime=settings)


def drawn(layer: ExpertParallelMoE, draws: int, dtype: torch.dtype, call: Any = None) -> int:
    """Makes that many calls of all ranks, and counts the rows of known tokens whose bits aren't those that the token
    has alone without a graph, on this rank or on another. Each call has up to the layer's most tokens of this rank's
    draw, in any order, known ones among others, some twice; small calls are as frequent as large ones. Nothing waits
    for the device."""
    world, config, most = layer.world, layer.config, layer.dispatcher.capacity.max_tokens_per_rank
    every = torch.Generator().manual_seed(1)  # the tokens, equal on all ranks
    count = TOKENS + OTHERS
    x = torch.randn(count, config.hidden_size, generator=every).to(dtype)
    x = torch.cat([x, 100 * x[:OTHERS]]).to(world.device)  # loud neighbours, too
    ids = distinct_experts(len(x), config.num_experts, config.top_k, every).to(world.device)
    weights = torch.rand(len(x), config.top_k, generator=every).to(world.device)
    own = torch.Generator().manual_seed(1000 + world.rank)
    picked = torch.randint(len(x), (draws, most), generator=own).to(world.device)
    sizes = ((most + 1.0) ** torch.rand(draws, generator=own)).long() - 1

    @torch.no_grad()
    def bits(some: torch.Tensor, call: Any = call or layer) -> torch.Tensor:
        y = call(x[some], TopK(ids[some], weights[some]))
        return y.view(torch.int32 if dtype == torch.float32 else torch.int16)

    tokens = torch.arange(TOKENS, device=world.device)
    alone = torch.cat([bits(tokens[n : n + 1], layer).clone() for n in range(TOKENS)])
    wrong = torch.zeros((), dtype=torch.int64, device=world.device)
    for some, T in zip(picked, sizes.tolist(), strict=True):
        y, known = bits(some[:T]), some[:T] < TOKENS
        wrong += ((y != alone[some[:T].clamp(max=TOKENS - 1)]).any(1) & known).sum()
    of_all = alone.new_empty((world.size, *alone.shape), dtype=torch.int32)
    world.all_gather(of_all.view(-1, config.hidden_size), alone.int())
    return int(wrong + (of_all != of_all[0]).any(2).sum())


class Replayed:
    """A call of a layer for the most tokens, captured in a CUDA graph; shorter batches are padded with no experts."""

    def __init__(self, layer: ExpertParallelMoE, dtype: torch.dtype) -> None:
        config, device, most = layer.config, layer.world.device, layer.dispatcher.capacity.max_tokens_per_rank
        self.x = torch.zeros(most, config.hidden_size, dtype=dtype, device=device)
        self.ids = torch.full((most, config.top_k), config.num_experts, dtype=torch.int32, device=device)
        self.weights = torch.zeros(most, config.top_k, device=device)
        topk = TopK(self.ids, self.weights)
        with torch.no_grad():
            self.out, self.replay = recorded(lambda: layer(self.x, topk, tokens_per_rank=most), device)
        self.nobody = config.num_experts

    def __call__(self, x: torch.Tensor, topk: TopK) -> torch.Tensor:
        T = x.shape[0]
        self.x[:T], self.ids[:T], self.weights[:T] = x, topk.ids, topk.weights
        self.ids[T:] = self.nobody
        self.replay()
        return self.out[:T].clone()


def invariant(
    context: Any,
    weight_format: str,
    draws: int,
    bias: bool = False,
    hidden: int = 96,
    graph: bool = False,
    shape: str = "",
    **runtime: Any,
) -> tuple[int, str]:
    """(rows whose bits changed, the pair that ran)"""
    world = context.world()
    layer = build(world, weight_format, bias, hidden, shape, **runtime)
    world.warmup(layer)
    dtype = torch.float32 if weight_format == "f32" else torch.bfloat16
    wrong = drawn(layer, draws, dtype, Replayed(layer, dtype) if graph else None)
    pair = f"{layer.plan.dispatcher} + {layer.plan.executor}"
    layer.close()
    return wrong, pair
