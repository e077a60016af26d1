"""The DeepEP dispatcher on one rank over `deepep_stand_in`, which checks what it is given."""

from __future__ import annotations

import pytest
import torch
from support.builders import transported
from support.stand_ins.deepep import CAPACITY, Fabric, Group, install

from eprt import expert_major
from eprt.config import MoEConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import CASES, Batch, make_batch
from eprt.dispatch import deepep
from eprt.dispatch.deepep import DeepEPDispatcher, DeepEPGeometry, least_capacity, require_qp_depth
from eprt.errors import CapacityError, ConfigError, InputError, UsageError
from eprt.tokens import TopK
from eprt.world import World

E = 8


@pytest.fixture
def world(monkeypatch):
    install(monkeypatch)
    made = World.from_env("cpu")
    made.group = Group(Fabric(1), 0)
    return made


def make(world: World, hidden_size: int = 128, top_k: int = 3, **runtime) -> DeepEPDispatcher:
    config = MoEConfig(num_experts=E, top_k=top_k, hidden_size=hidden_size, intermediate_size=32)
    settings = {"max_tokens_per_rank": CAPACITY, **runtime}
    return DeepEPDispatcher(world, config, RuntimeConfig(**settings), "expert_major")


def deferred(dispatcher: DeepEPDispatcher) -> DeepEPDispatcher:
    """Has every dispatch return before its rows are there, and waits for them then."""
    dispatch = dispatcher.dispatch

    def call(*given):
        sent = dispatch(*given, wait=False)
        sent.handle.wait()
        return sent

    dispatcher.dispatch = call
    return dispatcher


SIZES = [(128, None, 1), (2048, None, 3), (2880, None, 3), (128, "fp8_block", 7), (2880, "fp8_block", 7)]


@pytest.mark.parametrize(("hidden_size", "payload", "each"), SIZES)
@pytest.mark.parametrize("wait", [True, False])
def test_every_case_arrives_and_returns(world, hidden_size, payload, each, wait):
    dispatcher = make(world, hidden_size, payload=payload)
    dispatcher = dispatcher if wait else deferred(dispatcher)
    assert [found for case in CASES[::each] for found in transported(dispatcher, case)] == []


@pytest.mark.parametrize(("hidden_size", "payload", "each"), SIZES)
def test_what_executors_and_callers_take_for_granted(world, hidden_size, payload, each):
    dispatcher = make(world, hidden_size, payload=payload)
    for case in CASES[::each]:
        batch = make_batch(case, 0, 0, 1, dispatcher.config, torch.bfloat16)
        sent = dispatcher.dispatch(batch.hidden, batch.topk, case.counts.agreed)
        hidden = sent.tokens.hidden
        assert sent.tokens.num_tokens == sent.handle.tokens_per_rank, "what a world of one allows"
        assert hidden.data.stride(2) == 1
        assert hidden.scale is None or hidden.scale.is_contiguous()
        out = dispatcher.combine(torch.zeros(hidden.data.shape, dtype=torch.bfloat16), sent.handle)
        assert out.shape == batch.hidden.shape
        assert out.is_contiguous()


@pytest.mark.parametrize("hidden_size", [2048, 2880])
@pytest.mark.parametrize("capacity", [1, 2, 3, 21])
def test_any_capacity_travels_in_slabs_that_the_library_takes(world, hidden_size, capacity):
    dispatcher = make(world, hidden_size, max_tokens_per_rank=capacity)
    world.warmup(dispatcher)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    hidden, topk = batch.hidden[:capacity], TopK(batch.topk.ids[:capacity], batch.topk.weights[:capacity])
    sent = dispatcher.dispatch(hidden, topk)
    assert sent.tokens.hidden.data.shape[1] == dispatcher.max_rows() == (capacity + 3) // 4 * 4
    y = transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(E), torch.bfloat16)
    out = dispatcher.combine(y, sent.handle)
    assert torch.equal(out, transport.weighted_sums(Batch(hidden, topk), torch.ones(E), None).bfloat16())
    over, ids = hidden.new_zeros(capacity + 1, hidden_size), topk.ids.new_zeros(capacity + 1, 3)
    with pytest.raises(CapacityError, match=rf"capacity of {capacity}: .*bytes a rank"):
        dispatcher.dispatch(over, TopK(ids, ids.float()))


@pytest.mark.parametrize(("hidden_size", "width"), [(2048, 2048), (2880, 3072)])
def test_rows_are_read_and_written_where_the_library_has_them(world, hidden_size, width):
    dispatcher = make(world, hidden_size)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    sent = dispatcher.dispatch(batch.hidden, batch.topk)
    assert sent.tokens.hidden.data.stride(1) == width
    y = dispatcher.output_buffer(sent.handle)
    y = torch.empty_like(sent.tokens.hidden.data) if y is None else y
    assert y.stride(1) == width
    y.copy_(transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(E), torch.bfloat16))
    out = dispatcher.combine(y, sent.handle)
    assert dispatcher._memory.buffer.combined[-1].data_ptr() == y.data_ptr()
    assert torch.equal(out, transport.weighted_sums(batch, torch.ones(E), None).bfloat16())


