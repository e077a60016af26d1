"""Launching the symm kernels: how work is cut into CTAs, and what is compiled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from eprt.dispatch.symm.kernels import ROUTING_BLOCK, combine_kernel, dispatch_kernel
from eprt.dispatch.symm.memory import R_BITS, SymmetricMemory
from eprt.launching import CachedKernel
from eprt.rounding import ceil_div, next_power_of_2
from eprt.tokens import TopK, aligned


class Tuning(NamedTuple):
    """The cut of the work for R up to `max_rows`: bytes of a row that a CTA moves at once, its warps, most CTAs."""

    max_rows: int
    dispatch_bytes: int
    dispatch_warps: int
    dispatch_ctas: int
    combine_bytes: int
    combine_warps: int
    combine_ctas: int


# From benchmarks/tune_symm.py on 4 H200; benchmarks/results/symm_tuning_h200_x4.json. On 2 of them combine is 1% faster
# in finer cuts by more CTAs (symm_tuning_h200_x2.json), on 4 up to 5% slower (dispatch_finer_h200_x4.json). Its CTAs
# wait for peers, so they take a quarter of each SM's threads: another call's kernels of moderate size fit beside them.
TUNING = (Tuning(64, 4096, 4, 1056, 2048, 4, 528), Tuning(1 << R_BITS, 16384, 4, 1056, 8192, 16, 132))


PACKED_COLUMNS = 1024  # of a row that a CTA packs at once


@dataclass(frozen=True)
class _Pair:
    """Both kernels, cut and compiled for R up to a tuning's `max_rows`, and into how many pieces they cut a row."""

    tuning: Tuning
    push: CachedKernel
    push_pieces: int
    pull: CachedKernel
    pull_pieces: int


class Launcher:
    """The kernels of one layer over one memory, compiled here; their grids, the addresses they take.

    Args:
        memory: whose buffers the calls use.
        num_experts, num_local_experts, moe_tp_size: E, L, and the ranks that share an expert.
        timeout_s: how long a kernel waits for its peers.

    Attributes:
        row_counts: the smallest R for each pair of kernels that calls up to the capacity can need.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        num_experts: int,
        num_local_experts: int,
        moe_tp_size: int,
        timeout_s: float,
        tuning: tuple[Tuning, ...] = TUNING,
    ) -> None:
        geometry = memory.geometry
        self.memory = memory
        self._device = memory.states.device
        self._top_k = geometry.top_k
        self._limit_ns = int(timeout_s * 1e9)
        self._take_addresses()
        self._routing = {
            "E": num_experts,
            "L": num_local_experts,
            "MOE_TP": moe_tp_size,
            "W": geometry.num_ranks,
            "K": geometry.top_k,
            "K_POW2": next_power_of_2(geometry.top_k),
        }
        firsts = [1, *(each.max_rows + 1 for each in tuning[:-1])]
        self.row_counts = [R for R in firsts if geometry.tokens_per_rank >= R]
        self._pairs = [self._prepare(each) for each in tuning[: len(self.row_counts)]]

    def _take_addresses(self) -> None:
        """Takes down what a call of a buffer gets beside its tensors; again once a rank is lost. A push goes to this
        rank first, then in rank order, round."""
        memory, offsets, rank = self.memory, self.memory.geometry.offsets, self.memory.rank
        regions = tuple(offsets[region] for region in ("data", "scale", "ids", "weights"))
        self._peers = memory.peers
        buffers = list(zip(memory.peers, memory.books.unbind(), memory.states.unbind(), strict=True))
        self._push_to = [((*peers[rank:], *peers[:rank]), *regions, *state) for peers, *state in buffers]
        self._pull_from = [(peers, offsets["output"], *state) for peers, *state in buffers]

    def dispatch(
        self, index: int, hidden: torch.Tensor, topk: TopK, R: int, global_scale: torch.Tensor | None = None
    ) -> None:
        """Pushes bf16 rows [T, H], in the memory's payload format, and routing into buffer `index` of every rank; the
        stream goes on when all peers' have arrived. `global_scale`: of `nvfp4`, float32 [1]."""
        if self._peers is not self.memory.peers:
            self._take_addresses()
        pair, T = self._pair(R), hidden.shape[0]
        ctas = min(T * pair.push_pieces, pair.tuning.dispatch_ctas)
        pair.push(
            (ceil_div(R * self._top_k, ROUTING_BLOCK) + ctas, 1, 1),
            aligned(hidden),
            global_scale,
            topk.ids,
            topk.weights,
            *self._push_to[index],
            T,
            R,
            self.memory.rank,
            self._limit_ns,
        )

    def combine(self, index: int, out: torch.Tensor, ids: torch.Tensor, R: int) -> None:
        """Sums into out [T, H] the rows that the experts of `ids` [T, K] wrote, once every peer has written."""
        if self._peers is not self.memory.peers:
            self._take_addresses()
        pair, T = self._pair(R), out.shape[0]
        grid = max(1, min(T * pair.pull_pieces, pair.tuning.combine_ctas)), 1, 1
        pair.pull(grid, out, ids, *self._pull_from[index], T, R, self.memory.rank, self._limit_ns)

    def _pair(self, R: int) -> _Pair:
        for pair in self._pairs:
            if pair.tuning.max_rows >= R:
                return pair
        raise ValueError(R)

    def _prepare(self, tuning: Tuning) -> _Pair:
        geometry = self.memory.geometry
        width, kind, block = geometry.hidden_size, torch.bfloat16, PACKED_COLUMNS
        # The widest integers that fit make a bf16 row.
        words, word = (width // 2, torch.int32) if width % 2 == 0 else (width, torch.int16)
        if geometry.payload == "bf16":
            width, kind, block = words, word, min(next_power_of_2(words), tuning.dispatch_bytes // word.itemsize)
        pull_block = min(next_power_of_2(words), tuning.combine_bytes // word.itemsize)
        scale = torch.float32 if geometry.payload == "nvfp4" else None
        sent = kind, scale, torch.int32, torch.float32, *self._push_to[0]
        sizes = {"WORDS": width, "BLOCK": block, "PAYLOAD": geometry.payload}
        push = self._kernel(dispatch_kernel, sent, sizes, tuning.dispatch_warps)
        sizes = {"WORDS": words, "BLOCK": pull_block}
        pull = self._kernel(combine_kernel, (word, torch.int32, *self._pull_from[0]), sizes, tuning.combine_warps)
        return _Pair(tuning, push, ceil_div(width, block), pull, ceil_div(words, pull_block))

    def _kernel(self, kernel: Any, arguments: tuple[Any, ...], sizes: dict[str, Any], num_warps: int) -> CachedKernel:
        arguments = *arguments, 2, 2, 2, self._limit_ns
        return CachedKernel(kernel, self._device, arguments, {**self._routing, **sizes}, pdl=True, num_warps=num_warps)
