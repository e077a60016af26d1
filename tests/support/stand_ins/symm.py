"""A stand-in for the symm kernels: a thread a rank, each with memory of the dispatcher's own layout, rows copied from
one to the other in plain torch.

The kernels themselves run in test_kernels_interpreted.py and on GPUs.
"""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from eprt.dispatch import DISPATCHERS
from eprt.dispatch.symm.memory import SymmetricMemory, SymmGeometry
from eprt.quant import encode_payload

TIMEOUT_S = 20.0


class Host:
    """The ranks' memories, as all of them map them."""

    def __init__(self, size: int) -> None:
        self.memories: dict[tuple[SymmGeometry, int], SymmetricMemory] = {}
        self.meeting = threading.Barrier(size, timeout=TIMEOUT_S)

    def allocate(self, world, geometry: SymmGeometry) -> SymmetricMemory:
        memory = torch.zeros(geometry.num_bytes, dtype=torch.uint8)
        found = SymmetricMemory(geometry, world.rank, memory, [memory.data_ptr()] * geometry.num_ranks)
        self.memories[geometry, world.rank] = found
        world.barrier()
        return found

    def peers(self, memory: SymmetricMemory) -> list[SymmetricMemory]:
        return [self.memories[memory.geometry, rank] for rank in range(memory.geometry.num_ranks)]


class Launcher:
    """In place of `symm.launch.Launcher`."""

    host: Host
    row_counts = (1,)

    def __init__(
        self, memory: SymmetricMemory, num_experts: int, num_local_experts: int, moe_tp_size: int, timeout_s: float
    ) -> None:
        assert moe_tp_size == 1
        self.memory = memory
        self.num_experts, self.num_local_experts = num_experts, num_local_experts

    def dispatch(self, index, hidden, topk, R, global_scale=None):
        own, T, format = self.memory, hidden.shape[0], self.memory.geometry.payload
        assert hidden.dtype == torch.bfloat16
        assert T <= R <= own.geometry.tokens_per_rank
        assert topk.ids.dtype == torch.int32
        assert topk.ids.is_contiguous()
        assert topk.weights.is_contiguous()
        packed = encode_payload(hidden, format, global_scale)
        for part in _parts(own, index, R):
            part.fill_(255)  # NaN: rows that nobody sends are garbage
        self.host.meeting.wait()
        here = slice(own.rank * R, own.rank * R + T)
        for rank, peer in enumerate(self.host.peers(own)):
            local = self._local(topk.ids, rank)
            ids, weights = peer.routing(index, R)
            ids[own.rank * R : (own.rank + 1) * R] = self.num_experts
            ids[here] = torch.where(local, topk.ids, self.num_experts)
            weights[here] = topk.weights
            wanted = local.any(1)
            for part, sent in zip(_parts(peer, index, R), (packed.data, packed.scale), strict=False):
                part[here][wanted] = sent.view(torch.uint8)[wanted]
        self.host.meeting.wait()

    def combine(self, index, out, ids, R):
        self.host.meeting.wait()
        total, start = torch.zeros(out.shape), self.memory.rank * R
        for rank, peer in enumerate(self.host.peers(self.memory)):
            wanted = self._local(ids, rank).any(1)
            total[wanted] += peer.output(index, R)[start : start + out.shape[0]][wanted].float()
        out.copy_(total)
        self.host.meeting.wait()

    def _local(self, ids: torch.Tensor, rank: int) -> torch.Tensor:
        return (ids < self.num_experts) & (ids // self.num_local_experts == rank)


def _parts(memory: SymmetricMemory, index: int, R: int) -> list[torch.Tensor]:
    """Received data and scale as bytes, [W * R, n]."""
    payload = memory.payload(index, R, None)
    return [part.view(torch.uint8) for part in (payload.data, payload.scale) if part is not None]


def install(monkeypatch, size: int) -> None:
    """In place of the kernels and of the memory that GPUs map, for the rest of a test."""
    launch = pytest.importorskip("eprt.dispatch.symm.launch", reason="needs triton: pip install triton")
    host = Host(size)
    monkeypatch.setattr(launch, "Launcher", type("Launcher", (Launcher,), {"host": host}))
    monkeypatch.setattr(SymmetricMemory, "allocate", host.allocate)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setitem(DISPATCHERS, "symm", replace(DISPATCHERS["symm"], devices=("cpu",), requirement=None))
