"""Experts on ranks that the World goes on without: tokens do without them."""

from __future__ import annotations

import torch

from eprt.config import ParallelConfig
from eprt.tokens import TopK


class LostExperts:
    """The physical expert slots on lost ranks, and how tokens do without them.

    Args:
        alive: [W]
        num_experts: E slots, EP rank by EP rank. One whose MoE-TP ranks aren't all there is lost as a whole.
        renormalize: scale a token's other weights to the sum that all of them had.
    """

    def __init__(
        self,
        alive: tuple[bool, ...],
        parallel: ParallelConfig,
        num_experts: int,
        device: torch.device,
        renormalize: bool,
    ) -> None:
        size, each = parallel.moe_tp_size, num_experts // parallel.ep_size
        gone = [not all(alive[first : first + size]) for first in range(0, len(alive), size) for _ in range(each)]
        self._gone = torch.tensor([*gone, False], device=device)
        self._none, self._renormalize = num_experts, renormalize

    def left_out(self, topk: TopK) -> TopK:
        """[T, K] without the entries whose slot is lost: they name no expert. No host sync."""
        ids = torch.where(self._gone[topk.ids.long().clamp(0, self._none)], self._none, topk.ids)
        if not self._renormalize:
            return TopK(ids, topk.weights)
        had, has = (topk.weights.masked_fill(i == self._none, 0).sum(1, keepdim=True) for i in (topk.ids, ids))
        return TopK(ids, topk.weights * torch.where(has == 0, 1.0, had / has))
