"""Jobs that run inside the ranks of tests/gpu/test_layers.py. No pytest here: the ranks import this module."""

from __future__ import annotations

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS, Batch
from eprt.conformance.harness import RankContext
from eprt.conformance.oracle import expected_outputs, full_weights, relative_error, shard_weights
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK

ROWS = 32


def graph_layer(context: RankContext, dispatcher: str, executor: str, rounds: list[list[int]]) -> list[float]:
    """Capture one whole layer call at R rows, replay it with new tokens and counts; each replay's error."""
    world = context.world()
    config = CONFIGS["gpt_oss"]
    full = full_weights(config)
    shard = ExpertPlacement(config.num_experts, world.parallel).shard(world.rank)
    runtime = RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=ROWS)
    layer = ExpertParallelMoE(config, world, shard_weights(full, config, shard).to(world.device), runtime=runtime)
    world.warmup(layer)
    E, K, H, device = config.num_experts, config.top_k, config.hidden_size, world.device
    x = torch.zeros(ROWS, H, dtype=torch.bfloat16, device=device)
    ids = torch.full((ROWS, K), E, dtype=torch.int32, device=device)
    weights = torch.zeros(ROWS, K, device=device)
    for _ in range(2):
        layer(x, TopK(ids, weights), tokens_per_rank=ROWS)
    torch.cuda.synchronize()
    world.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, TopK(ids, weights), tokens_per_rank=ROWS)
    errors: list[float] = []
    for call, counts in enumerate(rounds):
        mine = _batch(counts[context.rank], call, config, context.rank)
        ids.fill_(E)
        weights.zero_()
        count = counts[context.rank]
        x[:count].copy_(mine.hidden)
        ids[:count].copy_(mine.topk.ids)
        weights[:count].copy_(mine.topk.weights)
        out.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        expected = expected_outputs(config, full, [mine])[0]
        errors.append(relative_error(out[:count].cpu(), expected))
    world.warm = False
    layer.close()
    return errors


def _batch(count: int, call: int, config: MoEConfig, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    hidden = torch.randn(count, config.hidden_size, generator=generator).bfloat16()
    scores, ids = torch.rand(count, config.num_experts, generator=generator).topk(config.top_k)
    return Batch(hidden, TopK(ids.int(), scores))
