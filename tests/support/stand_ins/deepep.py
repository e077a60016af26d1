"""A stand-in for DeepEP's low-latency buffer: a thread a rank. It checks what it is given."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace

import torch

import eprt.dispatch
from eprt.dispatch import DISPATCHERS, deepep
from eprt.dispatch.deepep import DeepEPDispatcher
from eprt.quant import encode_payload
from support.stand_ins import library_kernels

CAPACITY = 24


class Fabric:
    """What ranks put into each other's memory, by (call, phase, rank)."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.posted: dict[tuple[int, str, int], object] = {}
        self.lock = threading.Lock()
        self.meetings: dict[tuple[int, ...], threading.Barrier] = {}

    def exchange(self, call: int, phase: str, rank: int, alive: list[int], value) -> dict[int, object]:
        """What the ranks in `alive` posted; waits for them and for nobody else."""
        self.posted[call, phase, rank] = value
        with self.lock:
            here = self.meetings.setdefault(tuple(alive), threading.Barrier(len(alive), timeout=20))
        here.wait()
        found = {peer: self.posted[call, phase, peer] for peer in alive}
        here.wait()
        return found


@dataclass(frozen=True)
class Group:
    """A process group for one rank."""

    fabric: Fabric
    rank: int


class FakeBuffer:
    """`deep_ep.Buffer` in low-latency mode.

    Attributes:
        combined: what each combine was given to send.
        mask: the library's own, by rank: 1 is left out. None without `enable_shrink`.
    """

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        explicitly_destroy=False,
        enable_shrink=False,
    ):
        assert low_latency_mode
        assert explicitly_destroy
        self.fabric, self.rank = group.fabric, group.rank
        self.num_local_experts = num_qps_per_rank
        self.num_rdma_bytes = num_rdma_bytes
        self.mask = [0] * self.fabric.size if enable_shrink else None
        self.calls = 0
        self.combined: list[torch.Tensor] = []
        self.destroyed = False

    @staticmethod
    def get_low_latency_rdma_size_hint(tokens, hidden, num_ranks, num_experts):
        return 1000 * tokens + hidden

    @property
    def alive(self) -> list[int]:
        return [rank for rank in range(self.fabric.size) if not (self.mask and self.mask[rank])]

    def low_latency_update_mask_buffer(self, rank_to_mask, mask=False):
        assert self.mask is not None, "Shrink mode must be enabled"
        self.mask[rank_to_mask] = int(mask)

    def low_latency_query_mask_buffer(self, mask_status):
        assert self.mask is not None, "Shrink mode must be enabled"
        assert mask_status.numel() == self.fabric.size
        assert mask_status.dtype == torch.int32
        mask_status.copy_(torch.tensor(self.mask))

    def low_latency_dispatch(self, x, topk_idx, max_tokens, num_experts, *, use_fp8, return_recv_hook=False):
        L, first = self.num_local_experts, self.rank * self.num_local_experts
        assert num_experts == L * self.fabric.size
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] in DISPATCHERS["deepep"].hidden_sizes
        assert x.shape[0] <= max_tokens
        assert self.fabric.size * max_tokens % 4 == 0, "TMA requires the number of tokens to be multiple of 4"
        assert topk_idx.dtype == torch.int64
        assert topk_idx.is_contiguous()
        assert bool(((topk_idx >= -1) & (topk_idx < num_experts)).all())
        rows = max_tokens * self.fabric.size
        slabs = torch.full((L, rows, x.shape[1]), torch.nan, dtype=torch.bfloat16)
        counts = torch.zeros(L, dtype=torch.int32)
        places: list[tuple[int, int, int, int]] = []  # source rank, its token, expert of ours, row
        call, self.calls = self.calls, self.calls + 1
        arrived: list[bool] = []

        def receive() -> None:
            arrived.append(True)
            sent = self.fabric.exchange(call, "dispatch", self.rank, self.alive, (x, topk_idx))
            for source, (tokens, ids) in sent.items():
                for token, row in enumerate(ids.tolist()):
                    for expert in (e - first for e in row if 0 <= e - first < L):
                        slabs[expert, counts[expert]] = tokens[token]
                        places.append((source, token, expert, int(counts[expert])))
                        counts[expert] += 1
            if use_fp8:
                packed = encode_payload(torch.nan_to_num(slabs), "fp8_block")
                data.view(torch.uint8).copy_(packed.data.view(torch.uint8))
                scale.copy_(packed.scale)

        data = torch.empty(slabs.shape, dtype=torch.float8_e4m3fn)
        scale = torch.empty(L, x.shape[1] // 128, rows).transpose(1, 2)
        if not return_recv_hook:
            receive()
        hook = receive if return_recv_hook else None
        return (data, scale) if use_fp8 else slabs, counts, (call, places, arrived, rows), None, hook

    def low_latency_combine(self, x, topk_idx, topk_weights, handle):
        call, places, arrived, slab = handle
        assert arrived == [True], "combine needs the rows' places, which the receive kernel writes"
        assert x.is_contiguous()
        assert x.dtype == torch.bfloat16
        assert x.shape[:2] == (self.num_local_experts, slab)
        assert topk_weights.dtype == torch.float32
        self.combined.append(x)
        rows = {(source, token, expert): x[expert, row] for source, token, expert, row in places}
        returned = self.fabric.exchange(call, "combine", self.rank, self.alive, rows)
        out = torch.zeros(topk_idx.shape[0], x.shape[2])
        for token, row in enumerate(topk_idx.tolist()):
            for k, e in enumerate(row):
                owner, expert = divmod(e, self.num_local_experts)
                if e >= 0 and owner in returned:
                    out[token] += topk_weights[token, k] * returned[owner][self.rank, token, expert].float()
        return out.bfloat16(), None, None

    def destroy(self) -> None:
        self.destroyed = True


def install(monkeypatch) -> None:
    """In place of the library and of our kernels around it, for the rest of a test."""
    library = SimpleNamespace(Buffer=FakeBuffer, topk_idx_t=torch.int64)
    monkeypatch.setattr(deepep, "load_library", lambda: library)
    monkeypatch.setattr(eprt.dispatch, "library_triton", library_kernels, raising=False)
    monkeypatch.delenv(deepep.QP_DEPTH_VARIABLE, raising=False)
    spec = replace(DISPATCHERS["deepep"], devices=("cpu",), requirement=None)
    monkeypatch.setattr(DeepEPDispatcher, "spec", spec, raising=False)
