"""What a layer's experts and its routing compile before its first call."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING

from eprt.routing import warmup as warmup_routing

if TYPE_CHECKING:
    from eprt.layer import ExpertParallelMoE


def compile_kernels(layer: ExpertParallelMoE, *, wait: bool) -> None:
    """Compiles kernels in several processes and loads them; or starts to, if it isn't to wait for them."""
    top_k = layer.dispatcher.spec.padded_top_k(layer.config.top_k)
    what = layer.config, layer.router, layer.dispatcher.capacity.max_tokens_per_rank, layer.world.device
    routing = partial(warmup_routing, *what, logits=layer.executor.takes_logits)
    along = nullcontext()
    if layer.world.device.type == "cuda":
        from eprt.compile_ahead import compiled_along  # needs Triton

        along = compiled_along(routing, load=wait)
    with along:
        compiled = layer.executor.warmup if wait else layer.executor.start_compiling
        compiled(layer.dispatcher.max_rows(), top_k)
    if wait:
        routing()
