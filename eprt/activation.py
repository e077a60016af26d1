"""The function between the matrices of an expert, by torch's own operations. The kernels' is in
`eprt.experts.activation_triton`; `eprt.experts.reference` has another of its own, on purpose: it is the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.config import Activation

CHUNK = 1 << 21  # float32 values at a time: 8 MB, which stay in a GPU's L2 from one operation to the next


def activated(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """`Activation` on whole tensors, in their dtype; formula in its docstring. `gate` None: not gated. Zeros stay
    zeros."""
    if gate is None:
        return F.relu(up).square()
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if (activation.alpha, activation.beta) == (1.0, 0.0):
        return F.silu(gate) * up
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)


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
