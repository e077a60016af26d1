"""The proofs can fail: each deliberate mistake is caught, and without it the same call passes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from support.jobs import conformance_jobs as jobs

from eprt.config import MoEConfig, ParallelConfig
from eprt.conformance.cases import BY_NAME, CASES, CONFIGS, make_batches
from eprt.conformance.checks import Check, CheckRow, NanOutput, summarize
from eprt.conformance.oracle import relative_error
from eprt.conformance.transport import scale_experts, wrong_arrivals
from eprt.expert_major import expert_major_from_flat
from eprt.experts.base import PreparedExecutor
from eprt.placement import ExpertPlacement
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload

TOLERANCE = 1e-5


@pytest.mark.parametrize("pair", jobs.PAIRS, ids="-".join)
@pytest.mark.parametrize("executor", ["reference", "torch_grouped"])
class TestOracle:
    def test_the_unchanged_layer_passes(self, pools, pair, executor):
        errors = pools(4).run(jobs.mutated_layer, mutation="none", pair=pair, executor=executor)
        assert max(errors) <= TOLERANCE

    @pytest.mark.parametrize("mutation", ["swap_gate_and_up", "shift_experts", "drop_a_rank"])
    def test_a_mistake_is_caught(self, pools, mutation, pair, executor):
        errors = pools(4).run(jobs.mutated_layer, mutation=mutation, pair=pair, executor=executor)
        # Rank 2 of "uneven" has a single token, whose experts needn't be on the dropped rank.
        assert sorted(errors)[1] > 1000 * TOLERANCE


def repeat_row(t, row, slot) -> None:
    t.data, t.ids, t.weights = (torch.cat([x, x[row : row + 1]]) for x in (t.data, t.ids, t.weights))


def shift_id(t, row, slot) -> None:
    first = t.shard.first_expert
    t.ids[row, slot] = first + (t.ids[row, slot] - first + 1) % t.shard.num_local_experts


SPOILS = {  # of what arrived: a row, and a slot of it that names an expert
    "one bit": (lambda t, row, slot: t.data[row].view(torch.int16)[-1].bitwise_xor_(1), "a row that nobody sent"),
    "swapped rows": (lambda t, row, slot: t.data.copy_(t.data.roll(1, 0)), "not asked for"),
    "a lost row": (lambda t, row, slot: t.ids[row].fill_(t.shard.num_experts), "tokens missing"),
    "a row twice": (repeat_row, "not asked for"),
    "another local expert": (shift_id, "missing"),
    "a foreign expert": (lambda t, row, slot: t.ids[row, slot].fill_(t.shard.first_expert - 1), "neither of experts"),
    "another weight": (lambda t, row, slot: t.weights[row, slot].add_(2.0**-20), "not asked for"),
    "another dtype": (lambda t, row, slot: setattr(t, "ids", t.ids.long()), "break their format"),
}


class TestTransport:
    """One rank's arrivals made by hand, then spoilt."""

    CONFIG = CONFIGS["silu_bf16"]
    SHARD = ExpertPlacement(CONFIG.num_experts, ParallelConfig(4)).shard(1)
    BATCHES = make_batches(BY_NAME["uneven-partly_invalid"], 0, 4, CONFIG, torch.bfloat16)

    def arrived(self) -> FlatTokens:
        hidden = torch.cat([batch.hidden for batch in self.BATCHES])
        ids = torch.cat([batch.topk.ids for batch in self.BATCHES])
        mine = (ids >= self.SHARD.first_expert) & (ids < self.SHARD.end_expert)
        ids = torch.where(mine, ids, self.CONFIG.num_experts)
        weights = torch.cat([batch.topk.weights for batch in self.BATCHES])
        return FlatTokens(Payload.plain(hidden), ids, weights, self.CONFIG.num_experts)

    def problems(self, tokens):
        return wrong_arrivals(tokens, self.BATCHES, self.SHARD, None)

    def test_the_right_tokens_pass_in_both_formats_and_any_order(self):
        tokens = self.arrived()
        assert self.problems(tokens) == []
        order = torch.randperm(tokens.num_rows, generator=torch.Generator().manual_seed(0))
        shuffled = replace(
            tokens,
            hidden=Payload.plain(tokens.hidden.data[order]),
            ids=tokens.ids[order],
            weights=tokens.weights[order],
        )
        assert self.problems(shuffled) == []
        slabs, _ = expert_major_from_flat(tokens, self.SHARD, tokens.num_rows * 4)
        assert self.problems(slabs) == []

    @pytest.mark.parametrize(("spoil", "says"), SPOILS.values(), ids=SPOILS)
    def test_a_mistake_is_caught(self, spoil, says):
        tokens = self.arrived()
        row, slot = (tokens.ids < self.CONFIG.num_experts).nonzero()[0].tolist()
        given = SimpleNamespace(data=tokens.hidden.data.clone(), ids=tokens.ids.clone(), weights=tokens.weights.clone())
        given.shard = self.SHARD
        spoil(given, row, slot)
        hidden = Payload.plain(given.data)
        found = self.problems(FlatTokens(hidden, given.ids, given.weights, self.CONFIG.num_experts))
        assert found
        assert any(says in problem for problem in found), found

    def test_a_short_slab_is_caught(self):
        slabs, _ = expert_major_from_flat(self.arrived(), self.SHARD, 200)
        counts = slabs.counts.clone()
        counts[int(counts.argmax())] -= 1
        assert "1 tokens missing" in self.problems(replace(slabs, counts=counts))[0]

    def test_rows_that_need_not_be_written_stay_nan(self):
        tokens = self.arrived()
        idle = ~(tokens.ids < self.CONFIG.num_experts).any(1)
        assert idle.any()
        out = scale_experts(tokens, self.SHARD, torch.ones(self.CONFIG.num_experts), torch.bfloat16)
        assert torch.equal(out.isnan().any(1), idle)
        read = scale_experts(
            replace(tokens, every_row_read=True), self.SHARD, torch.ones(self.CONFIG.num_experts), torch.bfloat16
        )
        assert not read.isnan().any()


