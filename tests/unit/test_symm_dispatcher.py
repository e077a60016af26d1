"""The symmetric-memory dispatcher around its kernels, which are played here: when it allocates, what peers are told.

The kernels themselves run in test_kernels_interpreted.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.builders import said
from support.stand_ins.flashinfer import FakeWorld, run_ranks

from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS, make_dispatcher, shared_memory
from eprt.dispatch.symm.memory import SymmGeometry
from eprt.tokens import TopK

SIZE, H, K = 2, 16, 2
CONFIG = MoEConfig(num_experts=8, top_k=K, hidden_size=H, intermediate_size=32)


class Kernels:
    """In place of `symm.launch.Launcher`: nothing travels, and everybody gets zeros back."""

    row_counts = (1,)

    def __init__(self, memory, num_experts, num_local_experts, moe_tp_size, timeout_s):
        self.memory = memory

    def dispatch(self, index, hidden, topk, R, global_scale=None):
        pass

    def combine(self, index, out, ids, R):
        out.zero_()


@pytest.fixture
def allocations(monkeypatch) -> list[tuple[int, str]]:
    """(bytes, what) of each allocation, from all ranks, as it was asked for."""
    launch = pytest.importorskip("eprt.dispatch.symm.launch", reason="needs triton: pip install triton")
    monkeypatch.setattr(launch, "Launcher", Kernels)
    monkeypatch.setitem(DISPATCHERS, "symm", replace(DISPATCHERS["symm"], devices=("cpu",), requirement=None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    asked: list[tuple[int, str]] = []
    rule = shared_memory.require_allocatable

    def ask(world, num_bytes, what):
        rule(world, num_bytes, what)
        asked.append((num_bytes, what))

    monkeypatch.setattr(shared_memory, "require_allocatable", ask)
    return asked


def make(world: FakeWorld, capacity: int = 8):
    world.group, world.timeout_s = None, 1.0  # its own memory stands for what the ranks map
    return make_dispatcher("symm", world, CONFIG, RuntimeConfig(max_tokens_per_rank=capacity))


def batch(T: int) -> tuple[torch.Tensor, TopK]:
    ids = torch.arange(T * K, dtype=torch.int32).view(T, K) % 8
    return torch.ones(T, H, dtype=torch.bfloat16), TopK(ids, torch.ones(T, K))


def test_memory_comes_with_the_warm_up_and_is_shared_by_equal_geometries(allocations):
    def job(world):
        layers = [make(world), make(world), make(world, capacity=9)]
        before = len(world.resources)
        for layer in layers:
            layer.warmup()
        same = layers[0]._launcher.memory is layers[1]._launcher.memory
        layers[2].close()
        return before, same, len(world.resources)

    assert run_ranks(job, SIZE) == [(0, True, 1)] * SIZE
    expected = [SymmGeometry(SIZE, capacity, H, K, "bf16").num_bytes for capacity in (8, 9)]
    assert sorted(allocations) == sorted((size, "symm's symmetric memory") for size in expected for _ in range(SIZE))


def test_rows_of_lost_ranks_hold_no_token(allocations):
    """No kernel says so any more: what the rank left there is garbage."""

    def job(world):
        dispatcher = make(world)
        dispatcher.warmup()
        memory = dispatcher._launcher.memory
        memory.peers = [own * SIZE for own in memory.peers]
        memory.routing(0, 4)[0].fill_(1)
        memory.resume(tuple(rank == world.rank for rank in range(SIZE)))
        sent = dispatcher.dispatch(*batch(3), 4)
        found = sent.tokens.ids.view(SIZE, 4, K)
        assert (found[1 - world.rank] == CONFIG.num_experts).all()
        assert (found[world.rank] == 1).all()
        return True

    assert all(run_ranks(job, SIZE))


def test_a_warm_world_allocates_nothing(allocations):
    def job(world):
        dispatcher = make(world)
        world.warm = True
        return said(lambda: dispatcher.dispatch(*batch(3), 4))

    says = "UsageError: allocating symm's symmetric memory after World.warmup(): pass this layer to warmup()"
    assert all(told.startswith(says) for told in run_ranks(job, SIZE))
    assert not allocations


def test_memory_of_different_sizes_is_never_allocated(allocations):
    found = run_ranks(lambda world: said(lambda: make(world, 8 + world.rank)), SIZE)
    assert len(set(found)) == 1
    assert found[0].startswith("WorldMismatch: the ranks disagree about this call (fingerprint, max_tokens_per_rank)")
    assert not allocations


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_without_a_free_buffer_tells_its_peers(allocations, shared):
    """Rank 0 closed one of its two open calls: it could go on, into a kernel that waits for rank 1. `shared`: the calls
    are another layer's of the same geometry, and this one never made any."""

    def job(world):
        dispatcher, other = make(world), make(world)
        other = other if shared else dispatcher
        other.warmup()
        held = [other.dispatch(*batch(3), 4).handle for _ in range(2)]
        if world.rank == 0:
            held[0].close()
        told = said(lambda: dispatcher.dispatch(*batch(3), 4))
        for handle in held:
            handle.close()
        sent = dispatcher.dispatch(*batch(3), 4)
        out = dispatcher.combine(torch.zeros(sent.tokens.num_rows, H, dtype=torch.bfloat16), sent.handle)
        return told, tuple(out.shape)

    says = "UsageError: rank 1: symm: 2 dispatches of this geometry are open, which is the limit: combine or close one"
    assert run_ranks(job, SIZE) == [(f"{says} before the next dispatch", (3, H))] * SIZE


def test_buffers_come_back_whether_handle_or_dispatcher_is_closed_first(allocations):
    def job(world):
        keeps, closes = make(world), make(world)
        keeps.warmup()
        closes.warmup()
        handle = closes.dispatch(*batch(3), 4).handle
        for each in (closes, handle) if world.rank == 0 else (handle, closes):
            each.close()
        again = [keeps.dispatch(*batch(3), 4).handle for _ in range(2)]
        return [handle.state.index for handle in again]

    assert run_ranks(job, SIZE) == [[0, 1]] * SIZE


def test_a_closed_dispatcher_takes_no_memory(allocations):
    def job(world):
        dispatcher = make(world)
        dispatcher.close()
        return said(dispatcher.warmup), len(world.resources)

    for told, held in run_ranks(job, SIZE):
        assert told.startswith("UsageError")
        assert held == 0
    assert not allocations


def test_a_launch_that_fails_leaves_its_buffer_free(allocations):
    def job(world):
        dispatcher = make(world)
        dispatcher.warmup()
        launcher = dispatcher._launcher
        works = launcher.dispatch

        def fails(*given):
            raise torch.OutOfMemoryError("no memory for a copy of the tokens")

        launcher.dispatch = fails
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError):
                dispatcher.dispatch(*batch(3), 4)
        launcher.dispatch = works
        return dispatcher.dispatch(*batch(3), 4).handle.state.index

    assert run_ranks(job, SIZE) == [0] * SIZE
