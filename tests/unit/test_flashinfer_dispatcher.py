"""The FlashInfer dispatcher over a stand-in for the library: W threads, one plain tensor as everybody's memory.

The stand-in keeps the library's contract as its source states it (where a token goes, where regions lie, what combine
reads) and refuses what the library would turn into a crash or a stale read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import eprt.dispatch
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import CASES, Case, make_batches
from eprt.dispatch import DISPATCHERS, flashinfer_workspace
from eprt.dispatch.flashinfer import FlashInferDispatcher
from eprt.dispatch.flashinfer_workspace import NUM_SLOTS, ControlPlane, Geometry
from eprt.errors import CapacityError, ConfigError, InputError, UsageError

SIZE = 4
CAPACITY = 32
TOP_K_SWITCH = (1, 2, 4, 6, 8, 10, 12, 14, 16, 18, 22)


class FakeLibrary:
    """`flashinfer.comm.trtllm_moe_alltoall` for threads.

    Attributes:
        calls: (function, rank, R) in the order they came.
        in_workspace: what combine was told about its payload.
    """

    def __init__(self, size: int = SIZE) -> None:
        self.size = size
        self.meet = threading.Barrier(size, timeout=20)
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
            assert start % payload.element_size() == 0, "a misaligned receive region"
            starts.append(start)
            start += size * R * payload.shape[1] * payload.element_size()
        assert start <= workspace.shape[1], "workspace size per rank insufficient"
        self.meet.wait()
        route, sent = [], [0] * size
        for token, row in enumerate(ids.tolist()):
            went = []
            for target in dict.fromkeys(e // (num_experts // size) for e in row):
                if not (enable_rank_mask and not int(active_rank_mask[0]) >> target & 1):
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
        for target in range(size):
            counts = workspace[target, int(metainfo[3]) :][: 4 * size].view(torch.int32)
            counts[rank] = sent[target]
        self.meet.wait()
        views = [
            workspace[rank, at : at + size * R * p[:0].new_empty(1, p.shape[1]).nbytes].view(p.dtype).view(size, R, -1)
            for p, at in zip(payloads, starts, strict=True)
        ]
        return views, start, None

    def moe_a2a_combine(
        self, payload, num_tokens, workspace, metainfo, R, rank, size, top_k, offset, *, payload_in_workspace, output,
        enable_rank_mask, active_rank_mask,
    ):  # fmt: skip
        self.calls.append(("combine", rank, R))
        self.in_workspace.append(payload_in_workspace)
        assert payload.shape[:2] == (size, R)
        assert output.shape == (num_tokens, payload.shape[2])
        assert offset + payload.nbytes <= workspace.shape[1], "workspace insufficient for combine payload region"
        region = workspace[rank, offset : offset + payload.nbytes]
        assert payload_in_workspace == (payload.data_ptr() == region.data_ptr())
        if not payload_in_workspace:
            region.copy_(payload.reshape(-1).view(torch.uint8))
        self.meet.wait()
        total = torch.zeros(output.shape)
        for token, went in enumerate(self.routes[workspace.data_ptr(), rank][:num_tokens]):
            for target, index in went:
                rows = workspace[target, offset : offset + payload.nbytes].view(payload.dtype).view(size * R, -1)
                total[token] += rows[rank * R + index].float()
        output.copy_(total)
        self.meet.wait()
        return output


class FakeWorld:
    """One thread's World: what the dispatcher and the header exchange use of it."""

    def __init__(self, rank: int, meet: threading.Barrier, board: list) -> None:
        self.rank, self.size = rank, len(board)
        self.device = torch.device("cpu")
        self.parallel = ParallelConfig(self.size)
        self.generation = self.step = self.allocations = 0
        self.closed = self.warm = self.broken = False
        self.resources: dict = {}
        self._meet, self._board = meet, board

    def gather_control(self, x):
        self._board[self.rank] = x.clone()
        self._meet.wait()
        gathered = torch.stack(self._board)
        self._meet.wait()
        return gathered

    def barrier(self) -> None:
        self.gather_control(torch.zeros(1))

    def compares_headers(self, full: bool) -> bool:
        return True

    def note(self, where: str, layer: int | None = None) -> None:
        pass

    def raise_if_lost(self) -> None:
        pass

    def require_cold(self, what: str) -> None:
        if self.warm:
            raise UsageError(f"{what} after World.warmup()")

    def resource(self, key, make, close=None):
        if key not in self.resources:
            self.resources[key] = make(), close
        return self.resources[key][0]

    def release(self, key) -> None:
        value, close = self.resources.pop(key)
        close(value)


def mask_foreign_ids(ids, counts, first, end, num_experts, early):
    for source, count in enumerate(counts.tolist()):
        ids[source, count:] = num_experts
    ids[(ids < first) | (ids >= end)] = num_experts


