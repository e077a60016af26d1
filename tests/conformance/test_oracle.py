"""The oracle itself, held by the definition written out once more: one token, one expert at a time, in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from eprt.config import ParallelConfig
from eprt.conformance.cases import BY_NAME, CONFIGS, make_batches
from eprt.conformance.oracle import expected_outputs, full_weights, relative_error, shard_weights
from eprt.errors import ConfigError
from eprt.placement import ExpertPlacement
from eprt.quant import decode


def by_definition(config, full, batch):
    """Decodes with `eprt.quant`, which shares nothing with the reference that the oracle uses."""
    act, I = config.activation, config.intermediate_size
    gate_up, down = decode(full.gate_up, act.parts).double(), decode(full.down, 1).double()
    out = torch.zeros(batch.hidden.shape, dtype=torch.float64)
    for t in range(batch.hidden.shape[0]):
        for k in range(config.top_k):
            e = int(batch.topk.ids[t, k])
            if e == config.num_experts:
                continue
            h = gate_up[e] @ batch.hidden[t].double()
            h = h if full.gate_up_bias is None else h + full.gate_up_bias[e]
            if act.kind == "relu2":
                h = torch.clamp(h, min=0) ** 2
            else:
                limit = act.limit or float("inf")
                gate, up = h[:I].clamp(max=limit), h[I:].clamp(-limit, limit)
                h = gate / (1 + torch.exp(-act.alpha * gate)) * (up + act.beta)
            y = down[e] @ h
            y = y if full.down_bias is None else y + full.down_bias[e]
            out[t] += float(batch.topk.weights[t, k]) * y
    return out


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("case", ["uneven-uniform", "one_over_all-hot_expert", "equal-partly_invalid"])
def test_oracle_is_the_definition(name, case):
    config = CONFIGS[name]
    full = full_weights(config)
    batches = make_batches(BY_NAME[case], 0, 4, config, torch.bfloat16)
    for batch, out in zip(batches, expected_outputs(config, full, batches), strict=True):
        assert relative_error(out, by_definition(config, full, batch)) < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_unlike_each_other_and_gate_is_unlike_up(name):
    config = CONFIGS[name]
    dense = decode(full_weights(config).gate_up, config.activation.parts)
    size = dense.flatten(1).norm(dim=1)
    assert float(size[-1] / size[0]) > 3
    if config.activation.gated:
        gate, up = dense.chunk(2, dim=1)
        assert float((gate - up).norm() / up.norm()) > 0.5


@pytest.mark.parametrize(
    ("name", "moe_tp_size", "changes"),
    [
        ("silu_f32", 4, {}),
        ("gpt_oss", 2, {}),
        ("relu2_bf16", 4, {}),
        ("silu_bf16", 2, {"weight_format": "fp8_channel"}),
        ("silu_bf16", 2, {"weight_format": "fp8_block", "intermediate_size": 256}),
    ],
)
def test_shards_are_the_whole_cut(name, moe_tp_size, changes):
    config = replace(CONFIGS[name], **changes)
    full, parts = full_weights(config), config.activation.parts
    placement = ExpertPlacement(config.num_experts, ParallelConfig(2 * moe_tp_size, moe_tp_size=moe_tp_size))
    shards = [placement.shard(rank) for rank in range(2 * moe_tp_size)]
    cut = [shard_weights(full, config, shard) for shard in shards]
    for weights, shard in zip(cut, shards, strict=True):
        weights.check(config, shard)
    L = placement.num_local_experts
    for group in range(2):
        ranks = cut[group * moe_tp_size : (group + 1) * moe_tp_size]
        experts = slice(group * L, (group + 1) * L)
        assert torch.equal(torch.cat([decode(w.down, 1) for w in ranks], 2), decode(full.down, 1)[experts])
        halves = [decode(w.gate_up, parts).unflatten(1, (parts, -1)) for w in ranks]
        assert torch.equal(torch.cat(halves, 2).flatten(1, 2), decode(full.gate_up, parts)[experts])


@pytest.mark.parametrize(
    ("moe_tp_size", "changes"), [(4, {}), (2, {"weight_format": "fp8_block", "intermediate_size": 192})]
)
def test_a_cut_through_a_scale_block_is_refused(moe_tp_size, changes):
    config = replace(CONFIGS["gpt_oss"], **changes)
    placement = ExpertPlacement(config.num_experts, ParallelConfig(4, moe_tp_size=moe_tp_size))
    with pytest.raises(ConfigError, match="would split a scale block"):
        shard_weights(full_weights(config), config, placement.shard(1))
