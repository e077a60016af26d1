"""Draws for batch invariance: the same tokens in ever other batches, at other places, on other ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.oracle import shard_weights
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK
from eprt.world import World
from support.builders import distinct_experts, recorded
from support.cases.expert_cases import make_config, make_weights

TOKENS, OTHERS, MOST = 24, 40, 32  # known tokens, tokens that only fill batches up, tokens of a rank


def config_of(weight_format: str, bias: bool = False, hidden: int = 96) -> MoEConfig:
    """A layer of 8 experts."""
    config = make_config(weight_format, bias=bias)
    return replace(config, num_experts=8, top_k=3, hidden_size=hidden, intermediate_size=hidden // 96 * 64)


def build(world: World, weight_format: str, bias: bool, hidden: int, **runtime: Any) -> ExpertParallelMoE:
    """A layer with random numbers."""
    config = config_of(weight_format, bias, hidden)
    placement = ExpertPlacement(config.num_experts, world.parallel)
    share = shard_weights(make_weights(config), config, placement.shard(world.rank))
    settings = RuntimeConfig(**{"max_tokens_per_rank": MOST, "batch_invariant": True} | runtime)
    return ExpertParallelMoE(config, world, share, runtime=settings)


def drawn(layer: ExpertParallelMoE, draws: int, dtype: torch.dtype, call: Any = None) -> int:
    """Makes that many calls of all ranks, and counts the rows of known tokens whose bits aren't those of their first
    call. Each has one to all of the known tokens of this rank's draw, in any order, among others."""
    world, config, call = layer.world, layer.config, call or layer
    every = torch.Generator().manual_seed(1)  # the tokens, equal on all ranks
    count = TOKENS + OTHERS
    x = torch.randn(count, config.hidden_size, generator=every).to(dtype)
    x = torch.cat([x, 100 * x[:OTHERS]]).to(world.device)  # loud neighbours, too
    ids = distinct_experts(len(x), config.num_experts, config.top_k, every).to(world.device)
    weights = torch.rand(len(x), config.top_k, generator=every).to(world.device)
    own = torch.Generator().manual_seed(1000 + world.rank)
    first: dict[int, torch.Tensor] = {}
    wrong = 0
    for draw in range(draws):
        T = int(torch.randint(0, MOST + 1, (), generator=own)) if draw % 3 else 1
        picked = torch.randperm(len(x), generator=own)[:T]
        known = picked < TOKENS
        where = picked.to(world.device)
        with torch.no_grad():
            y = call(x[where], TopK(ids[where], weights[where])).cpu()
        for row in known.nonzero().flatten().tolist():
            token = int(picked[row])
            wrong += not torch.equal(first.setdefault(token, y[row].clone()), y[row])
    reference = torch.full((TOKENS, config.hidden_size), float("nan"), dtype=y.dtype)
    for token, row in first.items():
        reference[token] = row
    rows = reference.float().new_empty((world.size, *reference.shape)).to(world.device)
    world.all_gather(rows.view(-1, config.hidden_size), reference.float().to(world.device))
    spread = rows.cpu()
    wrong += int((~((spread == spread[0]) | spread.isnan() | spread[0].isnan())).any(2).sum())  # the ranks' own alike
    return wrong


class Replayed:
    """A call of a layer for the most tokens, captured in a CUDA graph; shorter batches are padded with no experts."""

    def __init__(self, layer: ExpertParallelMoE, dtype: torch.dtype) -> None:
        config, device = layer.config, layer.world.device
        self.x = torch.zeros(MOST, config.hidden_size, dtype=dtype, device=device)
        self.ids = torch.full((MOST, config.top_k), config.num_experts, dtype=torch.int32, device=device)
        self.weights = torch.zeros(MOST, config.top_k, device=device)
        topk = TopK(self.ids, self.weights)
        with torch.no_grad():
            self.out, self.replay = recorded(lambda: layer(self.x, topk, tokens_per_rank=MOST), device)
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
    **runtime: Any,
) -> tuple[int, str]:
    """(rows whose bits changed, the pair that ran)"""
    world = context.world()
    layer = build(world, weight_format, bias, hidden, **runtime)
    world.warmup(layer)
    dtype = torch.float32 if weight_format == "f32" else torch.bfloat16
    wrong = drawn(layer, draws, dtype, Replayed(layer, dtype) if graph else None)
    pair = f"{layer.plan.dispatcher} + {layer.plan.executor}"
    layer.close()
    return wrong, pair
