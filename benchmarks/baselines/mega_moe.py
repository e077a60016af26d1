"""DeepGEMM's mega kernel for Hopper (`sgl-deep-gemm`), alone on one rank: its arithmetic without its communication.

One launch quantises the tokens, a second one does the rest: both GEMMs, what lies between them, and the weighted sums.
The experts of the share are all there are; pairs of other ranks' experts name none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from eprt.config import MoEConfig
from eprt.errors import EprtError
from eprt.placement import ExpertShard
from eprt.tokens import FlatTokens
from eprt.weights import FP8_BLOCK, ExpertWeights, Fp8Block

from .direct import Call


@contextmanager
def mega_moe(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Runs the kernel in a process group of one, with symmetric memory for as many tokens as each call has."""
    import deep_gemm

    if not isinstance(weights.gate_up, Fp8Block) or not isinstance(weights.down, Fp8Block):
        raise EprtError("measured with FP8 by block")
    first, second = ((matrix.data, matrix.scale) for matrix in (weights.gate_up, weights.down))
    first, second = deep_gemm.transform_weights_for_mega_moe_sm90(first, second)

    def call_for(tokens: FlatTokens) -> Call:
        x, N = tokens.hidden.data, len(tokens.ids)
        ids = tokens.ids.int() - shard.first_expert
        ids = torch.where((ids >= 0) & (ids < shard.num_local_experts), ids, -1)
        scales, out = tokens.weights.float(), torch.empty_like(x)
        buffer = deep_gemm.get_symm_buffer_for_sm90_mega_moe(
            dist.group.WORLD, shard.num_local_experts, N, config.top_k, config.hidden_size, config.intermediate_size
        )

        def call() -> torch.Tensor:
            inputs = buffer.x, buffer.x_sf, buffer.topk_idx, buffer.topk_weights
            deep_gemm.mega_moe_pre_dispatch_sm90(x, ids, scales, *inputs, N, FP8_BLOCK)
            deep_gemm.fp8_mega_moe(out, first, second, buffer)
            return out

        return call

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield call_for
    finally:
        dist.destroy_process_group()
