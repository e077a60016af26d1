"""The GPU tests' jobs pass over the stand-ins for FlashInfer and DeepEP, so that on GPUs they judge the libraries:
tests/gpu/test_dispatchers.py and test_library_dispatchers.py."""

from __future__ import annotations

import pytest
from support.jobs import dispatcher_jobs, library_jobs
from support.jobs.dispatcher_jobs import DEEPEP, FLASHINFER
from support.stand_ins import deepep as deepep_stand_in
from support.stand_ins.flashinfer import SIZE, run_ranks
from test_deepep_dispatcher import world  # noqa: F401 - a fixture
from test_flashinfer_dispatcher import CAPACITY, library  # noqa: F401 - a fixture

from eprt.dispatch import DISPATCHERS
from eprt.dispatch.deepep import DeepEPDispatcher
from eprt.dispatch.flashinfer import FlashInferDispatcher
from eprt.ranks.launcher import RankContext
from eprt.tokens import Payload


def context_of(world) -> RankContext:  # noqa: F811
    return RankContext(world.rank, world.size, "cpu", _worlds={(1, 1, 30.0): world})


@pytest.mark.parametrize("K", [3, 4])
def test_flashinfer(library, monkeypatch, K):  # noqa: F811
    monkeypatch.setitem(DISPATCHERS, "flashinfer", FlashInferDispatcher.spec)

    def job(world):  # noqa: F811
        world.compares_headers = lambda full: False
        context, shape = context_of(world), {"H": 64, "K": K}
        steps = {"steps": 8, "delay_share": 0.0, "capacity": CAPACITY}
        wrong = dispatcher_jobs.random_steps(context, FLASHINFER, **steps, **shape)
        wrong += dispatcher_jobs.sums_of_any_numbers(context, FLASHINFER, rows=[1, CAPACITY], **shape)
        return wrong, library_jobs.one_rank_drops_a_call(context, FLASHINFER)

    assert run_ranks(job) == [(0, (True, 0))] * SIZE


@pytest.mark.parametrize("H", [128, 2048])
def test_deepep(world, monkeypatch, H):  # noqa: F811
    monkeypatch.setitem(DISPATCHERS, "deepep", DeepEPDispatcher.spec)
    monkeypatch.setattr(deepep_stand_in, "CAPACITY", 32)
    context, shape = context_of(world), {"H": H, "K": 3}
    assert dispatcher_jobs.random_steps(context, DEEPEP, steps=8, delay_share=0.0, capacity=32, **shape) == 0
    early, wrong = library_jobs.overlapped(context, **shape)
    assert "call handle.wait()" in early
    assert wrong == 0
    assert [library_jobs.quantised_by_deepep(context, wait=wait, **shape) for wait in (True, False)] == [0, 0]
    monkeypatch.setattr(library_jobs, "encode_payload", lambda x, format: Payload.plain(1.1 * x))
    assert library_jobs.quantised_by_deepep(context, wait=True, **shape) > 0
