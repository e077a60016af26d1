"""Launching the symm kernels: how work is cut into CTAs, and what is compiled in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from eprt.dispatch.symm.kernels import ROUTING_BLOCK, combine_kernel, dispatch_kernel
from eprt.dispatch.symm.memory import R_BITS, SymmetricMemory
from eprt.rounding import ceil_div, next_power_of_2
from eprt.support import Device
from eprt.tokens import TopK, aligned


class Tuning(NamedTuple):
    """How the work is cut for R up to `max_rows`: bytes of a row that a CTA moves at once, its warps, most CTAs."""

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
TUNING = (
    Tuning(64, 4096, 4, 1056, 2048, 4, 528),
    Tuning(1 << R_BITS, 16384, 4, 1056, 8192, 16, 132),
)


PACKED_COLUMNS = 1024  # of a row that a CTA packs at once


class Launcher:
    """The kernels of one layer over one memory: their compile-time values, their grids.

    Args:
        memory: whose slots the calls use.
        num_experts, num_local_experts, moe_tp_size: E, L, and the ranks that share an expert.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        num_experts: int,
        num_local_experts: int,
        moe_tp_size: int,
        tuning: tuple[Tuning, ...] = TUNING,
    ) -> None:
        geometry = memory.geometry
        self.memory = memory
        self._offsets = geometry.offsets
        self._tuning = tuning
        # Programmatic dependent launch: ours may be set up while the kernel before still ends.
        early = Device.of(memory.states.device).sm >= 90
        self._launch = {"EARLY": early, **({"launch_pdl": True} if early else {})}
        self._routing = {
            "E": num_experts,
            "L": num_local_experts,
            "MOE_TP": moe_tp_size,
            "W": geometry.num_ranks,
            "K": geometry.top_k,
            "K_POW2": next_power_of_2(geometry.top_k),
        }

    def row_counts(self, capacity: int) -> list[int]:
        """The smallest R for each set of kernels that calls up to `capacity` can need."""
        firsts = [1, *(tuning.max_rows + 1 for tuning in self._tuning[:-1])]
        return [R for R in firsts if capacity >= R]

    def dispatch(
        self,
        slot: int,
        hidden: torch.Tensor,
        topk: TopK,
        R: int,
        timeout_s: float,
        global_scale: torch.Tensor | None = None,
        compile_only: bool = False,
    ) -> None:
        """Push bf16 rows [T, H], in the memory's payload format, and routing into every rank's `slot`; the stream goes
        on when all peers' have arrived. `global_scale`: of `nvfp4`, float32 [1]."""
        tuning, payload = self._tuned(R), self.memory.geometry.payload
        rows = _words(hidden) if payload == "bf16" else aligned(hidden)
        T, words = rows.shape
        rank, peers = self.memory.rank, self.memory.peers[slot]
        block = PACKED_COLUMNS
        if payload == "bf16":
            block = min(next_power_of_2(words), tuning.dispatch_bytes // rows.element_size())
        ctas = min(T * ceil_div(words, block), tuning.dispatch_ctas)
        with torch.cuda.device_of(rows):
            (dispatch_kernel.warmup if compile_only else dispatch_kernel.run)(
                rows,
                rows if global_scale is None else global_scale,
                topk.ids,
                topk.weights,
                peers[rank:] + peers[:rank],
                *(self._offsets[region] for region in ("data", "scale", "ids", "weights")),
                self.memory.books[slot],
                self.memory.states[slot],
                T,
                R,
                rank,
                int(timeout_s * 1e9),
                **self._routing,
                **self._launch,
                WORDS=words,
                BLOCK=block,
                PAYLOAD=payload,
                num_warps=tuning.dispatch_warps,
                grid=(ceil_div(R * self._routing["K"], ROUTING_BLOCK) + ctas,),
                **({} if compile_only else {"warmup": False}),
            )

    def combine(
        self, slot: int, out: torch.Tensor, ids: torch.Tensor, R: int, timeout_s: float, compile_only: bool = False
    ) -> None:
        """Sum into out [T, H] the rows that the experts of `ids` [T, K] wrote, once every peer has written."""
        tuning = self._tuned(R)
        out = _words(out)
        T, words = out.shape
        block = min(next_power_of_2(words), tuning.combine_bytes // out.element_size())
        with torch.cuda.device_of(out):
            (combine_kernel.warmup if compile_only else combine_kernel.run)(
                out,
                ids,
                self.memory.peers[slot],
                self._offsets["output"],
                self.memory.books[slot],
                self.memory.states[slot],
                T,
                R,
                self.memory.rank,
                int(timeout_s * 1e9),
                **self._routing,
                **self._launch,
                WORDS=words,
                BLOCK=block,
                num_warps=tuning.combine_warps,
                grid=(max(1, min(T * ceil_div(words, block), tuning.combine_ctas)),),
                **({} if compile_only else {"warmup": False}),
            )

    def _tuned(self, R: int) -> Tuning:
        return next(tuning for tuning in self._tuning if tuning.max_rows >= R)


def _words(rows: torch.Tensor) -> torch.Tensor:
    """bf16 rows as the widest integers that fit them, 16-byte aligned."""
    return aligned(rows).view(torch.int32 if rows.shape[1] % 2 == 0 else torch.int16)
