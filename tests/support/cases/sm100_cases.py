"""Blackwell executors to test with: two-level scales that differ everywhere, calibrated, on stand-in kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.config import Activation
from eprt.conformance.oracle import shard_weights
from eprt.expert_major import expert_major_from_flat
from eprt.experts.base import Executor
from eprt.experts.reference import ReferenceExecutor, decode_hidden
from eprt.placement import ExpertShard
from eprt.quant import decode, encode_payload
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import ExpertWeights, Fp8Tensor, Nvfp4
from support.cases import expert_cases
from support.cases.expert_cases import CPU, RUNTIME, SILU, make_config, make_weights, shard_of
from support.stand_ins.sm100_kernels import RELU2, SWIGLU, activate

# Beta without a limit: nothing brings gate and up to one global scale before, and beta is added on up's side.
ACTIVATIONS = expert_cases.SM100_ACTIVATIONS | {"beta": Activation(alpha=1.7, beta=1.0)}


def calibrated(weights: ExpertWeights, config, seed: int = 0) -> ExpertWeights:
    """With input scales as a calibration would leave them: experts differ, as do gate and up."""
    L, parts = weights.num_local_experts, config.activation.parts
    largest = 448.0 if isinstance(weights.gate_up, Fp8Tensor) else 6 * 448.0
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, config.hidden_size, generator=generator)
    sums = x @ decode(weights.gate_up, parts).mT
    gate, up = sums.chunk(2, -1) if parts == 2 else (sums, sums)
    act = config.activation
    inside = activate(SWIGLU if act.gated else RELU2, gate, up, act.alpha, act.beta, act.limit)
    margin = 1 + torch.rand(L, 1, generator=generator)
    return replace(
        weights,
        gate_up=replace(weights.gate_up, input_scale=(4 + torch.rand(L, parts, generator=generator)) / largest),
        down=replace(weights.down, input_scale=margin * inside.abs().amax((1, 2))[:, None] / largest),
    )


def case(weight_format: str, size: tuple[int, int], activation=SILU, rank: int = 1, world: int = 2):
    """(config, shard, weights) of rank 1 of 2, so that no local id equals a global one."""
    config = make_config(weight_format, hidden_size=size[0], intermediate_size=size[1], activation=activation)
    config = replace(config, num_experts=8, top_k=3)
    shard = shard_of(config, rank, world)
    weights = shard_weights(make_weights(config), config, shard)
    return config, shard, calibrated(weights, config) if weight_format in ("nvfp4", "fp8_tensor") else weights


def build(kind, fake, config, shard, weights, runtime=RUNTIME) -> Executor:
    kind = type("Built", (kind,), {"kernels": fake.kernels()})
    return kind(config, shard, weights, CPU, runtime)


def packed(flat: FlatTokens, weights: ExpertWeights) -> FlatTokens:
    """The same rows as an NVFP4 payload; garbage rows stay garbage."""
    hidden = torch.where(flat.hidden.data.isfinite(), flat.hidden.data, 0.0)
    payload = encode_payload(hidden, "nvfp4", torch.tensor([0.004]))
    rows = flat.hidden.data.isnan().any(1)
    payload.data[rows] = 0x77
    payload.scale.view(torch.uint8)[rows] = 0x7F
    return replace(flat, hidden=payload)


def witness(config, shard, weights, tokens) -> torch.Tensor:
    return ReferenceExecutor(config, shard, weights, CPU, RUNTIME)(tokens)


def as_quantised(weights: ExpertWeights, hidden: Payload) -> Payload:
    """What tokens that the executor quantises itself are worth afterwards, in float32."""
    scale = weights.gate_up.input_scale.amax().view(1)
    kept = torch.where(hidden.data.isfinite(), hidden.data, 0.0)
    if isinstance(weights.gate_up, Nvfp4):
        return Payload.plain(decode_hidden(encode_payload(kept, "nvfp4", scale)))
    return Payload.plain((kept.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)


def as_slabs(flat: FlatTokens, shard: ExpertShard) -> ExpertMajorTokens:
    """Slabs with three rows too many."""
    return expert_major_from_flat(flat, shard, flat.num_rows + 3)[0]
