"""All-gather + reduce-scatter: every rank receives every token, padded to R, and computes its own experts' share.

No routing of payload, so it costs W * R rows whatever the routing; in exchange it has static shapes (CUDA graphs at a
fixed R), works for any placement, and needs nothing beyond the process group. A world of one moves nothing.
"""

from __future__ import annotations

import torch

from eprt.dispatch.base import Dispatcher
from eprt.dispatch.call import Handle, Traffic
from eprt.tokens import FlatTokens, Payload, TopK


class AllGatherDispatcher(Dispatcher):
    """Emits `W * R` flat rows, rank by rank; top-k entries of absent tokens and of other ranks' experts hold E."""

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens:
        E = self.config.num_experts
        if self.world.size == 1:
            handle.traffic = Traffic()
            return FlatTokens(hidden, topk.ids, topk.weights, E, every_row_read=True)
        R = handle.tokens_per_rank
        # One int32 row a token carries ids and the weights' bits, so routing costs one collective.
        routing = torch.cat([topk.ids, topk.weights.view(torch.int32)], dim=1)
        all_hidden = hidden.mapped(lambda x: self._gather(x, R))
        ids, weights = self._gather(routing, R, padding=E).split(self.config.top_k, dim=1)
        ids = torch.where((ids >= self.shard.first_expert) & (ids < self.shard.end_expert), ids, E)
        rows = R * (sum(self.world.alive) - 1)
        handle.traffic = Traffic.of(rows, rows, hidden, routing, self.config.hidden_size * handle.dtype.itemsize)
        return FlatTokens(all_hidden, ids, weights.contiguous().view(torch.float32), E, every_row_read=True)

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        output = expert_output.to(handle.dtype)
        if self.world.size > 1:
            own = output.new_empty((handle.tokens_per_rank, output.shape[1]))
            self.world.reduce_scatter(own, output)
            output = own
        return output[: handle.num_tokens]

    def _gather(self, x: torch.Tensor, R: int, padding: int | None = None) -> torch.Tensor:
        """Gathers [T, n] of each rank to [W * R, n]. Padding rows are garbage unless a fill is given."""
        if x.shape[0] != R:
            padded = x.new_empty((R, x.shape[1]))
            padded[: x.shape[0]] = x
            if padding is not None:
                padded[x.shape[0] :] = padding
            x = padded
        out = x.new_empty((self.world.size * R, x.shape[1]))
        self.world.all_gather(out, x.contiguous(), missing=padding or 0)
        return out
