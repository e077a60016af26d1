"""A decode loop in plain PyTorch: attention over a cache of its own, and whatever experts it is given.

A padded row that wrote into a live slot of the cache would show in a later step. The experts of a token are those of a
table, so that no rounding changes the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from eprt.config import MoEConfig
from eprt.tokens import TopK

VOCABULARY, LENGTH = 32, 24
SLOTS = 24  # requests a rank can hold
Experts = Callable[[torch.Tensor, TopK], torch.Tensor]


class Decoder:
    """Embedding, then attention over a cache and experts, layer by layer: one token a row, row i in cache slot i."""

    def __init__(self, experts: Sequence[Experts], config: MoEConfig, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(5)
        H, E, K = config.hidden_size, config.num_experts, config.top_k

        def draw(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(device, dtype)

        self.experts = experts
        self.embedding = draw(VOCABULARY, H) * H**0.5
        self.matrices = [(draw(H, H), draw(H, H), draw(H, H)) for _ in experts]
        scores, ids = torch.rand(len(experts), VOCABULARY, E, generator=generator).topk(K)
        self.ids, self.weights = ids.int().to(device), scores.to(device)
        self.cache = torch.zeros(len(experts), 2, SLOTS, LENGTH, H, dtype=dtype, device=device)
        self.slots = torch.arange(SLOTS, device=device)
        self.positions = torch.arange(LENGTH, device=device)
        self.calls: list[int] = []

    def __call__(self, token: torch.Tensor, position: torch.Tensor) -> dict[str, Any]:
        """[rows] ids and positions -> {"last": [rows, H], "each": one [rows, H] a layer}."""
        rows = token.shape[0]
        self.calls.append(rows)
        x, each = self.embedding[token], []
        for number, (experts, (q, k, v)) in enumerate(zip(self.experts, self.matrices, strict=True)):
            cache = self.cache[number]
            for kind, matrix in enumerate((k, v)):
                cache[kind].index_put_((self.slots[:rows], position), x @ matrix)
            scores = torch.einsum("rh,rlh->rl", x @ q, cache[0, :rows]) * x.shape[1] ** -0.5
            scores = scores.masked_fill(self.positions > position[:, None], -math.inf)
            x = x + torch.einsum("rl,rlh->rh", scores.softmax(-1), cache[1, :rows])
            x = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(x.dtype)
            x = x + experts(x, TopK(self.ids[number][token], self.weights[number][token]))
            each.append(x)
        return {"last": x, "each": each}


class Requests:
    """What a rank feeds: slot i's next token and position. Rows without one go to the last position, which nobody
    reads."""

    def __init__(self, rank: int) -> None:
        self.generator = torch.Generator().manual_seed(100 + rank)
        self.lengths = torch.zeros(SLOTS, dtype=torch.int64)

    def step(self, count: int, device: torch.device) -> dict[str, torch.Tensor]:
        token = torch.randint(VOCABULARY, (count,), generator=self.generator)
        position = self.lengths[:count].clone()
        self.lengths[:count] += 1
        return {"token": token.to(device), "position": position.to(device)}


EMPTY_ROW = {"token": 0, "position": LENGTH - 1}
