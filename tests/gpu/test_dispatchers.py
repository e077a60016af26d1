"""Every dispatcher of the table on the GPUs of one host: one process a GPU, the real libraries, and one set of tests.

A dispatcher that the plan refuses here skips with the plan's reason. What one dispatcher alone has is in test_symm.py
and test_library_dispatchers.py.
"""

from __future__ import annotations

import pytest
import torch
from support.builders import wrong_checks
from support.cases.gpu_ranks import SHARED, SIZE, launch_here, several_gpus, skip_if_shared
from support.jobs import dispatcher_jobs as jobs
from support.jobs import lost_rank_jobs
from support.jobs.dispatcher_jobs import PAIRS, Beyond, Pair

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CASES
from eprt.conformance.checks import Check
from eprt.dispatch import DISPATCHERS
from eprt.ranks.launcher import WorldFailed
from eprt.support import Device

GRAPH_SAFE = [pair for pair in PAIRS if DISPATCHERS[pair[0]].graph_safe]
IN_CI = [pair for pair in PAIRS if "cpu" in DISPATCHERS[pair[0]].devices]
SHAPES = [(128, 1), (2880, 4), (4096, 3), (7168, 8)]

pytestmark = several_gpus


def refusal(pair: Pair, config: MoEConfig, runtime: RuntimeConfig, moe_tp_size: int = 1) -> str:
    """Why the plan refuses a dispatcher on this machine, or nothing."""
    parallel, device = ParallelConfig(SIZE, moe_tp_size=moe_tp_size), Device.of(torch.device("cuda", 0))
    verdict = DISPATCHERS[pair[0]].supports(config, parallel, runtime, device)
    return "" if verdict else verdict.reason


def require(pair: Pair, H: int = 128, K: int = 2, moe_tp_size: int = 1, **runtime) -> None:
    skip_if_shared(pair[0])
    if reason := refusal(pair, jobs.moe(H, K), jobs.runtime_of(token_format=pair[1], **runtime), moe_tp_size):
        pytest.skip(f"the plan refuses {pair[0]}: {reason}")


def run(pool, pair: Pair, kind: str, cases=CASES, **settings) -> None:
    assert wrong_checks(pool, [Check(kind, case, *pair, **settings) for case in cases]) == []


every_pair = pytest.mark.parametrize("pair", PAIRS, ids="-".join)
every_graph_safe_pair = pytest.mark.parametrize("pair", GRAPH_SAFE, ids="-".join)


@every_pair
@pytest.mark.parametrize("hidden_size", [128, 2880, 4096, 7168])
@pytest.mark.parametrize("top_k", [1, 3, 4, 6, 8])
def test_transport(pool, hidden_size: int, top_k: int, pair: Pair) -> None:
    require(pair, hidden_size, top_k)
    run(pool, pair, "transport", config=jobs.moe(hidden_size, top_k))


@every_pair
def test_two_open_calls(pool, pair: Pair) -> None:
    require(pair)
    run(pool, pair, "interleaved", config=jobs.moe(128, 4))


# DeepEP quantises by itself, so not bit for bit as we do: test_library_dispatchers.py.
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0] != "deepep"], ids="-".join)
@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2880, 4), (7168, 8), (2896, 3)])
def test_packed_transport(pool, hidden_size: int, top_k: int, payload: str, pair: Pair) -> None:
    require(pair, hidden_size, top_k, payload=payload)
    cases = CASES if pair[0] == "symm" else CASES[::3]  # ours
    run(pool, pair, "transport", cases, config=jobs.moe(hidden_size, top_k), payload=payload)


@every_pair
@pytest.mark.parametrize("moe_tp_size", [size for size in (2, 4) if size <= SIZE])
def test_ranks_that_share_an_expert(pool, moe_tp_size: int, pair: Pair) -> None:
    require(pair, moe_tp_size=moe_tp_size)
    run(pool, pair, "transport", moe_tp_size=moe_tp_size)


