"""The executor for experts whose maths no executor of eprt computes: transformers' own code, on this rank's experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from eprt.config import MoEConfig
from eprt.expert_major import flat_from_expert_major
from eprt.experts.base import Executor, ExecutorSpec, on_contiguous_rows
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertShard
from eprt.quant import decode_payload
from eprt.tokens import ExpertMajorTokens, FlatTokens

SPEC = ExecutorSpec(
    name="transformers",
    path="eprt.integrations.transformers.own_code:OwnCodeExecutor",
    summary="the model's own experts module, for maths that no executor computes",
    formats=("flat", "expert_major"),
    weights=("bf16", "f32"),
    devices=("cpu", "cuda"),
)


class OwnCodeExecutor(Executor):
    """Calls an experts module with local ids; entries without a local expert have the id L and weight 0.

    Args:
        experts: the module, which gets `tensors` as its parameters.
        tensors: [L, ...] own experts, as the module lays them out, by name.
    """

    spec = SPEC

    def __init__(
        self,
        experts: Any,
        tensors: dict[str, torch.Tensor],
        config: MoEConfig,
        shard: ExpertShard,
        device: torch.device,
    ) -> None:
        self.config, self.shard = config, shard
        self._experts = experts
        self._forward = type(experts).forward
        for name, tensor in tensors.items():
            experts._parameters[name] = nn.Parameter(tensor.to(device), requires_grad=False)
        self._dtype = experts.down_proj.dtype
        experts.num_experts = shard.num_local_experts
        experts._is_expert_parallel = True

    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        if isinstance(tokens, FlatTokens):
            self._flat(tokens, out)
        else:
            on_contiguous_rows(self._as_flat, tokens, out)

    def _as_flat(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        self._flat(flat_from_expert_major(tokens, self.shard), out.flatten(0, 1))

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        L = self.shard.num_local_experts
        local = tokens.ids.long() - self.shard.first_expert
        own = (local >= 0) & (local < L)
        some = own.any(dim=1, keepdim=True)
        # Rows without a local expert are garbage: transformers multiplies by weight 0, which NaN would survive.
        hidden = torch.where(some, decode_payload(tokens.hidden).to(self._dtype), 0)
        weights = torch.where(own, tokens.weights, 0.0).to(self._dtype)
        out.copy_(self._forward(self._experts, hidden, torch.where(own, local, L), weights))


def use_own_code(layer: ExpertParallelMoE, experts: Any, tensors: dict[str, torch.Tensor]) -> None:
    """Replaces the layer's executor by the module's own code."""
    shard, device = layer.dispatcher.shard, layer.world.device
    layer.executor = OwnCodeExecutor(experts, tensors, layer.executor.config, shard, device)
    layer.engines = []
    layer.plan = replace(layer.plan, executor=SPEC.name, reason=SPEC.summary)
