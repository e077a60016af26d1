"""One rank's share of a shape of `eprt bench experts`: its executor, and the tokens that an all-gather brings it."""

from __future__ import annotations

import torch

from eprt.bench.experts import ExpertCase, random_experts
from eprt.bench.routings import sample_ids
from eprt.bench.shapes import shape_of
from eprt.config import MoEConfig, RuntimeConfig
from eprt.experts import Executor, make_executor
from eprt.tokens import FlatTokens, Payload


def executor_of(shape: str, name: str, device: torch.device, low_precision: bool = False) -> Executor:
    """Makes an executor of the same random weights in every call."""
    config = shape_of(shape).config
    shard = ExpertCase(name, shape, config).shard
    torch.manual_seed(0)
    weights = random_experts(config, shard.num_local_experts, device, shape_of(shape).group)
    runtime = RuntimeConfig(low_precision_activations=low_precision)
    return make_executor(name, config, shard, weights, device, runtime, "flat")


def tokens_of(config: MoEConfig, count: int, device: torch.device) -> FlatTokens:
    """Makes random tokens from the seed `count`."""
    generator = torch.Generator(device).manual_seed(count)
    hidden = torch.randn(count, config.hidden_size, device=device, generator=generator).bfloat16()
    ids = sample_ids(count, config.top_k, config.num_experts, device)
    weights = torch.rand(count, config.top_k, device=device, generator=generator)
    return FlatTokens(Payload.plain(hidden), ids, weights, config.num_experts, every_row_read=True)