@pytest.fixture
def library(monkeypatch, request) -> FakeLibrary:
    fake = FakeLibrary(getattr(request, "param", SIZE))
    monkeypatch.setattr(flashinfer_workspace, "load_library", lambda: fake)
    monkeypatch.setattr(flashinfer_workspace, "_map_memory", fake.map_memory)
    monkeypatch.setattr(
        eprt.dispatch, "flashinfer_ids", SimpleNamespace(mask_foreign_ids=mask_foreign_ids), raising=False
    )
    spec = replace(DISPATCHERS["flashinfer"], devices=("cpu",), requirement=None)
    monkeypatch.setattr(FlashInferDispatcher, "spec", spec, raising=False)
    return fake


def run_ranks(function: Callable[[FakeWorld], object], size: int = SIZE) -> list:
    meet, board = threading.Barrier(size, timeout=20), [None] * size
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: function(FakeWorld(rank, meet, board)), range(size)))


def make(world, **kwargs) -> FlashInferDispatcher:
    fields = {"num_experts": 16, "top_k": 4, "hidden_size": 64, **kwargs}
    payload = fields.pop("payload", None)
    config = MoEConfig(intermediate_size=32, **fields)
    return FlashInferDispatcher(world, config, RuntimeConfig(max_tokens_per_rank=CAPACITY, payload=payload))


def exchange(dispatcher: FlashInferDispatcher, case: Case, *, zero_copy: bool = False) -> list[str]:
    """All calls of a case; what is wrong with them."""
    world, config = dispatcher.world, dispatcher.config
    payload = dispatcher.runtime.payload
    problems = []
    for call in range(case.num_calls):
        batches = make_batches(case, call, world.size, config, torch.bfloat16)
        own = batches[world.rank]
        sent = dispatcher.dispatch(own.hidden, own.topk, case.counts.agreed)
        problems += transport.wrong_arrivals(sent.tokens, batches, dispatcher.shard, payload)
        R = case.counts.agreed or max(1, *(b.hidden.shape[0] for b in batches))
        if sent.tokens.num_rows != world.size * R:
            problems.append(f"{sent.tokens.num_rows} rows for R {R}")
        y = transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(config.num_experts), torch.bfloat16)
        if zero_copy:
            y = dispatcher.output_buffer(sent.handle).copy_(y)
        returned = dispatcher.combine(y, sent.handle)
        expected = transport.weighted_sums(own, torch.ones(config.num_experts), payload)
        error = (returned.double() - expected).norm() / expected.norm().clamp(min=1e-9)
        if payload is None and not torch.equal(returned, expected.to(torch.bfloat16)):
            problems.append(f"combine isn't bitwise right: {error:.1e}")
        if not error <= 1e-2:
            problems.append(f"combine is off by {error:.1e}")
    return problems


@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 8])
def test_every_case_arrives_and_returns_bit_for_bit(library, top_k):
    def job(world):
        dispatcher = make(world, top_k=top_k)
        return [(case.name, problem) for case in CASES for problem in exchange(dispatcher, case)]

    assert run_ranks(job) == [[]] * SIZE
    assert not any(library.in_workspace)


@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize("hidden_size", [16, 144, 2880])
def test_packed_payloads_arrive_with_their_scales(library, payload, hidden_size):
    cases = CASES[5:15]

    def job(world):
        dispatcher = make(world, hidden_size=hidden_size, payload=payload)
        return [problem for case in cases for problem in exchange(dispatcher, case)]

    assert run_ranks(job) == [[]] * SIZE


@pytest.mark.parametrize("library", [3], indirect=True)
def test_regions_stay_aligned_where_rows_are_not(library):
    """Three ranks, 130 bytes of FP8 a row: a float32 scale behind them would start at an odd place."""

    def job(world):
        dispatcher = make(world, hidden_size=130, num_experts=15, top_k=1, payload="fp8_block")
        return [problem for case in CASES[::4] for problem in exchange(dispatcher, case)]

    assert run_ranks(job, 3) == [[]] * 3


def test_an_output_in_the_workspace_is_not_copied(library):
    def job(world):
        return exchange(make(world), CASES[5], zero_copy=True)

    assert run_ranks(job) == [[]] * SIZE
    assert library.in_workspace == [True] * SIZE


def test_an_added_slot_names_no_expert(library):
    def job(world):
        dispatcher = make(world, top_k=3)
        batch = make_batches(CASES[0], 0, SIZE, dispatcher.config, torch.bfloat16)[world.rank]
        sent = dispatcher.dispatch(batch.hidden, batch.topk)
        return sent.tokens.ids[:, 3].unique().tolist(), sent.tokens.ids.shape[1]

    assert run_ranks(job) == [([16], 4)] * SIZE


def test_two_calls_open_at_once_and_a_third_is_refused_everywhere(library):
    def job(world):
        dispatcher = make(world)
        batches = [make_batches(CASES[5], call, SIZE, dispatcher.config, torch.bfloat16) for call in range(2)]
        own = [b[world.rank] for b in batches]
        sent = [dispatcher.dispatch(b.hidden, b.topk) for b in own]
        with pytest.raises(UsageError, match="rank 0: flashinfer: 2 dispatches of this geometry are open"):
            dispatcher.dispatch(own[0].hidden, own[0].topk)
        outputs = []
        for one in reversed(sent):
            y = transport.scale_experts(one.tokens, dispatcher.shard, torch.ones(16), torch.bfloat16)
            outputs.append(dispatcher.combine(y, one.handle))
        expected = [transport.weighted_sums(b, torch.ones(16), None).bfloat16() for b in reversed(own)]
        return [torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)], exchange(dispatcher, CASES[5])

    assert run_ranks(job) == [([True, True], [])] * SIZE


