"""Layers, tokens and comparisons for tests of the grouped GEMM of our own.

What may be garbage is NaN: rows and weights without a local expert. Gate and up, experts and scale blocks differ beyond
mistaking.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.oracle import relative_error, shard_weights
from eprt.expert_major import expert_major_from_flat
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.reference import ReferenceExecutor
from eprt.placement import ExpertPlacement
from eprt.quant import encode
from eprt.tokens import Payload
from eprt.weights import ExpertWeights
from support.builders import recorded
from support.cases import expert_cases
from support.cases.expert_cases import GPT_OSS, NAN, RUNTIME, make_flat, shard_of
from support.stand_ins.kernel_device import DEVICE, sized

# Tokens, the values between the matrices and the results of slots are rounded to bf16, 2^-9 each.
BOUND = 1e-2
FP8_RUNTIME = RuntimeConfig(low_precision_activations=True)
# E4M3 keeps 4 bits: 2^-4 of a number at most, 2% to 3% in norm, of the tokens and of what lies between the matrices,
# which a steep activation magnifies: 4% in all for SiLU, 6% for gpt-oss's.
FP8_BOUND = 8e-2

make_tokens = partial(make_flat, seed=1, dtype=torch.bfloat16, every_row_read=True, device=DEVICE)
ACTIVATIONS = {name: expert_cases.ACTIVATIONS[name] for name in ("silu", "gpt_oss", "relu2", "geglu")}


def layer(form="bf16", H=96, I=48, E=6, K=3, activation=GPT_OSS, bias=True):
    return MoEConfig(E, K, H, I, activation, bias=bias, weight_format=form)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def all_experts(config, growth=1.5):
    """Up is three times gate, expert e scaled by 1 + e / 4; every 128 x 128 block is `growth` times the one before."""
    E, H, I, parts = config.num_experts, config.hidden_size, config.intermediate_size, config.activation.parts
    expert = 1 + torch.arange(E, device=DEVICE)[:, None, None] / 4
    gate_up = random(E, parts * I, H, seed=0) * 2 * H**-0.5
    gate_up[:, (parts - 1) * I :] *= 3
    down = random(E, H, I, seed=1) * I**-0.5 * expert
    for matrix in (gate_up, down):
        for block in range(1, -(-matrix.shape[2] // 128)):
            matrix[:, :, block * 128 :] *= growth
        matrix[:, 128:] *= growth
    bias = (random(E, parts * I, seed=2), random(E, H, seed=3) * 3) if config.bias else (None, None)
    form = config.weight_format
    return ExpertWeights(encode(form, gate_up, parts), encode(form, down, 1), *bias)


def make_slabs(flat, shard, num_rows):
    """The same rows as slabs, and which of their rows lie past the counts and hold NaN: [L, num_rows]."""
    slabs, _ = expert_major_from_flat(flat, shard, num_rows)
    past = torch.arange(num_rows, device=DEVICE)[None] >= slabs.counts[:, None]
    data = slabs.hidden.data.clone()
    data[past] = NAN
    return replace(slabs, hidden=Payload.plain(data)), past


def build(kind, config, weights, shard=None, runtime=RUNTIME):
    shard = shard or shard_of(config)
    return kind(config, shard, shard_weights(weights, config, shard), DEVICE, runtime)


def witness(config, weights, tokens, shard=None):
    """The reference executor's result, of unpacked tokens in float32."""
    if tokens.hidden.scale is None:
        tokens = replace(tokens, hidden=Payload.plain(tokens.hidden.data.float()))
    return build(ReferenceExecutor, config, weights, shard)(tokens)


def check_slabs(config, num_rows, spare, empty, dtypes=(torch.bfloat16,)):
    """Slabs further apart than they are wide with garbage past their counts, that of expert `empty` without rows;
    outputs as far apart, of which nothing else is written."""
    weights, flat = all_experts(config), make_tokens(config, num_rows)
    flat = replace(flat, ids=torch.where(flat.ids == empty, config.num_experts, flat.ids))
    M, H = num_rows + spare, config.hidden_size
    slabs, past = make_slabs(flat, shard_of(config), M)
    wide = torch.full((config.num_experts, M + 2, H + 16), NAN, dtype=torch.bfloat16, device=DEVICE)
    data = wide[:, :M, :H]
    data[~past] = slabs.hidden.data[~past]
    expected = witness(config, weights, slabs)
    for dtype in dtypes:
        out = torch.full((config.num_experts, M + 1, H + 8), NAN, dtype=dtype, device=DEVICE)
        tokens = replace(slabs, hidden=Payload.plain(data if dtype == torch.bfloat16 else data.float()))
        build(TritonGroupedExecutor, config, weights)(tokens, out[:, :M, :H])
        assert relative_error(out[:, :M, :H][~past], expected[~past]) < BOUND
        out[:, :M, :H][~past] = NAN
        assert out.isnan().all()


def check_replays(call, config, weights, shard, static):
    """Replays of `call` on the tokens of `static`, captured in a graph, with other routing, one expert alone, and no
    token at all."""
    out, replay = recorded(call, DEVICE)
    for seed in range(5):
        fresh = make_tokens(config, static.num_rows, seed=seed)
        if seed == 3:
            fresh = replace(fresh, ids=torch.where(fresh.ids == 5, 5, 8).to(torch.int32))
        if seed == 4:
            fresh = replace(fresh, ids=torch.full_like(fresh.ids, 8))
        static.hidden.data.copy_(fresh.hidden.data)
        static.ids.copy_(fresh.ids)
        static.weights.copy_(fresh.weights)
        out.fill_(NAN)
        replay()
        if seed == 4:
            assert not out.any()
        else:
            assert relative_error(out, witness(config, weights, fresh, shard)) < BOUND, seed


def errors_against_the_right_one(config, weights, tokens, others):
    expected = witness(config, weights, tokens)
    return [relative_error(build(TritonGroupedExecutor, config, each)(tokens), expected) for each in (weights, *others)]


def error_on_flat(config, weights, tokens, runtime=RUNTIME):
    expected = witness(config, weights, tokens)
    out = torch.full((tokens.num_rows, config.hidden_size), NAN, dtype=torch.bfloat16, device=DEVICE)
    found = build(TritonGroupedExecutor, config, weights, runtime=runtime)(tokens, out)
    assert found is out
    return relative_error(out, expected)


def error_of_shares(config, ep_size, moe_tp_size):
    """Of the sum of what each rank computes against the layer as a whole."""
    weights, tokens = all_experts(config), make_tokens(config, sized(64, 20))
    parallel = ParallelConfig(ep_size * moe_tp_size, moe_tp_size=moe_tp_size)
    placement = ExpertPlacement(config.num_experts, parallel)
    total = torch.zeros(tokens.num_rows, config.hidden_size, device=DEVICE)
    for rank in range(parallel.world_size):
        total += build(TritonGroupedExecutor, config, weights, placement.shard(rank))(tokens).float()
    return relative_error(total, witness(config, weights, tokens))
