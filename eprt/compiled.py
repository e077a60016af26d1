"""The layer as one operator of torch.compile: `torch.ops.eprt.moe_layer`.

What a layer does on the host (checks, exchanges, launches that depend on what the ranks agree on) can't be traced and
must not be: the compiler sees one opaque call, keeps it, and never puts it into a CUDA graph of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.fx.node import has_side_effect

from eprt.errors import InputError, UsageError
from eprt.tokens import RouterLogits, TopK

_LAYERS: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = itertools.count()


def register(layer: object) -> int:
    """Returns a number by which the operator finds the layer as long as it lives; it is never used again."""
    number = next(_numbers)
    _LAYERS[number] = layer
    return number


@torch.library.custom_op("eprt::moe_layer", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def moe_layer(
    hidden_states: torch.Tensor,
    number: int,
    topk_ids: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    logits: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    tokens_per_rank: int | None,
) -> torch.Tensor:
    """Calls the layer with that number as `ExpertParallelMoE.forward` is called."""
    layer: Any = _LAYERS.get(number)
    if layer is None:
        raise UsageError(f"compiled code calls layer {number}, which is gone: keep the layer, or compile again")
    routing: TopK | RouterLogits | None = None
    if topk_ids is not None and topk_weights is not None:
        routing = TopK(topk_ids, topk_weights)
    elif logits is not None:
        routing = RouterLogits(logits)
    # Of a module not the whole call: its hooks ran in the compiled code, which `layer.compile()` makes its call.
    forward: Callable[..., torch.Tensor] = getattr(layer, "forward", layer)
    output = forward(hidden_states, routing, token_ids=token_ids, tokens_per_rank=tokens_per_rank)
    return output.contiguous()


@moe_layer.register_fake
def _(hidden_states: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


# A rank that doesn't use the output takes part all the same.
has_side_effect(torch.ops.eprt.moe_layer.default)


@torch.library.custom_op("eprt::refuse_backward", mutates_args=())
def refuse_backward(gradient: torch.Tensor) -> torch.Tensor:
    """Raises UsageError. It is an operator because a compiler traces a backward pass before anybody asks for it."""
    raise UsageError(
        "backward through an expert-parallel layer: it is for inference and has no gradient; call the model under "
        "torch.no_grad(), or train it without eprt"
    )


@refuse_backward.register_fake
def _(gradient: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(gradient)


def call(
    number: int,
    hidden_states: torch.Tensor,
    routing: TopK | RouterLogits | None,
    token_ids: torch.Tensor | None,
    tokens_per_rank: int | None,
) -> torch.Tensor:
    """Calls the operator in place of `forward` while that is traced."""
    ids, weights = (routing.ids, routing.weights) if isinstance(routing, TopK) else (None, None)
    logits = routing.logits if isinstance(routing, RouterLogits) else None
    if routing is not None and logits is None and (ids is None or weights is None):  # the operator would see none
        raise InputError(f"routing is a {type(routing).__name__}: expected TopK, RouterLogits or None, with tensors")
    return moe_layer(hidden_states, number, ids, weights, logits, token_ids, tokens_per_rank)
