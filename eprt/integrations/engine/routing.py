"""A MoE block's gate and choice of experts in eprt's hands: one product and one choice in place of an engine's kernels.

The gate stays in the model, for its loader, and computes nothing from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from eprt.config import MoEConfig, Routing
from eprt.errors import ConfigError
from eprt.integrations.engine.bound import BoundLayer, bound_to, mixed
from eprt.layer import ExpertParallelMoE
from eprt.routing import Router

Choice = tuple[torch.Tensor, torch.Tensor]  # weights and ids [T, K]
_LINEAR = {"ReplicatedLinear", "GateLinear", "TinyGemmLinear"}
_BARE = {"Linear", "MoEGate", "Glm4MoeGate", "Glm4MoeLiteGate"}  # torch's and SGLang's that return logits alone


def unrouted(experts: Any) -> BoundLayer | None:
    """Returns what eprt runs in an engine's module of experts if it may choose experts, too, and doesn't yet."""
    bound = bound_to(experts)
    layer: ExpertParallelMoE | None = getattr(bound, "layer", None)
    free = layer is not None and layer.router is None and not layer.dispatcher.runtime.batch_invariant
    return bound if free else None


def biased_sigmoid(renormalize: bool, groups: tuple[int, int], scaling_factor: float) -> Routing | None:
    """Returns the choice by a sigmoid with a bias; None for numbers with which there is none.

    Args:
        groups: how many there are, and how many of them a token's experts come from.
    """
    with suppress(ConfigError):
        return Routing("grouped_sigmoid", renormalize, *groups, scaling_factor=scaling_factor)
    return None


def take_over(
    bound: BoundLayer,
    gate: Any,
    top_k: int,
    routing: Routing,
    *,
    correction: torch.Tensor | None = None,
    padding: Callable[[], torch.Tensor | None] | None = None,
) -> Callable[..., Choice] | None:
    """Returns what chooses experts of hidden states [T, H] by the gate's weight, in place of the engine's own
    function, whose other arguments it ignores.

    None: the engine keeps the gate, as it isn't plain bf16 or float32. The router is the layer's, which isn't warm yet.

    Args:
        routing: `softmax_topk`, or `grouped_sigmoid`, whose logits are float32 as in the models' own code.
        correction: [E], added to scores for the choice alone. The engine writes new numbers into it.
        padding: returns a call's mask [T or more] bool of tokens that nobody reads, or None where there is none.
    """
    layer, state = bound.layer, bound.state
    router = None if layer is None else _router_of(gate, layer.config, top_k, routing, correction)
    if layer is None or router is None:
        return None
    router.padding = padding is not None
    gate.__class__ = mixed(type(gate), _Unread if type(gate).__name__ in _LINEAR else _BareUnread)
    earlier = [other for other in state.built if other.router is not None]
    layer.router, layer.config = router, replace(layer.config, routing=router.routing)
    layer.start_compiling(earlier)
    kernels = router.kernels

    def chosen(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Choice:
        nonlocal kernels
        # The engine has put another one in its place.
        if gate.weight.data_ptr() != router.weight.data_ptr() or _moved(correction, router.correction_bias):
            router.weight, router.bias = gate.weight.data, getattr(gate, "bias", None)
            router.correction_bias = None if correction is None else correction.data
            kernels = router.kernels
        marked = None if padding is None else padding()
        # A float32 gate may get float16 tokens, which the kernels don't read.
        choose = router if kernels is None or hidden_states.dtype != torch.bfloat16 else kernels.topk
        found = choose(hidden_states, None, marked)
        return found.weights, found.ids

    return chosen


def _moved(correction: torch.Tensor | None, held: torch.Tensor | None) -> bool:
    return correction is not None and held is not None and correction.data_ptr() != held.data_ptr()


def _router_of(
    gate: Any, config: MoEConfig, top_k: int, routing: Routing, correction: torch.Tensor | None
) -> Router | None:
    kind, method = type(gate).__name__, type(getattr(gate, "quant_method", None)).__name__
    linear = kind in _LINEAR and method == "UnquantizedLinearMethod" and not gate.skip_bias_add
    packed = getattr(gate, "use_intel_amx_backend", False)  # by SGLang, into its own order
    if packed or (not linear and (kind not in _BARE or method != "NoneType")):
        return None
    # Kernels read other dtypes and places from copies. On a CPU vLLM packs a gate's weight, and leaves none.
    weight, shape = gate.weight, (config.num_experts, config.hidden_size)
    read = weight.dtype in (torch.bfloat16, torch.float32) and weight.is_contiguous() and not weight.data_ptr() % 16
    if weight.shape != shape or not read:
        return None
    float32 = weight.dtype == torch.float32 or getattr(gate, "out_dtype", None) == torch.float32
    try:
        router = Router(
            weight.data,
            routing,
            top_k,
            bias=getattr(gate, "bias", None),
            correction_bias=None if correction is None else correction.data,
            float32_logits=float32 or routing.method == "grouped_sigmoid",
            weights="float32",
        )
    except ConfigError:  # groups of unequal size, which engines don't count
        return None
    return router if weight.device.type == "cpu" or router.kernels is not None else None


class _Unread:
    """Mixes into a gate whose logits nobody reads."""

    weight: torch.Tensor
    return_bias = True  # where the gate itself doesn't say so, as SGLang's

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> Any:
        logits = x.new_empty(x.shape[0], self.weight.shape[0])
        return (logits, None) if self.return_bias else logits


class _BareUnread(_Unread):
    return_bias = False