def kernel_of(source: torch.Tensor, target: torch.Tensor) -> tuple:
    """What Triton compiles the copy of valid rows for: dtype, width, strides that are 1 or multiples of 16."""
    dtype = torch.uint8 if source.dtype.itemsize == 1 else source.dtype
    return dtype, source.shape[2], *((n == 1, n % 16 == 0) for n in (*source.stride(), *target.stride()))


@pytest.mark.parametrize("payload", [None, "fp8_block"])
@pytest.mark.parametrize("hidden_size", [136, 2048, 2880])
def test_every_copy_of_a_call_was_compiled_in_warmup(world, monkeypatch, hidden_size, payload):
    """Of an executor that wants dense rows, and of one whose output lies elsewhere."""
    copies: set[tuple] = set()
    copy = expert_major.copy_valid_rows

    def noted(source, target, counts) -> None:
        copies.add(kernel_of(source, target))
        copy(source, target, counts)

    monkeypatch.setattr(expert_major, "copy_valid_rows", noted)
    dispatcher = make(world, hidden_size, payload=payload)
    world.warmup(dispatcher)
    warm = copies.copy()
    assert bool(warm) == (hidden_size != 2048 or payload is not None)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    for elsewhere in (False, True):
        sent = dispatcher.dispatch(batch.hidden, batch.topk)
        rows = expert_major.dense(sent.tokens.hidden.data, sent.tokens.counts)
        y, buffer = torch.zeros(rows.shape, dtype=torch.bfloat16), dispatcher.output_buffer(sent.handle)
        if buffer is not None and not elsewhere:
            expert_major.copy_valid_rows(y, buffer, sent.tokens.counts)
            y = buffer
        dispatcher.combine(y, sent.handle)
    assert copies == warm


def test_two_results_alive_and_a_third_refused(world):
    dispatcher, other = make(world), make(world)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    first = dispatcher.dispatch(batch.hidden, batch.topk)
    second = other.dispatch(batch.hidden, batch.topk)
    with pytest.raises(UsageError, match="2 dispatches of this geometry are open"):
        dispatcher.dispatch(batch.hidden, batch.topk)
    second.handle.close()
    dispatcher.combine(first.tokens.hidden.data, first.handle)
    assert transported(dispatcher, CASES[0]) == []


def test_a_dropped_call_sends_nan(world):
    dispatcher = make(world)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    dispatcher.dispatch(batch.hidden, batch.topk, wait=False).handle.close()
    assert dispatcher._memory.buffer.combined[-1].isnan().all()


def test_buffers_by_geometry_freed_by_the_last_user_and_not_with_lost_peers(world, monkeypatch):
    same, wide = [make(world), make(world)], make(world, 4096)
    for dispatcher in (*same, wide):
        assert transported(dispatcher, CASES[0]) == []
    shared, other = same[0]._memory.buffer, wide._memory.buffer
    assert same[1]._memory.buffer is shared is not other
    assert shared.num_rdma_bytes == 1000 * CAPACITY + 2048
    same[0].close()
    assert not shared.destroyed
    same[1].close()
    assert shared.destroyed
    monkeypatch.setattr(World, "broken", True)
    wide.close()
    assert not other.destroyed


def test_refusals(world):
    with pytest.raises(ConfigError, match="at most 1024 tokens a rank, max_tokens_per_rank is 1025"):
        make(world, max_tokens_per_rank=1025)
    dispatcher = make(world)
    batch = make_batch(CASES[0], 0, 0, 1, dispatcher.config, torch.bfloat16)
    with pytest.raises(InputError, match="bfloat16 tokens"):
        dispatcher.dispatch(batch.hidden.float(), batch.topk)
    sent = dispatcher.dispatch(batch.hidden, batch.topk)
    with pytest.raises(InputError, match="expert_output is"):
        dispatcher.combine(batch.hidden, sent.handle)
    world.group = None
    with pytest.raises(ConfigError, match="a world of one"):
        make(world)


def test_queue_depth_covers_the_largest_capacity_unless_set(monkeypatch):
    monkeypatch.delenv(deepep.QP_DEPTH_VARIABLE, raising=False)
    assert [least_capacity(W, 1023) for W in (1, 2, 3, 4, 6, 8)] == [1024, 1024, 1024, 1023, 1024, 1023]
    require_qp_depth(16)
    require_qp_depth(1024)
    monkeypatch.setenv(deepep.QP_DEPTH_VARIABLE, "1024")
    require_qp_depth(511)
    with pytest.raises(ConfigError, match="NVSHMEM_QP_DEPTH is 1024, max_tokens_per_rank 512 needs 1026"):
        require_qp_depth(512)
    monkeypatch.setenv(deepep.QP_DEPTH_VARIABLE, "deep")
    with pytest.raises(ConfigError, match="NVSHMEM_QP_DEPTH is deep"):
        require_qp_depth(1)


def test_buffer_bytes_at_the_sizes_measured():
    """`get_low_latency_rdma_size_hint` on 4 ranks (deep_ep 1.2.1); all sizes are compared where the library runs."""
    assert DeepEPGeometry(4, 128, 256, 7168).num_bytes == 1_908_410_496
    assert DeepEPGeometry(4, 1024, 256, 7168).num_bytes == 15_267_268_736
