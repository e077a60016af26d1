"""Stand-ins for FlashInfer's all-to-all and for the World it runs in: a thread a rank, one plain tensor as everybody's
memory.

The library's keeps the contract as its source states it (where a token goes, where regions lie, what combine reads,
whom a rank waits for) and refuses what the library would turn into a crash or a stale read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch

import eprt.dispatch
from eprt.config import ParallelConfig
from eprt.dispatch import DISPATCHERS
from eprt.dispatch import flashinfer as flashinfer_dispatcher
from eprt.dispatch.flashinfer import FlashInferDispatcher
from eprt.world import World
from eprt.world.collectives import Membership
from support.stand_ins import library_kernels

SIZE = 4
TOP_K_SWITCH = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)


class FakeLibrary:
    """`flashinfer.comm.trtllm_moe_alltoall` for threads.

    Attributes:
        calls: (function, rank, R) in the order they came.
        in_workspace: what combine was told about its payload.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.meetings: dict[int, threading.Barrier] = {}
        self.epochs = [0] * size
        self.lock = threading.Lock()
        self.memory: dict[int, torch.Tensor] = {}
        self.calls: list[tuple[str, int, int]] = []
        self.in_workspace: list[bool] = []
        self.routes: dict[tuple[int, int], list[list[tuple[int, int]]]] = {}

    def map_memory(self, world: FakeWorld, num_bytes: int) -> tuple[object, torch.Tensor]:
        allocation = world.allocations
        world.allocations += 1
        with self.lock:
            if allocation not in self.memory:
                self.memory[allocation] = torch.full((self.size, num_bytes), 255, dtype=torch.uint8)
        assert self.memory[allocation].shape[1] == num_bytes, "ranks disagree about the size"
        return object(), self.memory[allocation]

    def meet(self, rank: int, active_rank_mask: torch.Tensor) -> None:
        """Wait for the ranks of the mask, as the kernels do for their peers' flags."""
        mask = int(active_rank_mask[0])
        assert mask >> rank & 1, "active_rank_mask must mark the local ep_rank as active"
        with self.lock:
            here = self.meetings.setdefault(mask, threading.Barrier(mask.bit_count(), timeout=20))
        here.wait()

    def get_moe_alltoall_module(self) -> None:
        self.calls.append(("load", -1, 0))

    def moe_a2a_active_rank_mask(self, ranks, ep_size):
        assert ep_size < 64, "the invalid id needs a bit of its own"
        return torch.tensor([sum(1 << rank for rank in ranks)], dtype=torch.uint64)

    def moe_a2a_initialize(self, workspace, ep_rank, ep_size, max_num_tokens):
        assert workspace.shape[0] == ep_size
        workspace[ep_rank].zero_()
        # Written out for the one capacity used here, from calculateOffsets: counters and flags fit 128 bytes each.
        assert ep_size <= 4
        assert max_num_tokens == 32
        payload = 128 + 128 + 128 + 2816 + 2816
        return torch.tensor([0, 4, 8, 8 + 4 * ep_size, 128, 256, 384, 384 + 2816, payload, payload])

    def moe_a2a_dispatch(
        self, ids, payloads, workspace, metainfo, R, rank, size, top_k, num_experts, *, enable_rank_mask,
        active_rank_mask,
    ):  # fmt: skip
        self.calls.append(("dispatch", rank, R))
        assert R >= 1
        assert top_k in TOP_K_SWITCH
        assert ids.dtype == torch.int32
        assert ids.is_contiguous()
        assert ids.shape[1] == top_k
        assert len(payloads) <= 6
        starts, start = [], int(metainfo[9])
        for payload in payloads:
            assert payload.is_contiguous()
            assert payload.dim() == 2
            assert payload.shape[0] == ids.shape[0] <= R
            words = math.gcd(16, payload.shape[1] * payload.element_size())
            assert start % words == 0, "a receive region less aligned than its rows"
            starts.append(start)
            start += size * R * payload.shape[1] * payload.element_size()
        assert start <= workspace.shape[1], "workspace size per rank insufficient"
        assert enable_rank_mask
        active = [rank for rank in range(size) if int(active_rank_mask[0]) >> rank & 1]
        for payload, at in zip(payloads, starts, strict=True):  # rows that nobody sends are garbage
            block = R * payload.shape[1] * payload.element_size()
            for source in active:
                workspace[rank, at + source * block :][:block] = 255
        self.epochs[rank] += 1
        self.meet(rank, active_rank_mask)
        assert len({self.epochs[one] for one in active}) == 1, "flags of ranks that missed a call never match"
        route, sent = [], [0] * size
        for token, row in enumerate(ids.tolist()):
            went = []
            for target in dict.fromkeys(e // (num_experts // size) for e in row):
                if int(active_rank_mask[0]) >> target & 1:
                    assert 0 <= target < size, "send_counters out of bounds"
                    place = rank * R + sent[target]
                    for payload, at in zip(payloads, starts, strict=True):
                        raw = payload[token].view(torch.uint8)
                        begin = at + place * raw.numel()
                        workspace[target, begin : begin + raw.numel()] = raw
                    went.append((target, sent[target]))
                    sent[target] += 1
            route.append(went)
        self.routes[workspace.data_ptr(), rank] = route
        for target in active:  # what a rank left out sent last stays counted
            counts = workspace[target, int(metainfo[3]) :][: 4 * size].view(torch.int32)
            counts[rank] = sent[target]
        self.meet(rank, active_rank_mask)
        views = [
            workspace[rank, at : at + size * R * p[:0].new_empty(1, p.shape[1]).nbytes].view(p.dtype).view(size, R, -1)
            for p, at in zip(payloads, starts, strict=True)
        ]
        return views, start, None

    def moe_a2a_combine(
        self, payload, num_tokens, workspace, metainfo, R, rank, size, top_k, offset, *, payload_in_workspace, output,
        enable_rank_mask, active_rank_mask, use_low_precision=False,
    ):  # fmt: skip
        self.calls.append(("combine", rank, R))
        self.in_workspace.append(payload_in_workspace)
        assert payload.shape[:2] == (size, R)
        assert output.shape == (num_tokens, payload.shape[2])
        assert offset + payload.nbytes <= workspace.shape[1], "workspace insufficient for combine payload region"
        region = workspace[rank, offset : offset + payload.nbytes]
        assert payload_in_workspace == (payload.data_ptr() == region.data_ptr())
        wide = payload.shape[2] * payload.element_size()
        stride = payload.shape[2] if use_low_precision and not payload_in_workspace else wide
        counts = workspace[rank, int(metainfo[3]) :][: 4 * size].view(torch.int32).tolist()
        rows = payload.reshape(size * R, -1).clone()
        for source, count in enumerate(counts):
            for place in range(source * R, source * R + count):
                row = rows[place]
                if use_low_precision:  # saturating, and NaN stays NaN
                    row = row.float().clamp(-448, 448).to(torch.float8_e4m3fn)
                raw = row.view(torch.uint8)
                region[place * stride : place * stride + raw.numel()] = raw
        self.meet(rank, active_rank_mask)
        total = torch.zeros(output.shape)
        assert output.dtype == payload.dtype == torch.bfloat16
        dtype = torch.float8_e4m3fn if use_low_precision else payload.dtype
        for token, went in enumerate(self.routes[workspace.data_ptr(), rank][:num_tokens]):
            for target, index in went:
                begin = offset + (rank * R + index) * stride
                total[token] += workspace[target, begin:][: payload.shape[2] * dtype.itemsize].view(dtype).float()
        output.copy_(total)
        self.meet(rank, active_rank_mask)
        return output


class FakeWorld(World):
    """One thread's World: its ranks meet at a barrier, and read what each wrote on a board. No rank is ever lost.

    Attributes:
        quiet: ranks neither compare headers nor wait for each other.
        allocations: how often this rank asked for memory that all map.
    """

    broken = False

    def __init__(self, rank: int, meet: threading.Barrier, board: list) -> None:
        super().__init__(Membership(rank, len(board), torch.device("cpu"), ParallelConfig(len(board))), 20.0)
        self.quiet, self.allocations = False, 0
        self._meet, self._board = meet, board

    def gather_control(self, x):
        self._board[self.rank] = x.clone()
        self._meet.wait()
        gathered = torch.stack(self._board)
        self._meet.wait()
        return gathered

    def barrier(self) -> None:
        if not self.quiet:
            super().barrier()

    def compares_headers(self, full: bool) -> bool:
        return not self.quiet

    def shrink(self, leaving) -> None:
        """What `World.shrink` does to dispatchers."""
        self.alive = tuple(alive and rank not in leaving for rank, alive in enumerate(self.alive))
        self.generation += 1
        for memory in self._resources.of_ranks():
            memory.resume(self.alive)
        self.quiet = True  # headers and barriers would wait for all threads

    @property
    def resources(self):
        return self._resources._held


def run_ranks(function: Callable[[FakeWorld], object], size: int = SIZE) -> list:
    meet, board = threading.Barrier(size, timeout=20), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(FakeWorld(rank, meet, board)), range(size)))


def install(monkeypatch, size: int = SIZE) -> FakeLibrary:
    """In place of the library, for the rest of a test."""
    fake = FakeLibrary(size)
    monkeypatch.setattr(flashinfer_dispatcher, "load_library", lambda: fake)
    monkeypatch.setattr(flashinfer_dispatcher, "_map_memory", fake.map_memory)
    monkeypatch.setattr(eprt.dispatch, "library_triton", library_kernels, raising=False)
    spec = replace(DISPATCHERS["flashinfer"], devices=("cpu",), requirement=None)
    monkeypatch.setattr(FlashInferDispatcher, "spec", spec, raising=False)
    return fake