def test_a_dropped_call_still_meets_its_peers_and_sends_nan(library):
    def job(world):
        dispatcher = make(world)
        batch = make_batches(CASES[0], 0, SIZE, dispatcher.config, torch.bfloat16)[world.rank]
        sent = dispatcher.dispatch(batch.hidden, batch.topk, 5)
        if world.rank == 1:
            world.compares_headers = lambda full: False
            sent.handle.close()
            world.compares_headers = lambda full: True
            out = None
        else:
            world.compares_headers = lambda full: False
            y = transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(16), torch.bfloat16)
            out = dispatcher.combine(y, sent.handle)
            world.compares_headers = lambda full: True
        asked = ((batch.topk.ids // 4) == 1).any(1)
        honest = out is None or torch.equal(out.isnan().all(1), asked)
        return honest, exchange(dispatcher, CASES[5])

    assert run_ranks(job) == [(True, [])] * SIZE


def test_layers_of_one_geometry_share_memory_and_others_do_not(library):
    def job(world):
        same = [make(world), make(world)]
        other = make(world, hidden_size=128)
        problems = [p for d in (same[0], other, same[1]) for p in exchange(d, CASES[5])]
        return problems, len(world.resources)

    assert run_ranks(job) == [([], 2)] * SIZE


@pytest.mark.parametrize("broken", [False, True])
def test_memory_is_freed_unless_a_kernel_may_still_wait_for_a_lost_peer(library, broken):
    def job(world):
        dispatcher = make(world)
        problems = exchange(dispatcher, CASES[5])
        memory, world.broken = dispatcher._memory, broken
        dispatcher.close()
        return problems, memory._owner is not None

    assert run_ranks(job) == [([], broken)] * SIZE


def test_warmup_allocates_loads_the_kernels_first_and_exchanges_nothing(library):
    def job(world):
        dispatcher = make(world)
        dispatcher.warmup()
        world.warm = True
        problems = exchange(dispatcher, CASES[5])
        late = make(world, hidden_size=256)
        with pytest.raises(UsageError, match=r"allocating the FlashInfer workspace after World.warmup"):
            late.warmup()
        return problems

    assert run_ranks(job) == [[]] * SIZE
    assert [name for name, _, _ in library.calls[:SIZE]] == ["load"] * SIZE
    assert library.calls[SIZE : 2 * SIZE] == [("dispatch", rank, 1) for _, rank, _ in library.calls[SIZE : 2 * SIZE]]


def test_refusals_are_typed_and_the_next_call_works(library):
    def job(world):
        dispatcher = make(world)
        batch = make_batches(CASES[0], 0, SIZE, dispatcher.config, torch.bfloat16)[world.rank]
        with pytest.raises(InputError, match="bfloat16 tokens"):
            dispatcher.dispatch(batch.hidden.float(), batch.topk, 5)
        with pytest.raises(CapacityError, match=r"capacity of 32.*bytes a rank"):
            dispatcher.dispatch(batch.hidden, batch.topk, 33)
        sent = dispatcher.dispatch(batch.hidden, batch.topk, 5)
        with pytest.raises(InputError, match="expert_output is"):
            dispatcher.combine(batch.hidden, sent.handle)
        sent.handle.close()
        return exchange(dispatcher, CASES[5])

    assert run_ranks(job) == [[]] * SIZE


def test_what_the_plan_refuses_the_constructor_refuses(library):
    world = FakeWorld(0, threading.Barrier(1), [None])
    with pytest.raises(ConfigError, match="top-k at most 22, the model has 23"):
        make(world, num_experts=32, top_k=23)
    world.parallel = ParallelConfig(SIZE, moe_tp_size=2)
    with pytest.raises(ConfigError, match="MoE-TP"):
        make(world)


def test_capacity_bytes_are_what_is_allocated():
    geometry = Geometry(num_ranks=4, tokens_per_rank=4096, dispatch_bytes=2 * 7168 + 64, combine_bytes=2 * 7168)
    allocated = NUM_SLOTS * geometry.slot_bytes
    assert 0 <= allocated - 4096 * geometry.bytes_per_token < 4096


def test_the_control_plane_gathers_objects_of_any_size():
    def job(world):
        plane = ControlPlane(world)
        gathered = plane.allgather("x" * world.rank)
        assert plane.Split(0, world.rank) is plane
        return gathered, plane.bcast(world.rank, 2), plane.Get_rank(), plane.Get_size()

    assert run_ranks(job) == [(("", "x", "xx", "xxx"), 2, rank, SIZE) for rank in range(SIZE)]
