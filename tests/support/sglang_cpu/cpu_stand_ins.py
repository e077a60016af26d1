"""A plugin of SGLang that mends what its CPU backend lacks without AMX; it touches nothing of its MoE layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.nn.functional import rms_norm


def register() -> None:
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.quantization import fp8, mxfp4
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.model_executor.model_runner_components import attention_backend_setup
    from sglang.srt.models import minimax_m2, qwen2_moe

    torch.tensor, torch.zeros = _unpinned(torch.tensor), _unpinned(torch.zeros)
    torch.Tensor.pin_memory = lambda tensor, *args: tensor
    common._cuda_host_register = lambda *args: None  # memory that 0.5.23 pins itself
    for graphs in ("cuda", "cpu"):  # torch_native has none; 0.5.23 asks for the latter
        setattr(AttentionBackend, f"get_{graphs}_graph_seq_len_fill_value", lambda self: 1)
    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, _without_sinks(getattr(TorchNativeAttnBackend, name)))
    fp8.Fp8LinearMethod.__new__ = lambda *args: UnquantizedLinearMethod()  # a CPU has no kernels for it
    qwen2_moe.fused_gate_sigmoid_mul_add = _gated
    minimax_m2.MiniMaxM2QKRMSNorm.forward = _normed
    forward_batch_info.ForwardBatch._pad_inputs_to_size = _placed(forward_batch_info.ForwardBatch._pad_inputs_to_size)
    dp_attention.memcpy_triton = _copied  # 0.5.23 has its own for a CPU
    # Imports kernels of linear attention, which the tests' Qwen3-Next hasn't got.
    attention_backend_setup.attn_backend_wrapper = lambda runner, full: full
    with mock.patch("sglang.srt.utils.is_cpu", return_value=False):  # else it looks for operators of AMX
        from sglang.srt.models import qwen3_5
    qwen3_5.fused_sigmoid_mul = _gated_heads
    mxfp4.has_triton_kernels = True  # pads experts as for these kernels, which nobody calls
    # gpt-oss is refused with torch_native's name; SGLang's own backend for CPUs wants AMX.
    ATTENTION_BACKENDS["intel_amx"] = TorchNativeAttnBackend


def _unpinned(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Memory can be pinned for an accelerator alone."""
    return lambda *args, pin_memory=False, **kwargs: plain(*args, **kwargs)


def _gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Adds a shared expert behind its gate to what the routed ones say, for which SGLang has a Triton kernel alone."""
    routed += torch.sigmoid(hidden @ gate)[:, None] * shared


def _gated_heads(heads: torch.Tensor, gate: torch.Tensor, *, inplace: bool) -> torch.Tensor:
    """Multiplies what attention says [T, heads x head_dim] by the sigmoid of its gate, [T, heads, head_dim] or so."""
    return heads.mul_(torch.sigmoid(gate.reshape(heads.shape)))


def _normed(norms: Any, *heads: torch.Tensor) -> list[torch.Tensor]:
    """Normalizes queries over all heads, and keys, for which SGLang has kernels of Triton and for AMX alone."""
    pairs = zip(heads, (norms._q_norm, norms._k_norm), strict=True)
    return [rms_norm(each, each.shape[-1:], norm.weight, norm.variance_epsilon) for each, norm in pairs]


def _placed(pad: Callable[..., None]) -> Callable[..., None]:
    """Gives an idle rank's rows positions, which have three axes in models with images. SGLang 0.5.17 forgets them in
    steps without a CUDA graph."""

    def padded(batch: Any, runner: Any, *sizes: int) -> None:
        if batch.mrope_positions is None and runner.model_config.model_is_mrope:
            batch.mrope_positions = torch.zeros(3, len(batch.positions), dtype=torch.int64)
        pad(batch, runner, *sizes)

    return padded


def _copied(to: torch.Tensor, source: torch.Tensor, _: int, at: int, rows: int, reads_at: bool) -> None:
    """Copies a rank's rows, which begin at `at` among those of all ranks, to there or from there."""
    own, among_all = slice(rows), slice(at, at + rows)
    to[own if reads_at else among_all] = source[among_all if reads_at else own]


def _without_sinks(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Drops attention sinks: they take no weight in the tests' checkpoint."""

    @functools.wraps(forward)
    def attend(*args: Any, sinks: Any = None, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **kwargs)

    return attend
