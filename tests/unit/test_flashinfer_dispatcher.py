"""The FlashInfer dispatcher over `flashinfer_stand_in`, which refuses what the library would turn into a crash."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from unittest import mock

import pytest
import torch
from support.builders import transported
from support.stand_ins.flashinfer import SIZE, FakeLibrary, FakeWorld, install, run_ranks

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import CASES, make_batches
from eprt.dispatch.flashinfer import NUM_BUFFERS, ControlPlane, FlashInferDispatcher, FlashInferGeometry
from eprt.errors import ConfigError, UsageError
from eprt.placement import ExpertPlacement
from eprt.tokens import TopK

CAPACITY = 32
# Of a rank's row when it becomes E4M3, and of their sum when it becomes bf16.
FP8_TOLERANCE = transport.FP8_ROUNDING + 2.0**-9


@pytest.fixture
def library(monkeypatch, request) -> FakeLibrary:
    return install(monkeypatch, getattr(request, "param", SIZE))


def make(world, **kwargs) -> FlashInferDispatcher:
    fields = {"num_experts": 16, "top_k": 4, "hidden_size": 64, **kwargs}
    runtime = {name: fields.pop(name, None) for name in ("payload", "combine_payload")}
    config = MoEConfig(intermediate_size=32, **fields)
    return FlashInferDispatcher(world, config, RuntimeConfig(max_tokens_per_rank=CAPACITY, **runtime))


def in_place(dispatcher: FlashInferDispatcher) -> FlashInferDispatcher:
    """Has the experts write where outputs are sent from."""
    combine = dispatcher.combine
    dispatcher.combine = lambda y, handle: combine(dispatcher.output_buffer(handle).copy_(y), handle)
    return dispatcher


def wrong(cases, size: int = SIZE, in_workspace: Sequence[int] = (), **layer) -> list[str]:
    """What is wrong with any rank's calls of the cases; ranks `in_workspace` write outputs where they are sent from."""

    def job(world):
        dispatcher = make(world, **layer)
        dispatcher = in_place(dispatcher) if world.rank in in_workspace else dispatcher
        return [found for case in cases for found in transported(dispatcher, case)]

    return [problem for problems in run_ranks(job, size) for problem in problems]


@pytest.mark.parametrize("top_k", [1, 3, 4, 5, 8])
def test_every_case_arrives_and_returns_bit_for_bit(library, top_k):
    assert wrong(CASES, top_k=top_k) == []
    assert not any(library.in_workspace)


@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize("hidden_size", [16, 144, 2880])
def test_packed_payloads_arrive_with_their_scales(library, payload, hidden_size):
    assert wrong(CASES[5:15], hidden_size=hidden_size, payload=payload) == []


@pytest.mark.parametrize("library", [3], indirect=True)
@pytest.mark.parametrize(("hidden_size", "payload"), [(130, "fp8_block"), (16, None)])
def test_regions_are_aligned_like_their_rows(library, hidden_size, payload):
    """Three ranks. 130 bytes of FP8 a row: a float32 scale behind them would start at an odd place. 32 bytes of bf16:
    behind ids of 4 bytes they could move in words of 4 alone."""
    layer = {"hidden_size": hidden_size, "num_experts": 15, "top_k": 1, "payload": payload}
    assert wrong(CASES[::4], 3, **layer) == []


def test_an_output_in_the_workspace_is_not_copied(library):
    assert wrong(CASES[5:6], in_workspace=range(SIZE)) == []
    assert library.in_workspace == [True] * SIZE


@pytest.mark.parametrize("hidden_size", [16, 130])
@pytest.mark.parametrize("in_workspace", [(), (0, 1, 2, 3), (1, 2)])
def test_fp8_outputs_are_each_rank_s_row_rounded_and_summed(library, hidden_size, in_workspace):
    """Whichever ranks' executors wrote into the workspace: rows lie equally far apart on all of them."""
    assert wrong(CASES, in_workspace=in_workspace, hidden_size=hidden_size, combine_payload="fp8") == []


@pytest.mark.parametrize("case", CASES[5:15], ids=lambda case: case.name)
def test_fp8_sums_are_as_near_to_the_exact_ones_as_the_format_allows(case):
    """The witness of the test above."""
    config, shard = MoEConfig(16, 4, 130, 32), ExpertPlacement(16, ParallelConfig(SIZE)).shard(0)
    for batch in make_batches(case, 0, SIZE, config, torch.bfloat16):
        exact = transport.weighted_sums(batch, torch.ones(16), None)
        assert (transport.fp8_sums(batch, shard).double() - exact).norm() <= FP8_TOLERANCE * exact.norm()


