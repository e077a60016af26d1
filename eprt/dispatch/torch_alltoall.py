"""`all_to_all_single`: a token travels once to each rank that holds one of its experts; sums come back pre-reduced.

Works on gloo and NCCL for any placement. The split sizes are read on the host (a sync on CUDA), so it isn't for CUDA
graphs; it is the transport that runs anywhere, and the one that emits either token format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eprt.dispatch.base import Dispatcher
from eprt.dispatch.call import CallState, Handle, Traffic
from eprt.expert_major import expert_major_from_flat, weighted_sum
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, TopK, as_bytes


@dataclass(frozen=True)
class _Route(CallState):
    """The rows that one call moved.

    Attributes:
        token: [S] int64, the local token of each sent row, rows ordered by destination rank.
        send, receive: rows to and from each rank.
        index: place and weights [N, K] that put ExpertMajorTokens' results together (`weighted_sum`).
    """

    token: torch.Tensor
    send: list[int]
    receive: list[int]
    index: tuple[torch.Tensor, torch.Tensor] | None = None


class AllToAllDispatcher(Dispatcher):
    """Emits one flat row per received (token, source rank) pair, ordered by source rank, or those rows expert-major."""

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
        moved = hidden.mapped(lambda x: self._exchange(as_bytes(x)[token].view(x.dtype), send, receive))
        ids, weights = routing.split(self.config.top_k, dim=1)
        tokens = flat = FlatTokens(moved, ids.contiguous(), weights.contiguous().view(torch.float32), E)
        sent, received = (sum(splits) - splits[self.world.rank] for splits in (send, receive))
        handle.traffic = Traffic.of(sent, received, hidden, routing, self.config.hidden_size * handle.dtype.itemsize)
        index, L = None, self.shard.num_local_experts
        if self.token_format == "expert_major":
            local = torch.where(ids < E, ids - self.shard.first_expert, L).flatten()
            busiest = int(torch.bincount(local, minlength=L + 1)[:L].max())
            tokens, place = expert_major_from_flat(flat, self.shard, max(busiest, 1))
            index = place, flat.weights
        handle.state = _Route(token, send, receive, index)
        return tokens

    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        route = handle.kept(_Route)
        if route.index is not None:
            expert_output = weighted_sum(expert_output, *route.index)
        returned = self._exchange(expert_output.to(handle.dtype), route.receive, route.send)
        total = torch.zeros(handle.num_tokens, returned.shape[1], dtype=torch.float32, device=returned.device)
        total.index_add_(0, route.token, returned.float())
        return total.to(handle.dtype)

    def _exchange(self, x: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        out = x.new_empty((sum(receive), *x.shape[1:]))
        self.world.all_to_all(out, x.contiguous(), receive, send)
        return out
