"""A plugin of SGLang that mends what its CPU backend lacks without AMX; it touches nothing of its MoE layers."""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    plain = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return plain(*args, **kwargs)  # memory is pinned for an accelerator alone

    torch.tensor = tensor
    path = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value"
    HookRegistry.register(path, lambda self: 1, HookType.REPLACE)  # torch_native has none