@pytest.mark.parametrize(
    ("pair", "executor"),
    [(pair, "torch_grouped") for pair in PAIRS] + [(pair, "reference") for pair in PAIRS if pair not in IN_CI],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("config", ["silu_bf16", "gpt_oss"])
def test_layer_against_the_oracle(pool, config: str, executor: str, pair: Pair) -> None:
    require(pair)
    run(pool, pair, "layer", executor=executor, config=config)


@every_pair
@pytest.mark.parametrize("config", ["silu_bf16", "relu2_bf16"])
def test_our_own_grouped_gemm_against_the_oracle(pool, config: str, pair: Pair) -> None:
    require(pair)
    run(pool, pair, "layer", executor="triton_grouped", config=config)


@pytest.mark.parametrize("beyond", jobs.BEYOND, ids=str)
def test_beyond_a_limit_the_plan_and_the_dispatcher_name_it(pool, beyond: Beyond) -> None:
    require(beyond.pair)
    assert beyond.says in refusal(beyond.pair, beyond.config, beyond.runtime, beyond.moe_tp_size)
    found = pool.run(jobs.not_built, beyond=beyond)
    assert [kind for kind, _ in found] == ["ConfigError"] * SIZE
    assert all(beyond.says in text for _, text in found)


ROUNDS = [[64] * SIZE, [1, 0, 33, 64][:SIZE], [0] * SIZE, [0, 64, 0, 0][:SIZE], [5] * SIZE]


@every_graph_safe_pair
@pytest.mark.parametrize(("hidden_size", "top_k"), SHAPES)
def test_graph_replays_with_new_data_counts_and_idle_ranks(pool, hidden_size: int, top_k: int, pair: Pair) -> None:
    """Captured in the first call after warm-up, which therefore can't compile or connect anything."""
    require(pair, hidden_size, top_k)
    for wrong in pool.run(jobs.replay, pair=pair, rounds=ROUNDS, H=hidden_size, K=top_k):
        assert wrong == [0] * len(ROUNDS)


@every_graph_safe_pair
@pytest.mark.parametrize("payload", ["fp8_block", "nvfp4"])
def test_graph_replays_with_packed_tokens(pool, payload: str, pair: Pair) -> None:
    require(pair, 4096, 3, payload=payload)
    for wrong in pool.run(jobs.replay, pair=pair, rounds=ROUNDS, H=4096, K=3, payload=payload):
        assert wrong == [0] * len(ROUNDS)


@every_pair
def test_thousands_of_random_steps(pool, pair: Pair) -> None:
    """10,000 where a graph may be replayed for as long, with one rank or another late by up to 50 ms now and then."""
    require(pair, 2880, 4, capacity=96)
    settings = {
        "steps": 10_000 if pair in GRAPH_SAFE and not SHARED else 1_000,
        "delay_share": 0.05,
        "H": 2880,
        "K": 4,
        "capacity": 96,
    }
    assert pool.run(jobs.random_steps, pair=pair, **settings) == [0] * SIZE


@every_pair
def test_small_and_large_batches_with_delays(pool, pair: Pair) -> None:
    """R on both sides of 64, where the cut of the work changes in symm's kernels."""
    require(pair, 7168, 8, capacity=300)
    settings = {"steps": 300, "delay_share": 0.3, "H": 7168, "K": 8, "capacity": 300}
    assert pool.run(jobs.random_steps, pair=pair, **settings) == [0] * SIZE


@pytest.mark.parametrize("pair", [(name, "flat") for name in ("torch", "symm", "flashinfer")], ids="-".join)
@pytest.mark.parametrize(("hidden_size", "top_k"), [(512, 4), (7168, 8)])
def test_sums_of_any_numbers_are_rounded_once(pool, hidden_size: int, top_k: int, pair: Pair) -> None:
    require(pair, hidden_size, top_k, capacity=300)
    rows = [1, 48, 65, 300]
    assert pool.run(jobs.sums_of_any_numbers, pair=pair, H=hidden_size, K=top_k, rows=rows) == [0] * SIZE


@every_pair
def test_layers_geometries_and_worlds_do_not_disturb_each_other(pool, pair: Pair) -> None:
    require(pair)
    assert pool.run(jobs.several_at_once, pair=pair) == [0] * SIZE


@every_pair
def test_refusals_are_typed_and_the_next_call_works(pool, pair: Pair) -> None:
    require(pair)
    assert jobs.unexpected(pool.run(jobs.refusals, pair=pair), pair) == []


@every_pair
def test_a_skipped_combine_is_noticed_where_headers_are_compared(pool, pair: Pair) -> None:
    require(pair)
    found = pool.run(jobs.one_rank_skips_a_combine, pair=pair)
    assert len(set(found)) == 1
    kind, text, wrong = found[0]
    assert (kind, "operation" in text, wrong) == ("WorldMismatch", True, 0)


@pytest.mark.parametrize("name", DISPATCHERS)
def test_a_killed_rank_is_named_by_the_others_within_the_limit(name: str) -> None:
    pair: Pair = (name, DISPATCHERS[name].formats[0])
    require(pair)
    with pytest.raises(WorldFailed) as failure:
        launch_here(lost_rank_jobs.one_rank_dies, grace_s=lost_rank_jobs.LIMIT_S + 7, pair=pair, how="dies in dispatch")
    assert lost_rank_jobs.unheard(failure.value, may_exit=name != "symm") == []
