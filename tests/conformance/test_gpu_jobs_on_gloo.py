"""The jobs of tests/gpu/test_dispatchers.py on gloo ranks: `none` and `torch` pass them here, so that on GPUs they
judge the dispatchers and not themselves."""

from __future__ import annotations

import pytest
import torch
from support.jobs import dispatcher_jobs as jobs
from support.jobs import lost_rank_jobs
from support.jobs.dispatcher_jobs import Beyond, Pair

from eprt.config import ParallelConfig
from eprt.dispatch import DISPATCHERS
from eprt.ranks.launcher import RankReport, WorldFailed, launch
from eprt.ranks.process import Raised
from eprt.support import Device
from eprt.tokens import TopK

SIZE = 4
PAIRS = [pair for pair in jobs.PAIRS if "cpu" in DISPATCHERS[pair[0]].devices]

every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)


def tokens(K: int = 8) -> tuple[torch.Tensor, TopK]:
    return jobs.batch(torch.Generator().manual_seed(0), 200, 64, K)


@pytest.mark.parametrize("K", [1, 3, 8])
def test_sums_are_exact_in_bf16_in_any_order(K: int) -> None:
    """Slot by slot, rounded to bf16 each time, as a dispatcher might."""
    x, topk = tokens(K)
    for order in (list(range(K)), list(range(K))[::-1]):
        total = torch.zeros_like(x)
        for k in order:
            total += jobs.scaled(x, jobs.factors(topk.ids[:, [k]], topk.weights[:, [k]]))
        assert int(jobs.wrong_rows(total, x, topk)) == 0


def test_a_row_of_the_witness_by_hand() -> None:
    """Experts 5 = 0101 and 8 = 1000 in base 2, and a slot without an expert."""
    topk = TopK(torch.tensor([[5, 8, jobs.E]], dtype=torch.int32), torch.tensor([[0.125, 0.25, 2.0**20]]))
    x = torch.tensor([[1, 2, 3, 4, -1, -2, -3, -4]]).bfloat16()
    by_hand = torch.tensor([[0.5, 0.75, 1.5, 2.5, -0.5, -0.75, -1.5, -2.5]])
    assert torch.equal(jobs.scaled(x, jobs.factors(topk.ids, topk.weights)).float(), by_hand)