def test_executors_get_outputs_full_of_nan():
    flat = FlatTokens(Payload.plain(torch.ones(3, 8)), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2), 4)
    for out in (None, torch.zeros(3, 8)):
        unwritten = NanOutput(WritesNothing(MoEConfig(4, 2, 8, 16)))(flat, out)
        assert unwritten.shape == (3, 8)
        assert unwritten.isnan().all()


class WritesNothing(PreparedExecutor):
    def __init__(self, config: MoEConfig) -> None:
        self.config = config

    def _prepare(self, weights) -> None: ...

    def _flat(self, tokens, out) -> None: ...

    def _expert_major(self, tokens, out) -> None: ...


@pytest.mark.parametrize("strided", [True, False])
def test_so_do_executors_that_write_far_apart_rows_through_a_copy(monkeypatch, strided):
    monkeypatch.setattr(WritesNothing, "strided", strided)
    slabs = ExpertMajorTokens(Payload.plain(torch.ones(2, 3, 8)), torch.tensor([3, 1], dtype=torch.int32))
    out = torch.zeros(2, 3, 16)
    unwritten = NanOutput(WritesNothing(MoEConfig(4, 2, 8, 16)))(slabs, out[..., :8])
    assert unwritten.data_ptr() == out.data_ptr()
    assert unwritten[0].isnan().all()
    assert unwritten[1, :1].isnan().all()
    assert not out[..., 8:].any()


def test_every_token_of_a_world_is_unlike_every_other():
    for config in CONFIGS.values():
        for case in CASES:
            rows = [
                bytes(row.view(torch.uint8).tolist())
                for call in range(case.num_calls)
                for batch in make_batches(case, call, 8, config, torch.bfloat16)
                for row in batch.hidden
            ]
            assert len(set(rows)) == len(rows), case.name


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 6, 8, 10, 16])
def test_tokens_are_exact_in_bf16_and_so_are_their_weighted_sums(top_k):
    config = replace(CONFIGS["silu_bf16"], top_k=top_k)
    for case in CASES:
        for batch in make_batches(case, 0, 4, config, torch.float32):
            valid = batch.topk.ids < config.num_experts
            total = torch.where(valid, batch.topk.weights, 0.0).sum(1, keepdim=True) * batch.hidden
            for numbers in (batch.hidden, total):
                assert torch.equal(numbers, numbers.bfloat16().float())
            assert bool((batch.topk.weights[~valid] > 1000).all()), "an invalid slot that counts must show"


@pytest.mark.parametrize(
    ("out", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1.0], [0.0], math.inf),
        ([math.nan, 1.0], [1.0, 1.0], math.inf),
        ([3.0, 4.5], [3.0, 4.0], 0.1),
        ([1.0, 2.0], [1.0], math.inf),
        ([math.inf, -math.inf], [math.inf, -math.inf], 0.0),
        ([math.inf], [-math.inf], math.inf),
        ([1.0, 1.0], [math.inf, 1.0], math.inf),
        ([math.inf, 3.0, 4.5], [math.inf, 3.0, 4.0], 0.1),
    ],
)
def test_relative_error(out, expected, error):
    assert relative_error(torch.tensor(out), torch.tensor(expected)) == pytest.approx(error)


def test_a_summary_shows_the_worst_rank():
    check = Check("transport", CASES[0], "none")
    good, bad = CheckRow(check, 0, True, 0.0), CheckRow(check, 1, False, 0.0, "wrong")
    assert summarize([[good, good], [replace(good, error=0.5), bad]]) == [replace(good, error=0.5), bad]
    with pytest.raises(ValueError, match=r"shorter|longer"):
        summarize([[good], []])
