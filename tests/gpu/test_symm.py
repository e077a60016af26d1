"""The symmetric-memory dispatcher on the GPUs of one NVLink host: one process a GPU, real peer memory."""

from __future__ import annotations

import pytest
import symm_jobs as jobs
import torch

from eprt.conformance.cases import CASES
from eprt.conformance.checks import run_checks, summarize
from eprt.conformance.harness import WorldFailed, WorldPool, launch

SIZE = min(4, torch.cuda.device_count())

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(SIZE < 2, reason=f"needs 2 CUDA devices with peer access: this machine has {SIZE}"),
]


@pytest.fixture(scope="module")
def pool():
    with WorldPool(SIZE, device="cuda", timeout_s=240, grace_s=2) as held:
        yield held


def run(pool, checks):
    rows = summarize(pool.run(run_checks, checks=checks))
    assert len(rows) == len(checks) > 0
    wrong = [f"{row.check}, rank {row.rank}: error {row.error:.2e} {row.detail}" for row in rows if not row.ok]
    assert wrong == []


@pytest.mark.parametrize("hidden_size", [128, 2880, 4096, 7168])
@pytest.mark.parametrize("top_k", [1, 3, 4, 6, 8])
def test_transport(pool, hidden_size, top_k):
    run(pool, [jobs.SizedCheck("transport", c, "symm", hidden_size=hidden_size, top_k=top_k) for c in CASES])


@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2880, 4), (7168, 8)])
def test_packed_transport(pool, hidden_size, top_k, payload):
    sizes = {"hidden_size": hidden_size, "top_k": top_k}
    run(pool, [jobs.SizedCheck("transport", c, "symm", payload=payload, **sizes) for c in CASES])


def test_two_open_calls(pool):
    run(pool, [jobs.SizedCheck("interleaved", case, "symm") for case in CASES])


@pytest.mark.parametrize("moe_tp_size", [size for size in (2, 4) if size <= SIZE])
def test_ranks_that_share_an_expert(pool, moe_tp_size):
    run(pool, [jobs.SizedCheck("transport", case, "symm", moe_tp_size=moe_tp_size) for case in CASES])


def test_layer_against_the_oracle(pool):
    checks = [jobs.Check("layer", case, "symm", executor="reference", config=c) for case in CASES for c in jobs.LAYERS]
    run(pool, checks)


@pytest.mark.parametrize(("hidden_size", "top_k"), [(128, 1), (2880, 4), (7168, 8)])
def test_graph_replays_with_new_data_counts_and_idle_ranks(pool, hidden_size, top_k):
    rounds = [[64] * SIZE, [1, 0, 33, 64][:SIZE], [0] * SIZE, [0, 64, 0, 0][:SIZE], [5] * SIZE]
    for wrong in pool.run(jobs.replay, H=hidden_size, K=top_k, rounds=rounds):
        assert wrong == [0] * len(rounds)


def test_ten_thousand_random_steps(pool):
    """With one rank or another late by up to 50 ms now and then."""
    assert pool.run(jobs.random_steps, steps=10_000, capacity=48, delay_share=0.05, H=512, K=4) == [0] * SIZE


def test_small_and_large_batches_with_delays(pool):
    """R on both sides of 64, where the kernels' cut of the work changes."""
    assert pool.run(jobs.random_steps, steps=300, capacity=300, delay_share=0.3, H=7168, K=8) == [0] * SIZE


def test_dispatchers_alive_at_once_do_not_disturb_each_other(pool):
    assert pool.run(jobs.two_at_once) == [0] * SIZE


def test_refusals_are_typed_and_the_next_call_works(pool):
    by_rank = pool.run(jobs.refusals)
    kinds = {
        "over_capacity": "CapacityError",
        "unequal_r": "WorldMismatch",
        "float32": "InputError",
        "third_dispatch": "UsageError",
        "combine_after_close": "UsageError",
        "output_shape": "InputError",
        "combine_twice": "UsageError",
        "closed": "UsageError",
        "wrong": "0",
    }
    for found in by_rank:
        assert {name: kind for name, (kind, _) in found.items()} == kinds
    for name in ("over_capacity", "unequal_r"):
        assert len({found[name] for found in by_rank}) == 1
    assert "max_tokens_per_rank" in by_rank[0]["over_capacity"][1]


def test_unequal_rows_are_noticed_without_validation():
    for kind, text in launch(jobs.unequal_rows_unchecked, SIZE, "cuda"):
        assert (kind, "tokens_per_rank differs" in text) == ("WorldMismatch", True)


def test_a_killed_rank_is_named_by_the_others():
    with pytest.raises(WorldFailed) as failure:
        launch(jobs.steps_without, SIZE, "cuda", timeout_s=60, grace_s=8, victim=1, how="killed")
    reports = failure.value.reports
    assert [report.lost_rank for report in reports] == [None if rank == 1 else 1 for rank in range(SIZE)]
    assert failure.value.culprits == (1,)


def test_a_rank_that_comes_too_late_is_named_in_bounded_time():
    for rank, (kind, text, seconds) in enumerate(launch(jobs.how_it_ended, SIZE, "cuda", victim=1)):
        if rank != 1:
            assert (kind, "rank 1" in text) == ("RankLost", True)
            assert seconds < 3.0 + 6.0  # the limit, and making the World
