"""The function between the matrices of an expert, by torch's own operations. The kernels' is in
`eprt.experts.activation_triton`; `eprt.experts.reference` has another of its own, on purpose: it is the oracle."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from eprt.config import Activation


def activated(activation: Activation, gate: torch.Tensor | None, up: torch.Tensor) -> torch.Tensor:
    """`Activation` on whole tensors, in their dtype; formula in its docstring. `gate` None: not gated. Zeros stay
    zeros."""
    if gate is None:
        return F.relu(up).square()
    if activation.kind == "geglu":
        return F.gelu(gate, approximate="tanh") * up
    if activation.limit is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    if (activation.alpha, activation.beta) == (1.0, 0.0):
        return F.silu(gate) * up
    return gate * torch.sigmoid(activation.alpha * gate) * (up + activation.beta)
