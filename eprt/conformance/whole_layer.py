"""What a whole MoE layer must return for tokens whose routing is known: experts, latent projections, shared expert.

One process, float32, all experts of the checkpoint: no shard, no dispatcher, no executor takes part.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from eprt.config import MoEConfig
from eprt.conformance.cases import Batch
from eprt.conformance.oracle import expected_outputs
from eprt.errors import ConfigError
from eprt.experts.reference import expert_forward
from eprt.models import LayerParts
from eprt.tokens import TopK
from eprt.weights import SharedExpertWeights

# Experts decoded to float32 at a time: bounds the memory that a large checkpoint takes.
_EXPERTS_AT_ONCE = 8


def expected_layer_output(parts: LayerParts, batch: Batch, arrived: torch.Tensor | None = None) -> torch.Tensor:
    """float32 [T, H_model].

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
    y = _routed(parts, Batch(arrived.float(), batch.topk))
    if latent is not None:
        y = _linear(y, latent.out_of, latent.out_of_bias)
    return y if parts.shared is None else y + _shared(parts.config, parts.shared, x)


def _routed(parts: LayerParts, batch: Batch) -> torch.Tensor:
    """The experts' weighted sum. It is linear in the experts, so a few of them at a time do."""
    total = torch.zeros_like(batch.hidden)
    E = parts.config.num_experts
    for first in range(0, E, _EXPERTS_AT_ONCE):
        end = min(first + _EXPERTS_AT_ONCE, E)
        some = (batch.topk.ids >= first) & (batch.topk.ids < end)
        if not some.any():
            continue
        count = end - first
        config = replace(
            parts.config,
            num_experts=count,
            top_k=min(parts.config.top_k, count),
            routing=replace(parts.config.routing, num_groups=1, topk_groups=1),
        )
        ids = torch.where(some, batch.topk.ids - first, count)
        weights = parts.experts.map(lambda tensor, rows=slice(first, end): tensor[rows])
        total += expected_outputs(config, weights, [Batch(batch.hidden, TopK(ids, batch.topk.weights))])[0]
    return total


def _shared(config: MoEConfig, weights: SharedExpertWeights, x: torch.Tensor) -> torch.Tensor:
    if config.shared is None:
        raise ConfigError("the layer has a shared expert's weights, its config has none")
    first = [w.float() for w in (weights.gate, weights.up) if w is not None]
    like = replace(config, activation=config.shared.activation)
    y = expert_forward(like, torch.cat(first), weights.down.float(), None, None, x)
    return y if weights.output_gate is None else torch.sigmoid(x @ weights.output_gate.float().T) * y


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    y = x @ weight.float().T
    return y if bias is None else y + bias.float()
