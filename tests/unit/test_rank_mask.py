"""Ranks left out of dispatch and combine, over the stand-ins for FlashInfer and DeepEP: a thread a rank."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.jobs import rank_mask_jobs as jobs
from support.stand_ins import deepep as deepep_stand_in
from support.stand_ins import flashinfer as flashinfer_stand_in
from support.stand_ins.flashinfer import SIZE, FakeWorld, run_ranks

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance import transport
from eprt.conformance.cases import CASES, make_batches
from eprt.dispatch import DISPATCHERS, Dispatcher, dispatcher_spec
from eprt.dispatch.call import LostExperts
from eprt.dispatch.deepep import DeepEPDispatcher
from eprt.dispatch.flashinfer import FlashInferDispatcher
from eprt.errors import RankLost, UsageError
from eprt.plan import make_plan
from eprt.support import Device
from eprt.tokens import TopK

CONFIG = MoEConfig(num_experts=16, top_k=4, hidden_size=128, intermediate_size=32)
CAPACITY = {"flashinfer": 32, "deepep": deepep_stand_in.CAPACITY}
KINDS = {"flashinfer": FlashInferDispatcher, "deepep": DeepEPDispatcher}
NAMES = tuple(KINDS)
E = CONFIG.num_experts
WITHOUT_2 = [True, True, False, True]


@pytest.fixture
def fabric(monkeypatch) -> deepep_stand_in.Fabric:
    deepep_stand_in.install(monkeypatch)
    flashinfer_stand_in.install(monkeypatch)
    return deepep_stand_in.Fabric(SIZE)


def make(name: str, world: FakeWorld, fabric: deepep_stand_in.Fabric, **runtime) -> Dispatcher:
    world.group = deepep_stand_in.Group(fabric, world.rank)
    settings = {"max_tokens_per_rank": CAPACITY[name], "on_rank_lost": "continue", **runtime}
    return KINDS[name](world, CONFIG, RuntimeConfig(**settings), dispatcher_spec(name).formats[0])


def test_the_library_s_mask_says_1_for_left_out_where_ours_says_false(fabric):
    def job(world):
        dispatcher = make("deepep", world, fabric)
        dispatcher.warmup()
        plain = make("deepep", world, fabric, on_rank_lost="restart")
        plain.warmup()
        if world.rank != 2:
            dispatcher._memory.resume(tuple(WITHOUT_2))
        return dispatcher._memory.buffer.mask, plain._memory.buffer.mask

    masked, whole = ([0, 0, 1, 0], None), ([0, 0, 0, 0], None)
    assert run_ranks(job) == [masked, masked, whole, masked]


def test_a_deepep_buffer_without_a_mask_cannot_go_on(fabric):
    def job(world):
        dispatcher = make("deepep", world, fabric, on_rank_lost="restart")
        dispatcher.warmup()
        with pytest.raises(UsageError, match="deepep: the buffer has no rank mask"):
            dispatcher._memory.resume(tuple(WITHOUT_2))
        world.alive, world.generation = tuple(WITHOUT_2), 1
        with pytest.raises(UsageError, match="built with on_rank_lost='restart'"):
            dispatcher.dispatch(*_tokens(world), 5)

    run_ranks(job)


@pytest.mark.parametrize("renormalize", [False, True])
def test_weights_of_slots_that_are_left_by_hand(renormalize):
    """Rank 1 of 4, slots 4 to 7, is lost. Slot 16 is no expert, and its weight counts for nothing."""
    ids = torch.tensor([[0, 5, 8], [4, 15, 16], [4, 5, 6]], dtype=torch.int32)
    given = TopK(ids, torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.6, 9.0], [1.0, 2.0, 3.0]]))
    lost = LostExperts((True, False, True, True), ParallelConfig(4), 16, torch.device("cpu"), renormalize)
    found = lost.left_out(given)
    assert found.ids.tolist() == [[0, 16, 8], [16, 15, 16], [16, 16, 16]]
    assert found.ids.dtype == torch.int32
    there = found.ids < 16
    expected = (
        torch.tensor([[0.5, 0, 0.2], [0, 0.6, 0], [0, 0, 0]]) / torch.tensor([[0.7], [0.6], [1]])
        if renormalize
        else given.weights
    )
    assert torch.allclose(found.weights[there], expected[there])


def test_an_expert_is_lost_with_any_of_its_slices():
    lost = LostExperts((True, True, True, False), ParallelConfig(4, moe_tp_size=2), 4, torch.device("cpu"), False)
    found = lost.left_out(TopK(torch.arange(4, dtype=torch.int32)[None], torch.ones(1, 4)))
    assert found.ids.tolist() == [[0, 1, 4, 4]]


@pytest.mark.parametrize(("name", "hidden_size"), [("flashinfer", 130), ("deepep", 2880)])
def test_the_job_of_the_gpu_test(fabric, monkeypatch, name, hidden_size):
    monkeypatch.setitem(DISPATCHERS, name, KINDS[name].spec)
    monkeypatch.setattr(jobs, "CAPACITY", CAPACITY[name])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def job(world):
        world.group = deepep_stand_in.Group(fabric, world.rank)
        context = SimpleNamespace(rank=world.rank, size=SIZE, world=lambda: world)
        return jobs.left_out(context, name, hidden_size, 3)

    assert run_ranks(job) == [[]] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_layers_of_one_memory_share_the_mask(fabric, name):
    def job(world):
        layers = [make(name, world, fabric) for _ in range(2)]
        for layer in layers:
            layer.warmup()
        if world.rank == 2:
            return []
        world.shrink([2])
        return jobs.exchange(layers[1], 0, 13) + jobs.exchange(layers[0], 1, 13)

    assert run_ranks(job) == [[]] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_the_first_call_without_a_rank_is_not_captured(fabric, monkeypatch, name):
    def job(world):
        dispatcher = make(name, world, fabric)
        dispatcher.warmup()
        if world.rank == 2:
            return []
        world.shrink([2])
        with monkeypatch.context() as patch:
            patch.setattr(dispatcher, "_capturing", lambda: True)
            with pytest.raises(UsageError, match="make one, then capture"):
                dispatcher.dispatch(*_tokens(world), 13)
        return jobs.exchange(dispatcher, 0, 13)

    assert run_ranks(job) == [[]] * SIZE


def _tokens(world: FakeWorld) -> tuple[torch.Tensor, TopK]:
    own = make_batches(CASES[0], 0, SIZE, CONFIG, torch.bfloat16)[world.rank]
    return own.hidden, own.topk


def test_a_peer_that_deepep_gave_up_by_itself_is_lost(fabric):
    """Its kernels don't trap with a mask: they leave the peer out, and the sums lack its part."""

    def job(world):
        dispatcher = make("deepep", world, fabric)
        dispatcher.warmup()
        if world.rank == 2:
            return None
        dispatcher._memory.buffer.mask[2] = 1  # what a kernel does after its 100 s
        world.quiet = True
        sent = dispatcher.dispatch(*_tokens(world), 5)
        y = transport.scale_experts(sent.tokens, dispatcher.shard, torch.ones(E), torch.bfloat16)
        dispatcher.combine(y, sent.handle)
        with pytest.raises(RankLost, match="rank 2 silent") as lost:
            dispatcher.dispatch(*_tokens(world), 5)
        return lost.value.rank, lost.value.why

    assert run_ranks(job) == [(2, "silent"), (2, "silent"), None, (2, "silent")]


def test_the_plan_says_who_can_go_on_without_a_lost_rank(fabric, monkeypatch):
    runtime = RuntimeConfig(on_rank_lost="continue", max_tokens_per_rank=256)
    plan = make_plan(CONFIG, ParallelConfig(SIZE), runtime, Device.parse("sm90"))
    said = {c.dispatcher: c.support.reason for c in plan.candidates if c.support}
    for name, reason in said.items():
        between = DISPATCHERS[name].shrink == "between steps"
        assert ("one lost inside a step is a restart" in reason) == between, name
    monkeypatch.setitem(DISPATCHERS, "torch", replace(DISPATCHERS["torch"], shrink=""))
    (refused,) = {
        c.support.reason
        for c in make_plan(CONFIG, ParallelConfig(SIZE), runtime, Device.parse("cpu")).candidates
        if c.dispatcher == "torch"
    }
    assert refused == "torch: on_rank_lost continue: can't go on without a rank"
