"""Layers, tokens and comparisons for tests of the grouped GEMM of our own.

What may be garbage is NaN: rows and weights without a local expert. Gate and up, experts and scale blocks differ beyond
mistaking.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.reference import ReferenceExecutor
from eprt.placement import ExpertPlacement
from eprt.quant import encode
from eprt.tokens import FlatTokens, Payload
from eprt.weights import ExpertWeights
from support.cases.expert_cases import cut
from support.stand_ins.kernel_device import DEVICE, sized

NAN = float("nan")
RUNTIME = RuntimeConfig()
# Tokens, the values between the matrices and the results of slots are rounded to bf16, 2^-9 each.
BOUND = 1e-2

GPT_OSS = Activation(alpha=1.702, beta=1.0, limit=7.0)
ACTIVATIONS = {"silu": Activation(), "gpt_oss": GPT_OSS, "relu2": Activation("relu2")}


def layer(form="bf16", H=96, I=48, E=6, K=3, activation=GPT_OSS, bias=True):
    return MoEConfig(E, K, H, I, activation, bias=bias, weight_format=form)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def all_experts(config, seed=0):
    """Up is three times gate, expert e scaled by 1 + e / 4; every 128 x 128 block has a scale of its own."""
    E, H, I, parts = config.num_experts, config.hidden_size, config.intermediate_size, config.activation.parts
    expert = 1 + torch.arange(E, device=DEVICE)[:, None, None] / 4
    gate_up = random(E, parts * I, H, seed=seed) * 2 * H**-0.5
    gate_up[:, (parts - 1) * I :] *= 3
    down = random(E, H, I, seed=seed + 1) * I**-0.5 * expert
    for matrix in (gate_up, down):
        for block in range(1, -(-matrix.shape[2] // 128)):
            matrix[:, :, block * 128 :] *= 1.5
        matrix[:, 128:] *= 1.5
    bias = (random(E, parts * I, seed=seed + 2), random(E, H, seed=seed + 3) * 3) if config.bias else (None, None)
    form = config.weight_format
    return ExpertWeights(encode(form, gate_up, parts), encode(form, down, 1), *bias)


def make_tokens(config, num_rows, seed=1, every_row_read=True, dtype=torch.bfloat16):
    """Distinct experts; every fifth row has none, every third misses a slot."""
    generator = torch.Generator().manual_seed(seed)
    E, K = config.num_experts, config.top_k
    hidden = torch.randn(num_rows, config.hidden_size, generator=generator)
    ids = torch.rand(num_rows, E, generator=generator).argsort(1)[:, :K].to(torch.int32)
    weights = torch.rand(num_rows, K, generator=generator) + 0.25
    ids[2::3, -1] = E
    ids[4::5] = E
    weights[ids == E] = NAN
    hidden[4::5] = NAN
    payload = Payload.plain(hidden.to(DEVICE, dtype))
    return FlatTokens(payload, ids.to(DEVICE), weights.to(DEVICE), E, every_row_read)


def whole(config):
    return ExpertPlacement(config.num_experts, ParallelConfig()).shard(0)


def build(kind, config, weights, shard=None, runtime=RUNTIME):
    shard = shard or whole(config)
    return kind(config, shard, cut(weights, config, shard), DEVICE, runtime)


def error(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


def errors_against_the_right_one(config, weights, tokens, others):
    """Of the right weights, then of each of the others, against what the right ones give the witness."""
    plain = replace(tokens, hidden=Payload.plain(tokens.hidden.data.float()))
    expected = build(ReferenceExecutor, config, weights)(plain)
    return [error(build(TritonGroupedExecutor, config, each)(tokens), expected) for each in (weights, *others)]


def error_on_flat(config, weights, tokens, shard=None, runtime=RUNTIME):
    plain = tokens.hidden if tokens.hidden.scale is not None else Payload.plain(tokens.hidden.data.float())
    expected = build(ReferenceExecutor, config, weights, shard)(replace(tokens, hidden=plain))
    out = torch.full((tokens.num_rows, config.hidden_size), NAN, dtype=torch.bfloat16, device=DEVICE)
    found = build(TritonGroupedExecutor, config, weights, shard, runtime)(tokens, out)
    assert found is out
    return error(out, expected)


def error_of_shares(config, ep_size, moe_tp_size):
    """Of the sum of what each rank computes against the layer as a whole."""
    weights, tokens = all_experts(config), make_tokens(config, sized(64, 20))
    parallel = ParallelConfig(ep_size * moe_tp_size, moe_tp_size=moe_tp_size)
    placement = ExpertPlacement(config.num_experts, parallel)
    total = torch.zeros(tokens.num_rows, config.hidden_size, device=DEVICE)
    for rank in range(parallel.world_size):
        total += build(TritonGroupedExecutor, config, weights, placement.shard(rank))(tokens).float()
    plain = replace(tokens, hidden=Payload.plain(tokens.hidden.data.float()))
    return error(total, build(ReferenceExecutor, config, weights)(plain))
