"""Compiles what a layer's experts and its routing need before its first call."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

import torch

from eprt.config import MoEConfig
from eprt.dispatch import Dispatcher
from eprt.experts import Executor
from eprt.routing import Router
from eprt.routing import warmup as warmup_routing


def compile_kernels(
    config: MoEConfig, dispatcher: Dispatcher, executor: Executor, router: Router | None, *, wait: bool
) -> None:
    """Compiles kernels in several processes and loads them; or starts to, if it isn't to wait for them.

    Args:
        config: the layer's own; the dispatcher's counts slots as experts.
    """
    device, most = dispatcher.world.device, dispatcher.capacity.max_tokens_per_rank
    routing = partial(warmup_routing, config, router, most, device, logits=executor.takes_logits)
    along = nullcontext()
    if device.type == "cuda":
        from eprt.compile_ahead import compiled_along  # needs Triton

        along = compiled_along(routing, load=wait)
    with along:
        compiled = executor.warmup if wait else executor.start_compiling
        compiled(dispatcher.max_rows(), dispatcher.spec.padded_top_k(config.top_k))
    if wait:
        routing()


def recorded_dtype(
    config: MoEConfig, router: Router | None, accepted: Sequence[tuple[torch.dtype, str]]
) -> torch.dtype:
    """Returns the dtype of the tokens that a layer's graphs record: what its parts take, or else its experts'.

    Args:
        accepted: the only dtype that other parts of the layer than the router take, if any.
    """
    if accepted:
        return accepted[0][0]
    if router is not None and not router.float32_logits:
        return router.weight.dtype
    return torch.float32 if config.weight_format == "f32" else torch.bfloat16
