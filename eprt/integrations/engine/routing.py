"""A MoE block's gate and choice of experts in eprt's hands: one product and one choice in place of an engine's kernels.

The gate stays in the model, for its loader, and computes nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from eprt.config import MoEConfig, Routing
from eprt.integrations.engine.bound import BoundLayer, bound_to, mixed
from eprt.layer import ExpertParallelMoE
from eprt.routing import Router

Choice = tuple[torch.Tensor, torch.Tensor]  # weights and ids [T, K]
_GATES = {"ReplicatedLinear", "GateLinear", "TinyGemmLinear"}


def unrouted(experts: Any) -> BoundLayer | None:
    """Returns what eprt runs in an engine's module of experts if it may choose experts, too, and doesn't yet."""
    bound = bound_to(experts)
    layer: ExpertParallelMoE | None = getattr(bound, "layer", None)
    free = layer is not None and layer.router is None and not layer.dispatcher.runtime.batch_invariant
    return bound if free else None


def take_over(
    bound: BoundLayer,
    gate: Any,
    top_k: int,
    *,
    renormalize: bool,
    padding: Callable[[], torch.Tensor | None] | None = None,
) -> Callable[..., Choice] | None:
    """Returns what chooses experts of hidden states [T, H] bf16 by the gate's weight, by a softmax over all experts,
    in place of the engine's own function, whose other arguments it ignores.

    None: the engine keeps the gate, as it isn't plain bf16. The router is the layer's, which isn't warm yet.

    Args:
        padding: returns a call's mask [T or more] bool of tokens that nobody reads, or None where there is none.
    """
    layer, state = bound.layer, bound.state
    router = None if layer is None else _router_of(gate, layer.config, top_k, renormalize)
    if layer is None or router is None:
        return None
    router.padding = padding is not None
    gate.__class__ = mixed(type(gate), _Unread)
    earlier = [other for other in state.built if other.router is not None]
    layer.router, layer.config = router, replace(layer.config, routing=router.routing)
    layer.start_compiling(earlier)
    kernels = router.kernels

    def chosen(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Choice:
        nonlocal kernels
        if gate.weight.data_ptr() != router.weight.data_ptr():  # the engine has put another one in its place
            router.weight, router.bias = gate.weight.data, gate.bias
            kernels = router.kernels
        marked = None if padding is None else padding()
        found = router(hidden_states, None, marked) if kernels is None else kernels.topk(hidden_states, None, marked)
        return found.weights, found.ids

    return chosen


def _router_of(gate: Any, config: MoEConfig, top_k: int, renormalize: bool) -> Router | None:
    plain = type(gate).__name__ in _GATES and type(gate.quant_method).__name__ == "UnquantizedLinearMethod"
    if not plain or gate.skip_bias_add:
        return None
    # Kernels read other dtypes and places from copies. On a CPU vLLM packs a gate's weight, and leaves none.
    weight, shape = gate.weight, (config.num_experts, config.hidden_size)
    if weight.shape != shape or weight.dtype != torch.bfloat16 or weight.data_ptr() % 16:
        return None
    router = Router(
        weight.data,
        Routing("softmax_topk", renormalize=renormalize),
        top_k,
        bias=gate.bias,
        float32_logits=getattr(gate, "out_dtype", None) == torch.float32,
        weights="float32",
    )
    return router if weight.device.type == "cpu" or router.kernels is not None else None


class _Unread:
    """Mixes into a gate whose logits nobody reads."""

    weight: torch.Tensor
    return_bias = True  # where the gate itself doesn't say so, as SGLang's

    def forward(self, x: torch.Tensor) -> Any:
        logits = x.new_empty(x.shape[0], self.weight.shape[0])
        return (logits, None) if self.return_bias else logits
