"""The function between the two matrices of an expert, for executors whose GEMMs don't end in it."""

from __future__ import annotations

import torch

from eprt.activation import activated
from eprt.config import Activation

CHUNK = 1 << 21  # float32 values at a time: 8 MB, which stay in a GPU's L2 from one operation to the next


def activate(activation: Activation, hidden: torch.Tensor) -> torch.Tensor:
    """[..., parts * I] float32 -> [..., I] float32; the formula of `eprt.config.Activation`. Zeros stay zeros."""
    gate, up = hidden.chunk(2, dim=-1) if activation.gated else (None, hidden)
    return activated(activation, gate, up)


def activate_slabs(activation: Activation, wide: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """[L, M, parts * I] -> [L, M, I] of the same dtype, computed in float32, rows below counts [L] int32 alone: others
    are garbage. Contiguous."""
    L, M, width = wide.shape
    narrow = torch.empty((L, M, width // activation.parts), dtype=wide.dtype, device=wide.device)
    if wide.is_cuda:
        from eprt.experts import activation_triton

        activation_triton.activate_slabs(activation, wide, counts, narrow)
        return narrow
    valid = torch.arange(M) < counts[:, None]
    narrow[valid] = activate(activation, wide[valid].float()).to(wide.dtype)
    return narrow
