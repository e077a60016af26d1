"""Experts to test with: gate, up and every expert differ beyond mistaking; tokens carry garbage where they may."""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import shard_weights
from eprt.expert_major import expert_major_from_flat
from eprt.experts import Executor, make_executor
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.quant import encode
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import Dense, ExpertWeights
from support.builders import distinct_experts

CPU = torch.device("cpu")
RUNTIME = RuntimeConfig()
NAN = float("nan")

SILU = Activation()
GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
DEEPSEEK_V4 = Activation(limit=10.0)
RELU2 = Activation("relu2")
SM100_ACTIVATIONS = {"silu": SILU, "gpt_oss": GPT_OSS, "deepseek_v4": DEEPSEEK_V4, "relu2": RELU2}
ACTIVATIONS = SM100_ACTIVATIONS | {"geglu": Activation("geglu")}


def make_config(weight_format: str = "f32", **changes) -> MoEConfig:
    config = MoEConfig(num_experts=4, top_k=2, hidden_size=96, intermediate_size=64, weight_format=weight_format)
    return replace(config, **changes)


def shard_of(config: MoEConfig, rank: int = 0, world_size: int = 1, moe_tp_size: int = 1) -> ExpertShard:
    return ExpertPlacement(config.num_experts, ParallelConfig(world_size, moe_tp_size=moe_tp_size)).shard(rank)


def built(
    name: str, config: MoEConfig, weights: ExpertWeights, shard: ExpertShard | None = None, runtime=RUNTIME
) -> Executor:
    """An executor of the table on the CPU, with the shard's share of all experts' weights."""
    shard = shard or shard_of(config)
    return make_executor(name, config, shard, shard_weights(weights, config, shard), CPU, runtime)


def make_dense(config: MoEConfig, seed: int = 0) -> ExpertWeights:
    """All experts in float32. Expert e is scaled by 1 + e, up by 3 against gate; gates are large enough to clamp."""
    generator = torch.Generator().manual_seed(seed)
    E, H, I = config.num_experts, config.hidden_size, config.intermediate_size
    parts = config.activation.parts
    expert = torch.arange(1.0, E + 1)[:, None, None]
    gate_up = torch.randn(E, parts * I, H, generator=generator) * 2 * H**-0.5
    gate_up[:, (parts - 1) * I :] *= 3
    down = torch.randn(E, H, I, generator=generator) * I**-0.5 * expert
    if not config.bias:
        return ExpertWeights(Dense(gate_up), Dense(down))
    gate_up_bias = torch.randn(E, parts * I, generator=generator) * 2
    down_bias = torch.randn(E, H, generator=generator) * 10 * expert[:, 0]
    return ExpertWeights(Dense(gate_up), Dense(down), gate_up_bias, down_bias)


def make_weights(config: MoEConfig, seed: int = 0) -> ExpertWeights:
    """All experts in the config's format."""
    dense = make_dense(config, seed)
    gate_up = encode(config.weight_format, dense.gate_up.data, config.activation.parts)
    return replace(dense, gate_up=gate_up, down=encode(config.weight_format, dense.down.data, 1))


def make_flat(
    config: MoEConfig,
    num_rows: int = 13,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    every_row_read: bool = False,
    device: torch.device = CPU,
) -> FlatTokens:
    """Rows with distinct experts. Every fifth row holds no token, every third misses an expert; garbage is NaN."""
    generator = torch.Generator().manual_seed(seed)
    E, K = config.num_experts, config.top_k
    hidden = torch.randn(num_rows, config.hidden_size, generator=generator)
    ids = distinct_experts(num_rows, E, K, generator)
    weights = torch.rand(num_rows, K, generator=generator) + 0.25
    ids[2::3, -1] = E
    ids[4::5] = E
    weights[ids == E] = NAN
    hidden[4::5] = NAN
    return FlatTokens(Payload.plain(hidden.to(device, dtype)), ids.to(device), weights.to(device), E, every_row_read)


def make_expert_major(flat: FlatTokens, shard: ExpertShard) -> ExpertMajorTokens:
    """The same rows as slabs with two rows too many; rows past the counts alternate between NaN and infinity."""
    M = flat.num_rows + 2
    slabs, _ = expert_major_from_flat(flat, shard, M)
    past = torch.arange(M)[None, :] >= slabs.counts[:, None]
    data = slabs.hidden.data.clone()
    garbage = torch.where(torch.arange(M) % 2 == 0, NAN, float("inf"))
    data[past] = garbage.expand(past.shape)[past][:, None].to(data.dtype)
    return ExpertMajorTokens(replace(slabs.hidden, data=data), slabs.counts)


def rows_with_expert(flat: FlatTokens, shard: ExpertShard) -> torch.Tensor:
    return ((flat.ids >= shard.first_expert) & (flat.ids < shard.end_expert)).any(1)


def valid_rows(tokens: ExpertMajorTokens) -> torch.Tensor:
    return torch.arange(tokens.hidden.data.shape[1])[None, :] < tokens.counts[:, None]


def swap_gate_and_up(weights: ExpertWeights) -> ExpertWeights:
    """Of `Dense` weights."""
    bias = weights.gate_up_bias
    half = weights.gate_up.data.shape[1] // 2
    return replace(
        weights,
        gate_up=Dense(weights.gate_up.data.roll(half, 1)),
        gate_up_bias=None if bias is None else bias.roll(half, 1),
    )
