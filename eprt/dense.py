"""The dense parts, which every token meets on its own rank: the shared expert and the latent projections."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from eprt.activation import activated
from eprt.config import SharedExpert
from eprt.weights import LatentWeights, SharedExpertWeights


class SharedExpertMLP(nn.Module):
    """The shared expert on local tokens: `down(act(gate(x)) * up(x))`, scaled by a sigmoid gate where there is one.

    `weights` have passed their `check`.
    """

    up: torch.Tensor
    down: torch.Tensor
    gate: torch.Tensor | None
    output_gate: torch.Tensor | None

    def __init__(self, config: SharedExpert, weights: SharedExpertWeights) -> None:
        super().__init__()
        self.activation = config.activation
        for name in ("up", "down", "gate", "output_gate"):
            self.register_buffer(name, getattr(weights, name))

    @property
    def dtype(self) -> torch.dtype:
        return self.up.dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = F.linear(x, self.up)
        gate = None if self.gate is None else F.linear(x, self.gate)
        y = F.linear(activated(self.activation, gate, up), self.down)
        return y if self.output_gate is None else torch.sigmoid(F.linear(x, self.output_gate)) * y


class LatentProjection(nn.Module):
    """Into and out of the width the experts live in. `weights` have passed their `check`."""

    inward: torch.Tensor
    outward: torch.Tensor
    inward_bias: torch.Tensor | None
    outward_bias: torch.Tensor | None

    def __init__(self, weights: LatentWeights) -> None:
        super().__init__()
        self.register_buffer("inward", weights.into)
        self.register_buffer("outward", weights.out_of)
        self.register_buffer("inward_bias", weights.into_bias)
        self.register_buffer("outward_bias", weights.out_of_bias)

    @property
    def dtype(self) -> torch.dtype:
        return self.inward.dtype

    def into(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.inward, self.inward_bias)

    def out_of(self, y: torch.Tensor) -> torch.Tensor:
        return F.linear(y, self.outward, self.outward_bias)
