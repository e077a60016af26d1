"""What the layer must return, computed in one process from every rank's input: no dispatcher, no shards, float32.

The formulas come from `eprt.experts.reference`, whose own numbers are held by hand-written tables.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from eprt.config import MoEConfig
from eprt.conformance.cases import SEED, Batch
from eprt.errors import ConfigError
from eprt.experts.reference import decode_matrix, expert_forward
from eprt.placement import ExpertShard
from eprt.quant import encode
from eprt.weights import ExpertWeights, Matrix


def full_weights(config: MoEConfig, seed: int = SEED) -> ExpertWeights:
    """All E experts, unsharded, on CPU. Expert e is scaled by its own number, gate and up differ, biases aren't 0."""
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
    """One rank's share of `full`, of any number format. Raises ConfigError if a cut would split a scale block."""
    width = shard.slice_intermediate(config.intermediate_size)
    parts = config.activation.parts
    local = full.map(lambda tensor: tensor[shard.first_expert : shard.end_expert])
    bias = local.gate_up_bias
    if bias is not None:
        bias = bias.unflatten(1, (parts, config.intermediate_size))[:, :, width].flatten(1)
    return ExpertWeights(
        _cut(local.gate_up, 1, parts, config.intermediate_size, width),
        _cut(local.down, 2, 1, config.intermediate_size, width),
        bias,
        local.down_bias,
    )


def _cut(matrix: Matrix, dim: int, parts: int, size: int, width: slice) -> Matrix:
    """Slice `width` of the intermediate dimension `dim` in every tensor that has it, each at its own block size."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 3 or width == slice(0, size):
            return tensor
        blocks = tensor.shape[dim] // parts
        start, stop = (edge * blocks / size for edge in (width.start, width.stop))
        if start != int(start) or stop != int(stop):
            raise ConfigError(f"rows {width.start} to {width.stop} of {size} would split a scale block")
        return (
            tensor.unflatten(dim, (parts, blocks)).narrow(dim + 1, int(start), int(stop - start)).flatten(dim, dim + 1)
        )

    return matrix.map(cut)


def expected_outputs(config: MoEConfig, full: ExpertWeights, batches: Sequence[Batch]) -> list[torch.Tensor]:
    """float32 [T, H] for each batch: sum over a token's valid slots of weight * expert(token)."""
    gate_up, down = decode_matrix(full.gate_up, config.activation.parts), decode_matrix(full.down, 1)
    outputs: list[torch.Tensor] = []
    for batch in batches:
        x, ids, weights = batch.hidden.float(), batch.topk.ids, batch.topk.weights
        total = torch.zeros_like(x)
        for e in range(config.num_experts):
            token, k = (ids == e).nonzero(as_tuple=True)
            bias = [None if b is None else b[e] for b in (full.gate_up_bias, full.down_bias)]
            one = expert_forward(config, gate_up[e], down[e], bias[0], bias[1], x[token])
            total.index_add_(0, token, weights[token, k, None] * one)
        outputs.append(total)
    return outputs


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """||out - expected|| / ||expected|| in float64. NaN anywhere, or a wrong shape: inf. Nothing to compare: 0."""
    if out.shape != expected.shape:
        return math.inf
    if out.numel() == 0:
        return 0.0
    difference = float((out.double().cpu() - expected.double().cpu()).norm())
    size = float(expected.double().norm())
    if math.isnan(difference):
        return math.inf
    return difference / size if size else (0.0 if difference == 0.0 else math.inf)
