"""`all_to_all_single`: a token travels once to each rank that holds one of its experts; sums come back pre-reduced.

Works on gloo and NCCL for any placement. The split sizes are read on the host (a sync on CUDA), so it isn't for CUDA
graphs; it is the transport that runs anywhere, and the one that emits either token format.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from eprt.dispatch.base import Dispatcher
from eprt.dispatch.call import CallState, Handle, Traffic
from eprt.expert_major import ExpertMajorIndex, expert_major_from_flat, weighted_sum_to_flat
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, TopK


@dataclass(frozen=True)
class _Route(CallState):
    """One call's geometry.

    Attributes:
        token: [S] int64, the local token of each sent row, rows ordered by destination rank.
        send, receive: rows to and from each rank.
        index: where rows went in the slabs, for ExpertMajorTokens.
    """

    token: torch.Tensor
    send: list[int]
    receive: list[int]
    index: ExpertMajorIndex | None = None


class AllToAllDispatcher(Dispatcher):
    """Emits one flat row per received (token, source rank) pair, ordered by source rank, or slabs of those."""

    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens | ExpertMajorTokens:
        E, W = self.config.num_experts, self.world.size
        home = torch.where(topk.ids < E, topk.ids // self.placement.num_local_experts, -1)
        ep_rank = torch.arange(W, device=home.device) // self.world.parallel.moe_tp_size
        wanted = (home[None] == ep_rank[:, None, None]).any(-1)  # [W, T]: does rank w hold an expert of token t
        destination, token = wanted.nonzero(as_tuple=True)
        send = wanted.sum(1).tolist()
        receive = [row[self.world.rank] for row in self.world.gather_words(send)]
        ids, weights = topk.ids[token], topk.weights[token]
        ids = torch.where(home[token] == ep_rank[destination, None], ids, E)
        routing = self._exchange(torch.cat([ids, weights.view(torch.int32)], dim=1), send, receive)
        moved = replace(
            hidden,
            data=self._exchange(_take(hidden.data, token), send, receive),
            scale=None if hidden.scale is None else self._exchange(_take(hidden.scale, token), send, receive),
        )
        ids, weights = routing.split(self.config.top_k, dim=1)
        flat = FlatTokens(moved, ids.contiguous(), weights.contiguous().view(torch.float32), E)
        handle.traffic = self._traffic(send, receive, hidden, routing, handle)
        if self.token_format == "flat":
            handle.state = _Route(token, send, receive)
            return flat
        busiest = torch.zeros(self.shard.num_local_experts + 1, dtype=torch.int64, device=ids.device)
        local = torch.where(ids < E, ids - self.shard.first_expert, self.shard.num_local_experts).flatten().long()
        busiest.index_add_(0, local, torch.ones_like(local))
        slabs, index = expert_major_from_flat(flat, self.shard, max(int(busiest[:-1].max()), 1))
        handle.state = _Route(token, send, receive, index)
        return slabs

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        route = handle.kept(_Route)
        if route.index is not None:
            expert_output = weighted_sum_to_flat(expert_output, route.index)
        returned = self._exchange(expert_output.to(handle.dtype), route.receive, route.send)
        total = torch.zeros(handle.num_tokens, returned.shape[1], dtype=torch.float32, device=returned.device)
        total.index_add_(0, route.token, returned.float())
        return total.to(handle.dtype)

    def _exchange(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self.world.all_to_all(out, x.contiguous(), receive, send)
        return out

    def _traffic(
        self, send: list[int], receive: list[int], hidden: Payload, routing: torch.Tensor, handle: Handle
    ) -> Traffic:
        rows_out = sum(send) - send[self.world.rank]
        rows_in = sum(receive) - receive[self.world.rank]
        there = sum(x.shape[1] * x.element_size() for x in (hidden.data, hidden.scale, routing) if x is not None)
        back = self.config.hidden_size * handle.dtype.itemsize
        return Traffic(rows_out, rows_in, rows_out * there + rows_in * back, rows_in * there + rows_out * back)


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Row selection that also works for FP8, which has no gather kernel everywhere."""
    return x.view(torch.uint8)[rows].view(x.dtype) if x.element_size() == 1 else x[rows]