SPOILS = {
    "another token's row": lambda out, x, topk: out[3].copy_(out[4]),
    "one bit": lambda out, x, topk: out.view(torch.int16)[3, 5].bitwise_xor_(1),
    "a row that nobody wrote": lambda out, x, topk: out[3].fill_(torch.nan),
    "columns that moved": lambda out, x, topk: out[3].copy_(out[3].roll(4)),
    "the neighbour's expert": lambda out, x, topk: topk.ids[3].copy_((topk.ids[3] + 1) % jobs.E),
    "another weight": lambda out, x, topk: topk.weights[3, 0].mul_(2),
    "a slot that was lost": lambda out, x, topk: topk.ids[3, 0].fill_(jobs.E),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_one_wrong_row_is_counted(spoil: str) -> None:
    x, topk = tokens()
    full = (topk.ids < jobs.E).all(1)
    x, topk = x[full], TopK(topk.ids[full], topk.weights[full])
    out = jobs.scaled(x, jobs.factors(topk.ids, topk.weights))
    assert int(jobs.wrong_rows(out, x, topk)) == 0
    SPOILS[spoil](out, x, topk)
    assert int(jobs.wrong_rows(out, x, topk)) == 1


def test_refusals_that_differ_between_ranks_or_from_the_table_are_listed() -> None:
    pair: Pair = ("none", "flat")
    right = jobs.refused(pair)
    assert jobs.unexpected([right, right], pair) == []
    for other in (("WorldMismatch", "rank 1: tokens_per_rank"), ("InputError", "tokens_per_rank")):
        assert jobs.unexpected([right, {**right, "unequal_r": other}], pair) != []
    assert jobs.unexpected([{"good_calls": ("1", "")}], pair) != []


def raised(lost_rank: int, at: float) -> RankReport:
    error = Raised("RankLost", f"rank {lost_rank} exited", stack="", at=at, lost_rank=lost_rank, why="exited")
    return RankReport(0, "raised", raised=error)


@pytest.mark.parametrize(
    ("survivor", "may_exit", "heard"),
    [
        (raised(1, at=102.0), False, True),
        (raised(1, at=107.0), False, False),
        (raised(2, at=102.0), False, False),
        (RankReport(0, "died", exit_code=75, log_tail="rank 1 exited: process 7 is gone"), True, True),
        (RankReport(0, "died", exit_code=75, log_tail="rank 1 exited: process 7 is gone"), False, False),
        (RankReport(0, "died", exit_code=75, log_tail="rank 2 exited: process 8 is gone"), True, False),
        (RankReport(0, "unfinished", state="running"), True, False),
        (RankReport(0, "ok"), True, False),
    ],
)
def test_a_survivor_that_does_not_name_the_victim_in_time_is_listed(
    survivor: RankReport, may_exit: bool, heard: bool
) -> None:
    victim = RankReport(1, "died", exit_code=-9, log_tail="warming up\nkilled at 101.0")
    failure = WorldFailed([survivor, victim], seconds=9.0, timeout_s=60.0)
    assert (lost_rank_jobs.unheard(failure, may_exit) == []) is heard


@every_pair
def test_random_steps(pools, pair: Pair) -> None:
    settings = {"steps": 30, "delay_share": 0.05, "H": 64, "K": 4, "capacity": 12}
    assert pools(SIZE).run(jobs.random_steps, pair=pair, **settings) == [0] * SIZE


@every_pair
@pytest.mark.parametrize("payload", [None, "fp8_block", "nvfp4"])
def test_replays_with_new_data_counts_and_idle_ranks(pools, pair: Pair, payload: str | None) -> None:
    rounds = [[64, 64, 64, 64], [1, 0, 33, 64], [0, 0, 0, 0]]
    for wrong in pools(SIZE).run(jobs.replay, pair=pair, H=128, K=8, rounds=rounds, payload=payload):
        assert wrong == [0] * len(rounds)


@pytest.mark.parametrize("name", ["none", "torch"])
def test_sums_of_any_numbers_are_rounded_once(pools, name: str) -> None:
    """gloo's sums are made in float32, unlike NCCL's."""
    assert pools(SIZE).run(jobs.sums_of_any_numbers, pair=(name, "flat"), H=72, K=4, rows=[1, 13]) == [0] * SIZE


@every_pair
def test_layers_geometries_and_worlds_do_not_disturb_each_other(pools, pair: Pair) -> None:
    assert pools(SIZE).run(jobs.several_at_once, pair=pair) == [0] * SIZE


@every_pair
def test_refusals_are_typed_and_the_next_call_works(pools, pair: Pair) -> None:
    assert jobs.unexpected(pools(SIZE).run(jobs.refusals, pair=pair), pair) == []


@every_pair
def test_a_skipped_combine_is_noticed(pools, pair: Pair) -> None:
    found = pools(SIZE).run(jobs.one_rank_skips_a_combine, pair=pair)
    assert len(set(found)) == 1
    kind, text, wrong = found[0]
    assert (kind, "operation" in text, wrong) == ("WorldMismatch", True, 0)


@pytest.mark.parametrize("beyond", jobs.BEYOND, ids=str)
def test_the_plan_names_the_limit(beyond: Beyond) -> None:
    parallel = ParallelConfig(SIZE, moe_tp_size=beyond.moe_tp_size)
    verdict = DISPATCHERS[beyond.pair[0]].supports(beyond.config, parallel, beyond.runtime, Device.parse("sm90"))
    assert not verdict
    assert beyond.says in verdict.reason


@pytest.mark.parametrize("pair", [pair for pair in jobs.PAIRS if pair not in PAIRS], ids="-".join)
def test_a_dispatcher_that_cannot_run_here_is_not_built(pools, pair: Pair) -> None:
    beyond = Beyond(pair, "runs on cuda, not on cpu")
    assert pools(SIZE).run(jobs.not_built, beyond=beyond) == [("ConfigError", f"{pair[0]}: {beyond.says}")] * SIZE


@pytest.mark.parametrize(
    ("pair", "how"), [(("none", "flat"), "dies in dispatch"), (("torch", "expert_major"), "dies in combine")]
)
def test_a_killed_rank_is_named_by_the_others_within_the_limit(pair: Pair, how: str) -> None:
    with pytest.raises(WorldFailed) as failure:
        launch(lost_rank_jobs.one_rank_dies, SIZE, grace_s=lost_rank_jobs.LIMIT_S + 2, pair=pair, how=how)
    assert lost_rank_jobs.unheard(failure.value, may_exit=False) == []
    assert failure.value.failed_ranks == (lost_rank_jobs.VICTIM,)


def test_rows_that_differ_are_noticed_without_being_asked(pools) -> None:
    """gloo worlds always compare headers, so here it is the dispatch that raises."""
    for kind, text in pools(SIZE).run(lost_rank_jobs.unequal_rows_unchecked, pair=("none", "flat")):
        assert (kind, "tokens_per_rank" in text) == ("WorldMismatch", True)


def test_a_late_rank_is_named_in_bounded_time() -> None:
    found = launch(lost_rank_jobs.one_rank_is_late, SIZE, pair=("torch", "flat"), limit_s=3.0)
    for rank, (kind, text, seconds) in enumerate(found):
        if rank != lost_rank_jobs.VICTIM:
            assert (kind, f"rank {lost_rank_jobs.VICTIM} behind" in text) == ("RankLost", True)
            assert seconds < 3.0 + 2.0
