"""Every conformance row on every dispatcher, token format and executor that runs without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.builders import wrong_checks
from support.jobs import conformance_jobs as jobs

from eprt.conformance.cases import BY_NAME, CASES, CONFIGS, COUNTS, CUT_CASES, ROUTINGS, make_topk
from eprt.conformance.checks import CAPACITY, Check, standard_checks
from eprt.support import Device

EXECUTORS = ["reference", "torch_grouped"]


def run(pools, size: int, checks: list[Check]) -> None:
    assert wrong_checks(pools(size), checks) == []


def test_the_table_holds_every_row_that_was_promised():
    assert [counts.name for counts in COUNTS] == [
        "equal", "uneven", "one_idle", "all_but_one_idle", "all_idle", "one_over_all", "agreed_not_reached", "changing",
    ]  # fmt: skip
    assert ROUTINGS == ("uniform", "hot_expert", "one_rank", "all_invalid", "partly_invalid")
    assert {(case.counts, case.routing) for case in CASES} == {(c, r) for c in COUNTS for r in ROUTINGS}
    assert {c.name: c.agreed for c in COUNTS if c.agreed is not None} == {"equal": 5, "agreed_not_reached": 23}
    assert {len(counts.calls) for counts in COUNTS} == {1, 3}
    for size in (1, 2, 4, 8):
        of = {counts.name: [counts.of(call, size) for call in range(len(counts.calls))] for counts in COUNTS}
        assert of["all_idle"] == [[0] * size]
        assert len(set(of["equal"][0])) == 1
        if size > 1:
            assert len(set(of["uneven"][0])) > 1
            assert of["all_but_one_idle"][0][1:] == [0] * (size - 1)
            assert of["one_idle"][0].count(0) == 1
            assert max(of["one_over_all"][0]) > sum(of["one_over_all"][0]) / 2
            assert len({tuple(row) for row in of["changing"]}) == 3
        assert max(of["equal"][0]) == 5
        assert max(of["agreed_not_reached"][0]) < 23


@pytest.mark.parametrize("size", [2, 4])
def test_routings_are_what_their_names_say(size):
    config, generator = CONFIGS["silu_bf16"], torch.Generator().manual_seed(0)
    E, K = config.num_experts, config.top_k
    ids = {name: make_topk(name, 200, size, config, generator).ids for name in ROUTINGS}
    assert bool((ids["uniform"] < E).all())
    # 200 tokens choose 4 of 16: 50 an expert, give or take 4 standard deviations.
    assert all(25 < n < 75 for n in ids["uniform"].flatten().bincount(minlength=E).tolist())
    assert bool((ids["hot_expert"] == E // 2).any(1).all()), "every token visits the hot expert"
    assert bool((ids["hot_expert"] < E).all())
    valid = ids["one_rank"][ids["one_rank"] < E]
    assert set(valid.tolist()) == set(range(E - E // size, E)), "the last rank's experts, all of them and no others"
    assert bool((ids["one_rank"] < E).any(1).all())
    assert bool((ids["all_invalid"] == E).all())
    assert 0.4 < float((ids["partly_invalid"] == E).float().mean()) < 0.6
    for name in ("uniform", "hot_expert"):
        assert all(len(set(row)) == K for row in ids[name].tolist()), "an expert is chosen once"


@pytest.mark.parametrize(("kind", "open_at_once"), [("transport", 1), ("interleaved", 2)])
def test_interleaved_calls_are_open_at_the_same_time(pools, kind, open_at_once):
    check = Check(kind, BY_NAME["changing-uniform"], "torch")
    assert pools(2).run(jobs.most_open_calls, check=check) == [open_at_once] * 2


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("kind", "dtype"), [("transport", "bf16"), ("interleaved", "f32")])
def test_transport(pools, size, kind, dtype, dispatcher, token_format):
    run(pools, size, [Check(kind, case, dispatcher, token_format, dtype=dtype) for case in CASES])


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize(
    ("dtype", "payload"), [("bf16", "fp8_block"), ("bf16", "nvfp4"), ("bf16", "f32"), ("f32", "bf16")]
)
def test_packed_transport(pools, dtype, payload, dispatcher, token_format):
    run(pools, 4, [Check("transport", case, dispatcher, token_format, payload=payload, dtype=dtype) for case in CASES])


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize("moe_tp_size", [2, 4])
def test_transport_to_ranks_that_share_an_expert(pools, moe_tp_size, dispatcher, token_format):
    """Each of them gets the token, with the same slots."""
    checks = [Check("transport", case, dispatcher, token_format, moe_tp_size=moe_tp_size) for case in CASES]
    run(pools, 4, checks)


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_layer(pools, size, config, executor, dispatcher, token_format):
    """Every case on one layer; on the others every third, which has each count and each routing."""
    cases = CASES if (size, config) == (4, "gpt_oss") else CASES[::3]
    dtype = "f32" if config == "silu_f32" else "bf16"
    run(pools, size, [Check("layer", case, dispatcher, token_format, executor, config, dtype=dtype) for case in cases])


def test_cut_cases_are_over_the_capacity_in_a_group_of_two_as_well():
    for case in CUT_CASES:
        rows = [case.counts.agreed or max(case.counts.of(call, 4)) for call in range(case.num_calls)]
        assert max(rows) > 2 * CAPACITY


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize(("size", "attention_tp_size", "moe_tp_size"), [(1, 1, 1), (4, 1, 1), (4, 2, 1), (4, 2, 2)])
def test_layer_cuts_what_is_over_its_capacity(pools, size, attention_tp_size, moe_tp_size, dispatcher, token_format):
    tp = {"attention_tp_size": attention_tp_size, "moe_tp_size": moe_tp_size}
    checks = [
        Check("layer", case, dispatcher, token_format, "torch_grouped", config, dtype=dtype, **tp)
        for config, dtype in (("silu_f32", "f32"), ("gpt_oss", "bf16"))
        for case in CUT_CASES
    ]
    run(pools, size, checks)


@pytest.mark.parametrize(("dispatcher", "token_format"), jobs.PAIRS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("size", "attention_tp_size", "moe_tp_size"), [(2, 1, 2), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 4)]
)
def test_layer_under_tensor_parallelism(
    pools, size, attention_tp_size, moe_tp_size, executor, dispatcher, token_format
):
    tp = {"attention_tp_size": attention_tp_size, "moe_tp_size": moe_tp_size}
    dtypes = {"silu_f32": "f32", "gpt_oss": "bf16", "relu2_bf16": "bf16"}
    if moe_tp_size == 4:  # I = 64 in four parts would split MXFP4's blocks of 32
        del dtypes["gpt_oss"]
    checks = [
        Check("layer", case, dispatcher, token_format, executor, config, dtype=dtype, **tp)
        for config, dtype in dtypes.items()
        for case in CASES[::3]
    ]
    run(pools, size, checks)


def test_standard_checks_cover_both_dispatchers_formats_and_executors_on_a_cpu():
    checks = standard_checks(4, Device("cpu"))
    layers = {(c.dispatcher, c.token_format, c.executor) for c in checks if c.kind == "layer"}
    assert layers == {(*pair, executor) for pair in jobs.PAIRS for executor in EXECUTORS}
    transports = {(c.dispatcher, c.token_format) for c in checks if c.kind == "transport"}
    assert transports == set(jobs.PAIRS)
    assert {c.case for c in checks} == {*CASES, *CUT_CASES}
    assert {c.case for c in checks if c.kind != "layer"} == set(CASES)


def test_experts_that_do_not_divide_over_the_ranks(pools):
    """Dispatchers carry slots, of which each rank has equally many; layers leave some of them empty."""
    run(pools, 3, [check for check in standard_checks(3, Device("cpu")) if check.case in CASES[::9]])


@st.composite
def worlds(draw):
    """Any counts, any ids (repeated, invalid, all on one rank), any weights in eighths (negative, zero), any R."""
    top_k = draw(st.integers(1, 5))
    expert = st.one_of(st.integers(0, 8), st.sampled_from(draw(st.lists(st.integers(0, 8), min_size=1, max_size=2))))
    row = st.lists(expert, min_size=top_k, max_size=top_k)
    weight = st.lists(st.integers(-64, 64), min_size=top_k, max_size=top_k)
    ids = [draw(st.lists(row, max_size=9)) for _ in range(4)]
    ids[0] = ids[0] or [draw(row)]  # rank 0 names K
    weights = [[draw(weight) for _ in rank] for rank in ids]
    largest = max(map(len, ids))
    return ids, weights, draw(st.one_of(st.none(), st.integers(max(largest, 1), 20)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds())
def test_any_routing(pools, world):
    """dispatch + identity + combine returns x * sum(weights), bit for bit."""
    ids, weights, agreed = world
    found = pools(4).run(jobs.round_trips, ids_by_rank=ids, eighths_by_rank=weights, agreed=agreed)
    for rank, of_rank in enumerate(found):
        for pair, problems in of_rank:
            assert problems == [], f"rank {rank}, {pair}"
