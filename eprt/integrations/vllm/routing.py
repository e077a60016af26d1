"""Routes in vLLM's place where its MoE runner holds the gate: one product and one choice instead of four kernels.

The runner's op calls the gate, then its router's choice (`fused_moe/runner/moe_runner.py`). What models compute before
that op is part of vLLM's compiled graph, so a gate that a model calls itself (gpt-oss) stays vLLM's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from eprt.config import Routing
from eprt.routing import Router

GATES = {"ReplicatedLinear", "GateLinear"}


def router_of(runner: Any, hidden_size: int) -> Router | None:
    """Returns a Router of the weight that the runner's gate has, or None where vLLM keeps gate and choice: a gate
    outside of the runner, that isn't plain bf16 or also feeds the shared expert, or any choice but plain softmax."""
    gate: Any = getattr(runner, "gate", None)
    choice: Any = getattr(runner, "router", None)
    weight = getattr(gate, "weight", None)
    plain = type(gate).__name__ in GATES and type(gate.quant_method).__name__ == "UnquantizedLinearMethod"
    softmax = type(choice).__name__ == "FusedTopKRouter" and choice.scoring_func == "softmax"
    if not (plain and softmax) or choice.eplb_state is not None:
        return None
    if getattr(runner, "_fse_fuse_gate", False) or gate.skip_bias_add:
        return None
    # Kernels read other dtypes and places from copies. On a CPU vLLM packs a gate's weight, and leaves none.
    shape = choice.global_num_experts, hidden_size
    if weight is None or weight.shape != shape or weight.dtype != torch.bfloat16 or weight.data_ptr() % 16:
        return None
    router = Router(
        weight.data,
        Routing("softmax_topk", renormalize=choice.renormalize),
        choice.top_k,
        bias=gate.bias,
        float32_logits=getattr(gate, "out_dtype", None) == torch.float32,
        weights="float32",
    )
    return router if weight.device.type == "cpu" or router.kernels is not None else None


def take_over(runner: Any, router: Router) -> None:
    """Lets the runner's gate pass hidden states on, and its router choose by them. What vLLM records of a choice, it
    still records."""
    gate, kernels = runner.gate, router.kernels

    def chosen(hidden_states: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal kernels
        if gate.weight.data_ptr() != router.weight.data_ptr():  # vLLM has put another one in its place
            router.weight = gate.weight.data
            kernels = router.kernels
        found = router(hidden_states) if kernels is None else kernels.topk(hidden_states, None)
        return found.weights, found.ids

    runner.gate = _PassedOn()
    runner.router._compute_routing = chosen


class _PassedOn(nn.Module):
    """Stands where the gate was."""

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, None]:
        return hidden_states, None
