"""Every conformance row on every dispatcher, token format and executor that runs without a GPU."""

from __future__ import annotations

import pytest

from eprt.conformance.cases import CASES, CONFIGS, COUNTS, ROUTINGS
from eprt.conformance.checks import Check, run_checks, standard_checks, summarize
from eprt.support import Device

PAIRS = [("none", "flat"), ("torch", "flat"), ("torch", "expert_major")]
EXECUTORS = ["reference", "torch_grouped"]


def run(pools, size: int, checks: list[Check]) -> None:
    rows = summarize(pools(size).run(run_checks, checks=checks))
    assert len(rows) == len(checks) > 0
    wrong = [f"{row.check.name}, rank {row.rank}: error {row.error:.2e} {row.detail}" for row in rows if not row.ok]
    assert wrong == []


def test_the_table_holds_every_row_that_was_promised():
    assert len(CASES) == len(COUNTS) * len(ROUTINGS)
    assert {len(counts.calls) for counts in COUNTS} == {1, 3}
    for size in (1, 2, 4, 8):
        of = {counts.name: [counts.of(call, size) for call in range(len(counts.calls))] for counts in COUNTS}
        assert of["all_idle"] == [[0] * size]
        assert len(set(of["equal"][0])) == 1
        if size > 1:
            assert of["all_but_one_idle"][0][1:] == [0] * (size - 1)
            assert of["one_idle"][0].count(0) == 1
            assert max(of["one_over_all"][0]) > sum(of["one_over_all"][0]) / 2
            assert len({tuple(row) for row in of["changing"]}) == 3


@pytest.mark.parametrize(("dispatcher", "token_format"), PAIRS)
@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("kind", "dtype"), [("transport", "bf16"), ("interleaved", "f32")])
def test_transport(pools, size, kind, dtype, dispatcher, token_format):
    run(pools, size, [Check(kind, case, dispatcher, token_format, dtype=dtype) for case in CASES])


@pytest.mark.parametrize(("dispatcher", "token_format"), PAIRS)
@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
def test_packed_transport(pools, payload, dispatcher, token_format):
    run(pools, 4, [Check("transport", case, dispatcher, token_format, payload=payload) for case in CASES])


@pytest.mark.parametrize(("dispatcher", "token_format"), PAIRS)
@pytest.mark.parametrize("moe_tp_size", [2, 4])
def test_transport_to_ranks_that_share_an_expert(pools, moe_tp_size, dispatcher, token_format):
    """Each of them gets the token, with the same slots."""
    checks = [Check("transport", case, dispatcher, token_format, moe_tp_size=moe_tp_size) for case in CASES]
    run(pools, 4, checks)


@pytest.mark.parametrize(("dispatcher", "token_format"), PAIRS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("config", CONFIGS)
def test_layer(pools, config, executor, dispatcher, token_format):
    dtype = "f32" if config == "silu_f32" else "bf16"
    checks = [Check("layer", case, dispatcher, token_format, executor, config, dtype=dtype) for case in CASES]
    run(pools, 4, checks)
    run(pools, 2, checks[::3])
    run(pools, 1, checks[::3])


@pytest.mark.parametrize(("dispatcher", "token_format"), PAIRS)
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize(
    ("size", "attention_tp_size", "moe_tp_size"), [(2, 1, 2), (4, 1, 2), (4, 2, 1), (4, 2, 2), (4, 4, 4)]
)
def test_layer_under_tensor_parallelism(
    pools, size, attention_tp_size, moe_tp_size, executor, dispatcher, token_format
):
    checks = [
        Check(
            "layer",
            case,
            dispatcher,
            token_format,
            executor,
            config,
            dtype="f32" if config == "silu_f32" else "bf16",
            attention_tp_size=attention_tp_size,
            moe_tp_size=moe_tp_size,
        )
        for config in ("silu_f32", "gpt_oss", "relu2_bf16")
        for case in CASES[::3]
    ]
    if moe_tp_size == 4:  # I = 64 in four parts would split MXFP4's blocks of 32
        checks = [check for check in checks if check.config != "gpt_oss"]
    run(pools, size, checks)


def test_standard_checks_cover_both_dispatchers_formats_and_executors_on_a_cpu():
    checks = standard_checks(4, Device("cpu"))
    layers = {(c.dispatcher, c.token_format, c.executor) for c in checks if c.kind == "layer"}
    assert layers == {(*pair, executor) for pair in PAIRS for executor in EXECUTORS}
    transports = {(c.dispatcher, c.token_format) for c in checks if c.kind == "transport"}
    assert transports == set(PAIRS)
    assert {c.case for c in checks} == set(CASES)
