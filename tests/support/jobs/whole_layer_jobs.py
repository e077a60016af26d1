"""Jobs that replay a whole layer at a static size (a CUDA graph on GPUs), or time its start. No pytest here: the ranks
import this module."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from eprt.balance import rebalance
from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.cases import Batch
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.placement import ExpertPlacement
from eprt.ranks.launcher import RankContext
from eprt.tokens import TopK
from support.builders import BEHIND_S, recorded


def replayed_layer(
    context: RankContext,
    config: MoEConfig,
    runtime: RuntimeConfig,
    rounds: list[list[int]],
    placements: Sequence[tuple[int, ...]] = (),
    wrong_slots: bool = False,
    another_order: bool = False,
) -> list[float]:
    """Record one call of R rows, replay it with new tokens for each of `rounds` (every rank's count); the errors.

    Args:
        placements: slots; the layer is built with the first, and experts move to the next before each later round.
        wrong_slots: move them elsewhere than the ids go.
        another_order: the experts' columns lie in another order than the hidden states', as GPTQ's `desc_act` has them.
    """
    world, full = context.world(timeout_s=BEHIND_S), full_weights(config)
    if another_order:
        order = torch.randperm(config.hidden_size, generator=torch.Generator().manual_seed(1))
        full = replace(full, hidden_order=order)
    placement = ExpertPlacement(config.num_experts, world.parallel, placements[0] if placements else ())
    layer = layer_of(world, config, full, runtime, placement)
    world.warmup(layer)
    E, K, H, R = config.num_experts, config.top_k, config.hidden_size, runtime.max_tokens_per_rank
    x = torch.zeros(R, H, dtype=torch.bfloat16, device=world.device)
    ids = torch.full((R, K), E, dtype=torch.int32, device=world.device)
    weights = torch.zeros(R, K, device=world.device)

    def call() -> torch.Tensor:
        return layer(x, TopK(ids, weights), tokens_per_rank=R)

    for _ in range(2):
        call()
    world.barrier()
    out, replay = recorded(call, world.device)
    errors: list[float] = []
    for call, counts in enumerate(rounds):
        if placements and call:
            slots = placements[call % len(placements)]
            rebalance(world, [layer], [ExpertPlacement(E, world.parallel, slots)])
            if wrong_slots:
                layer.adopt_placement(ExpertPlacement(E, world.parallel, (*slots[1:], slots[0])))
        count = counts[context.rank]
        batch = _batch(count, call, config, context.rank)
        ids.fill_(E)  # rows past the count keep old tokens: no expert may see them
        for static, fresh in ((x, batch.hidden), (ids, batch.topk.ids), (weights, batch.topk.weights)):
            static[:count].copy_(fresh)
        expected = expected_outputs(config, full, [batch])[0]
        out.fill_(math.nan)
        replay()
        errors.append(relative_error(out[:count].cpu(), expected))
    world.warm = False  # this World serves other tests, which build layers of their own
    layer.close()
    return errors


def seconds_to_start(context: RankContext, config: MoEConfig, runtime: RuntimeConfig) -> tuple[float, float]:
    """(building the layer, `World.warmup`), for a process that has done neither before."""
    world, full = context.world(timeout_s=BEHIND_S), full_weights(config)
    start = time.perf_counter()
    layer = layer_of(world, config, full, runtime)
    built = time.perf_counter()
    world.warmup(layer)
    warm = time.perf_counter()
    world.warm = False  # this World serves other tests, which build layers of their own
    return built - start, warm - built


def _batch(count: int, call: int, config: MoEConfig, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    hidden = torch.randn(count, config.hidden_size, generator=generator).bfloat16()
    scores, ids = torch.rand(count, config.num_experts, generator=generator).topk(config.top_k)
    return Batch(hidden, TopK(ids.int(), scores))
