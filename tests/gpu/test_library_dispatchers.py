"""FlashInfer's and DeepEP's transports on the GPUs of one NVLink host: one process a GPU, the real libraries."""

from __future__ import annotations

import library_jobs as jobs
import pytest
import torch

from eprt.conformance.cases import CASES
from eprt.conformance.checks import Check, run_checks, summarize
from eprt.conformance.harness import WorldFailed, WorldPool, launch
from eprt.dispatch import DISPATCHERS
from eprt.guard import EXIT_CODE

SIZE = min(4, torch.cuda.device_count())


def _library(name: str):
    found = DISPATCHERS[name].requirement.check()
    return pytest.param(name, marks=pytest.mark.skipif(not found, reason=found.reason))


NAMES = [_library("flashinfer"), _library("deepep")]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices of one host: this machine has {SIZE}"),
]


@pytest.fixture(scope="module")
def pool():
    with WorldPool(SIZE, device="cuda", timeout_s=240, grace_s=2) as held:
        yield held


def run(pool, checks):
    rows = summarize(pool.run(run_checks, checks=checks))
    assert len(rows) == len(checks) > 0
    wrong = [f"{row.check.name}, rank {row.rank}: error {row.error:.2e} {row.detail}" for row in rows if not row.ok]
    assert wrong == []


def transport(name: str, hidden_size: int, top_k: int, kind="transport", payload=None, cases=CASES) -> list[Check]:
    token_format = DISPATCHERS[name].formats[0]
    config = jobs.moe(hidden_size, top_k)
    return [Check(kind, case, name, token_format, config=config, payload=payload) for case in cases]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("hidden_size", [128, 2880, 4096, 7168])
@pytest.mark.parametrize("top_k", [1, 3, 4, 6, 8])
def test_transport(pool, hidden_size, top_k, name):
    run(pool, transport(name, hidden_size, top_k))


@pytest.mark.parametrize("name", NAMES)
def test_two_open_calls(pool, name):
    run(pool, transport(name, 128, 4, kind="interleaved"))


@pytest.mark.parametrize("name", NAMES[:1])
@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2880, 4), (7168, 8), (2896, 3)])
def test_packed_transport(pool, hidden_size, top_k, payload, name):
    run(pool, transport(name, hidden_size, top_k, payload=payload, cases=CASES[::3]))


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(128, 1), (2880, 4), (7168, 8)])
def test_tokens_that_deepep_quantises(pool, hidden_size, top_k, wait, name):
    assert pool.run(jobs.quantised_by_deepep, H=hidden_size, K=top_k, wait=wait) == [0] * SIZE


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2880, 4), (7168, 8)])
def test_work_between_sends_and_arrival(pool, hidden_size, top_k, name):
    assert pool.run(jobs.overlapped, H=hidden_size, K=top_k) == [("UsageError", 0)] * SIZE


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("executor", ["reference", "torch_grouped"])
@pytest.mark.parametrize("config", ["silu_bf16", "gpt_oss"])
def test_layer_against_the_oracle(pool, config, executor, name):
    token_format = DISPATCHERS[name].formats[0]
    run(pool, [Check("layer", case, name, token_format, executor, config) for case in CASES])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("hidden_size", "top_k"), [(128, 1), (2880, 4), (4096, 3), (7168, 8)])
def test_graph_replays_with_new_data_counts_and_idle_ranks(pool, hidden_size, top_k, name):
    rounds = [[64] * SIZE, [1, 0, 33, 64][:SIZE], [0] * SIZE, [0, 64, 0, 0][:SIZE], [5] * SIZE]
    for wrong in pool.run(jobs.replay, name=name, H=hidden_size, K=top_k, rounds=rounds):
        assert wrong == [0] * len(rounds)


@pytest.mark.parametrize("name", NAMES)
def test_ten_thousand_random_steps(pool, name):
    """With one rank or another late by up to 50 ms now and then."""
    settings = {"delay_s": 0.05, "H": 2880, "K": 4, "capacity": 96}
    assert pool.run(jobs.random_steps, name=name, steps=10_000, **settings) == [0] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_layers_geometries_and_worlds_do_not_disturb_each_other(pool, name):
    assert pool.run(jobs.several_at_once, name=name) == [0] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_refusals_are_typed_and_the_next_call_works(pool, name):
    by_rank = pool.run(jobs.refusals, name=name)
    kinds = {
        "over_capacity": "CapacityError",
        "unequal_r": "WorldMismatch",
        "float32": "InputError",
        "third_dispatch": "UsageError",
        "combine_after_close": "UsageError",
        "output_shape": "InputError",
        "combine_twice": "UsageError",
        "closed": "UsageError",
        "no_memory": "CapacityError",
        "wrong": "0",
    }
    for found in by_rank:
        assert {what: kind for what, (kind, _) in found.items()} == kinds
    for what in ("over_capacity", "unequal_r", "no_memory"):
        assert len({found[what] for found in by_rank}) == 1
    assert "max_tokens_per_rank" in by_rank[0]["over_capacity"][1]
    assert "bytes of GPU memory on every rank" in by_rank[0]["no_memory"][1]


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_one_rank_drops_is_nan_where_it_was_asked(pool, name):
    assert pool.run(jobs.one_rank_drops_a_call, name=name) == [(True, 0)] * SIZE


def test_our_sizes_are_the_libraries_own(pool):
    if not all(DISPATCHERS[name].requirement.check() for name in ("flashinfer", "deepep")):
        pytest.skip("needs flashinfer and deep_ep")
    assert pool.run(jobs.sizes) == [[]] * SIZE


@pytest.mark.parametrize("name", NAMES)
def test_a_killed_rank_is_named_by_the_others(name):
    with pytest.raises(WorldFailed) as failure:
        launch(jobs.one_rank_dies, SIZE, "cuda", timeout_s=60, grace_s=12, name=name, victim=1)
    for report in failure.value.reports:
        if report.rank != 1:  # its host may sit in the waiting kernel: then its guard says who is lost, and ends it
            assert (report.outcome, report.exit_code) in (("ok", None), ("died", EXIT_CODE))
            assert report.outcome == "ok" or "rank 1 exited" in report.log_tail
