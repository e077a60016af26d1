"""The oracle computes what a layer must return, in one process and float32: no dispatcher and no shard takes part.

The formulas come from `eprt.experts.reference`, whose own numbers are held by hand-written tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance.cases import SEED, Batch
from eprt.errors import ConfigError
from eprt.experts.reference import decode_matrix, expert_forward
from eprt.layer import ExpertParallelMoE
from eprt.models import LayerParts
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.quant import encode
from eprt.tokens import as_bytes
from eprt.weights import FP8_BLOCK, ExpertWeights, Fp8Block, Matrix, SharedExpertWeights
from eprt.world import World


def full_weights(config: MoEConfig, seed: int = SEED) -> ExpertWeights:
    """Returns all E experts, unsharded, on the CPU.

    Expert e is scaled by its own number, gate and up differ, and biases aren't 0, so that a mix-up shows.
    """
    generator = torch.Generator().manual_seed(seed)
    E, H, parts = config.num_experts, config.hidden_size, config.activation.parts
    number = torch.linspace(0.5, 2.0, E)

    def draw(*shape: int, scale: float) -> torch.Tensor:
        dense = torch.randn(E, *shape, generator=generator) * scale
        return dense * number.view(E, *[1] * len(shape))

    gate_up = draw(config.gate_up_rows, H, scale=H**-0.5)
    if parts == 2:
        gate_up[:, config.intermediate_size :] *= 1.5
    down = draw(H, config.intermediate_size, scale=config.intermediate_size**-0.5)
    bias = [draw(config.gate_up_rows, scale=0.3), draw(H, scale=0.3)] if config.bias else [None, None]
    return ExpertWeights(
        encode(config.weight_format, gate_up, parts), encode(config.weight_format, down, 1), bias[0], bias[1]
    )


def shard_weights(full: ExpertWeights, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
    """Returns one rank's share of `full`, of any number format: the experts of its slots, its slice of each.

    Raises:
        ConfigError: the slice would split a scale block.
    """
    width = shard.slice_intermediate(config.intermediate_size)
    parts = config.activation.parts
    local = full.map(lambda tensor: as_bytes(tensor)[list(shard.experts)].view(tensor.dtype))
    bias = local.gate_up_bias
    if bias is not None:
        bias = bias.unflatten(1, (parts, config.intermediate_size))[:, :, width].flatten(1)
    return ExpertWeights(
        _cut(local.gate_up, 1, parts, config.intermediate_size, width),
        _cut(local.down, 2, 1, config.intermediate_size, width),
        bias,
        local.down_bias,
        local.hidden_order,
    )


def layer_of(
    world: World,
    config: MoEConfig,
    full: ExpertWeights,
    runtime: RuntimeConfig,
    placement: ExpertPlacement | None = None,
    **parts: Any,
) -> ExpertParallelMoE:
    """Builds the layer that holds this rank's share of `full`. Collective. `parts`: its router and what else it has."""
    placement = placement or ExpertPlacement(config.num_experts, world.parallel)
    weights = shard_weights(full, config, placement.shard(world.rank))
    return ExpertParallelMoE(config, world, weights, runtime=runtime, placement=placement, **parts)


def _cut(matrix: Matrix, dim: int, parts: int, size: int, width: slice) -> Matrix:
    """Cuts slice `width` of the intermediate dimension `dim` from every tensor that has it, at its own block size."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        of_parts = tensor.dim() == 2 and tensor.shape[1] == parts  # scales of whole parts
        if tensor.dim() <= dim or of_parts or width == slice(0, size):
            return tensor
        blocks = tensor.shape[dim] // parts
        block = FP8_BLOCK if isinstance(matrix, Fp8Block) and tensor is matrix.scale else size / blocks
        start, stop = width.start / block, blocks if width.stop == size else width.stop / block
        if start != int(start) or stop != int(stop):
            raise ConfigError(f"rows {width.start} to {width.stop} of {size} would split a scale block")
        return (
            tensor.unflatten(dim, (parts, blocks)).narrow(dim + 1, int(start), int(stop - start)).flatten(dim, dim + 1)
        )

    return matrix.map(cut)


def expected_outputs(config: MoEConfig, full: ExpertWeights, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """Returns float32 [T, H] for each batch: the sum over a token's valid top-k entries of weight * expert(token).

    One expert at a time is decoded to float32, which bounds the memory that a large checkpoint takes.
    """
    totals = [torch.zeros_like(batch.hidden, dtype=torch.float32) for batch in batches]
    for e in range(config.num_experts):
        chosen = [(batch.topk.ids == e).nonzero(as_tuple=True) for batch in batches]
        if not any(len(token) for token, _ in chosen):
            continue
        gate_up = decode_matrix(full.gate_up.expert(e), config.activation.parts).squeeze(0)
        down = decode_matrix(full.down.expert(e), 1).squeeze(0)
        bias = [None if b is None else b[e] for b in (full.gate_up_bias, full.down_bias)]
        if full.hidden_order is not None:  # back to the hidden states' own columns
            gate_up = gate_up[:, full.hidden_order.argsort()]
        for total, batch, (token, k) in zip(totals, batches, chosen, strict=True):
            y = expert_forward(config, gate_up, down, bias[0], bias[1], batch.hidden[token].float())
            total.index_add_(0, token, batch.topk.weights[token, k, None] * y)
    return totals


def expected_layer_output(parts: LayerParts, batch: Batch, arrived: torch.Tensor | None = None) -> torch.Tensor:
    """Returns float32 [T, H_model]: a whole layer's output, with latent projections and shared expert.

    Args:
        parts: the layer with all its experts (`load_layer` without a ParallelConfig).
        batch: hidden [T, H_model] and its routing, in the model's expert ids.
        arrived: [T, H] tokens as the experts get them, where a packed payload rounds them on the way. None: as they
            are, through the latent projection if there is one.
    """
    x = batch.hidden.float()
    latent = parts.latent
    if arrived is None:
        arrived = x if latent is None else _linear(x, latent.into, latent.into_bias)
    [y] = expected_outputs(parts.config, parts.experts, [Batch(arrived.float(), batch.topk)])
    if latent is not None:
        y = _linear(y, latent.out_of, latent.out_of_bias)
    return y if parts.shared is None else y + _shared(parts.config, parts.shared, x)


def _shared(config: MoEConfig, weights: SharedExpertWeights, x: torch.Tensor) -> torch.Tensor:
    if config.shared is None:
        raise ConfigError("the layer has a shared expert's weights, its config has none")
    first = [w.float() for w in (weights.gate, weights.up) if w is not None]
    like = replace(config, activation=config.shared.activation)
    y = expert_forward(like, torch.cat(first), weights.down.float(), None, None, x)
    return y if weights.output_gate is None else torch.sigmoid(x @ weights.output_gate.float().T) * y


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight.float(), None if bias is None else bias.float())


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ||out - expected|| / ||expected|| in float64: inf for NaN, a wrong infinity or a wrong shape, 0 for empty
    tensors. Infinities that are as expected add nothing to either norm, so that they hide no other value's error."""
    if out.shape != expected.shape:
        return math.inf
    if out.numel() == 0:
        return 0.0
    found, wanted = out.double().cpu(), expected.double().cpu()
    difference = float((found - wanted).masked_fill(found == wanted, 0.0).norm())
    size = float(wanted.masked_fill(wanted.isinf(), 0.0).norm())
    if not math.isfinite(difference):
        return math.inf  # never NaN, over which `max` would pass
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)
