"""What only FlashInfer and DeepEP have: NaN for a dropped call, buffers, DeepEP's own quantisation and overlap."""

from __future__ import annotations

import pytest
from support.cases.gpu_ranks import SIZE, a_gpu_each, several_gpus
from support.jobs import library_jobs as jobs

from eprt.dispatch import DISPATCHERS

INSTALLED = {name: DISPATCHERS[name].requirement.check() for name in ("flashinfer", "deepep")}
PAIRS = [
    pytest.param(
        (name, DISPATCHERS[name].formats[0]), id=name, marks=pytest.mark.skipif(not found, reason=found.reason)
    )
    for name, found in INSTALLED.items()
]
needs_deepep = pytest.mark.skipif(not INSTALLED["deepep"], reason=INSTALLED["deepep"].reason)

# FlashInfer may compile its kernels first: 3.5 minutes on 64 cores.
pytestmark = [*several_gpus, a_gpu_each]


@pytest.mark.parametrize("pair", PAIRS)
def test_a_call_that_one_rank_drops_is_nan_where_it_was_asked(pool, pair):
    assert pool.run(jobs.one_rank_drops_a_call, pair=pair) == [(True, 0)] * SIZE


@pytest.mark.parametrize("pair", PAIRS)
def test_a_buffer_that_does_not_fit_is_refused_and_the_next_call_works(pool, pair):
    found = pool.run(jobs.no_memory, pair=pair)
    assert len(set(found)) == 1
    kind, text, wrong = found[0]
    assert (kind, wrong) == ("CapacityError", 0)
    assert "bytes of GPU memory on every rank" in text


def test_our_sizes_are_the_libraries_own(pool):
    if not all(INSTALLED.values()):
        pytest.skip("needs flashinfer and deep_ep")
    assert pool.run(jobs.sizes) == [[]] * SIZE


@needs_deepep
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(128, 1), (2880, 4), (7168, 8)])
def test_tokens_that_deepep_quantises(pool, hidden_size, top_k, wait):
    assert pool.run(jobs.quantised_by_deepep, H=hidden_size, K=top_k, wait=wait) == [0] * SIZE


@needs_deepep
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2880, 4), (7168, 8)])
def test_work_between_sends_and_arrival(pool, hidden_size, top_k):
    for early, wrong in pool.run(jobs.overlapped, H=hidden_size, K=top_k):
        assert "call handle.wait()" in early
        assert wrong == 0