def test_what_fp8_does_to_large_small_and_broken_outputs(library):
    outputs = [1000.0, -449.0, torch.inf, -torch.inf, torch.nan, 2.0**-11, 1.5 * 2.0**-9, 0.3, -18.0, 17.0]
    expected = [448.0, -448.0, 448.0, -448.0, torch.nan, 0.0, 2.0**-8, 0.3125, -18.0, 16.0]

    def job(world):
        dispatcher = make(world, num_experts=4, top_k=1, hidden_size=len(outputs), combine_payload="fp8")
        ids = torch.tensor([[(world.rank + 1) % SIZE]], dtype=torch.int32)
        topk = TopK(ids, torch.ones(1, 1))
        sent = dispatcher.dispatch(torch.ones(1, len(outputs), dtype=torch.bfloat16), topk)
        rows = torch.tensor(outputs).bfloat16().expand(sent.tokens.num_rows, -1)
        return dispatcher.combine(rows, sent.handle)[0].tolist()

    for row in run_ranks(job):
        assert row == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_fp8_outputs_need_a_library_that_has_them_and_no_other_memory(library, monkeypatch):
    world = FakeWorld(0, threading.Barrier(1), [None])
    plain, packed = make(world), make(world, combine_payload="fp8")
    assert plain._geometry == packed._geometry
    monkeypatch.setattr(library, "moe_a2a_combine", lambda payload, output: None)
    with pytest.raises(ConfigError, match=r"outputs back in bf16 only: pip install 'flashinfer-python>=0.7.2,<0.7.4'"):
        make(world, combine_payload="fp8")


def test_calls_inside_and_outside_of_inference_mode(library):
    """Views are kept from call to call, and an inference tensor can't be written to outside of that mode."""

    def job(world):
        dispatcher = in_place(make(world))
        dispatcher.warmup()
        with torch.inference_mode():
            problems = transported(dispatcher, CASES[0])
        return problems + transported(dispatcher, CASES[0])

    assert run_ranks(job) == [[]] * SIZE


def test_two_open_calls_come_back_in_either_order_and_a_third_is_refused_everywhere(library):
    def job(world):
        dispatcher = make(world)
        own = make_batches(CASES[5], 0, SIZE, dispatcher.config, torch.bfloat16)[world.rank]
        sent = [dispatcher.dispatch(own.hidden, own.topk) for _ in range(2)]
        with pytest.raises(UsageError, match=r"^flashinfer: 2 dispatches of this geometry are open"):
            dispatcher.dispatch(own.hidden, own.topk)
        for one in sent:
            one.handle.close()
        return transported(dispatcher, CASES[5], "interleaved")

    assert run_ranks(job) == [[]] * SIZE


def test_a_dispatch_that_raises_sends_nothing_and_leaves_its_buffer_free(library):
    def job(world):
        dispatcher = make(world)
        own = make_batches(CASES[5], 0, SIZE, dispatcher.config, torch.bfloat16)[world.rank]
        dispatcher.dispatch(own.hidden, own.topk).handle.close()
        failing = mock.patch.object(dispatcher._memory, "dispatch", side_effect=RuntimeError("no launch"))
        with failing, mock.patch.object(dispatcher._memory, "combine") as combined:
            for _ in range(NUM_BUFFERS + 1):
                with pytest.raises(RuntimeError, match="no launch"):
                    dispatcher.dispatch(own.hidden, own.topk)
        assert combined.call_count == 0
        return transported(dispatcher, CASES[5], "interleaved")

    assert run_ranks(job) == [[]] * SIZE


@pytest.mark.parametrize("broken", [False, True])
def test_memory_is_freed_unless_a_kernel_may_still_wait_for_a_lost_peer(library, broken):
    def job(world):
        dispatcher = make(world)
        problems = transported(dispatcher, CASES[5])
        memory, world.broken = dispatcher._memory, broken
        dispatcher.close()
        return problems, memory._owner is not None

    assert run_ranks(job) == [([], broken)] * SIZE


def test_warmup_allocates_loads_the_kernels_first_and_exchanges_a_token(library):
    def job(world):
        dispatcher = make(world)
        dispatcher.warmup()
        world.warm = True
        problems = transported(dispatcher, CASES[5])
        late = make(world, hidden_size=256)
        with pytest.raises(UsageError, match=r"allocating the FlashInfer workspace after World.warmup"):
            late.warmup()
        return problems

    assert run_ranks(job) == [[]] * SIZE
    assert [name for name, _, _ in library.calls[:SIZE]] == ["load"] * SIZE
    assert library.calls[SIZE : 2 * SIZE] == [("dispatch", rank, 1) for _, rank, _ in library.calls[SIZE : 2 * SIZE]]


def test_capacity_bytes_are_what_is_allocated():
    geometry = FlashInferGeometry(
        num_ranks=4, tokens_per_rank=4096, dispatch_bytes=2 * 7168 + 64, combine_bytes=2 * 7168
    )
    allocated = NUM_BUFFERS * geometry.buffer_bytes
    assert 0 <= allocated - 4096 * geometry.bytes_per_token < 4096


def test_the_control_plane_gathers_objects_of_any_size():
    def job(world):
        plane = ControlPlane(world)
        gathered = plane.allgather("x" * world.rank)
        assert plane.Split(0, world.rank) is plane
        return gathered, plane.bcast(world.rank, 2), plane.Get_rank(), plane.Get_size()

    assert run_ranks(job) == [(("", "x", "xx", "xxx"), 2, rank, SIZE) for rank in range(SIZE)]
