"""Batch invariance: a token's bits don't depend on what comes with it, at which place, on which rank."""

from __future__ import annotations

import os

import pytest
from support.cases.expert_cases import CPU, make_config, make_weights, shard_of
from support.jobs import invariance_jobs as jobs

from eprt.config import MAX_TOKENS, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.experts.grouped import TritonGroupedExecutor
from eprt.experts.grouped.schedules import FEW, FEW_INVARIANT, ONE_ORDER, choose
from eprt.placement import ExpertPlacement
from eprt.plan import make_plan
from eprt.support import Device

DRAWS = int(os.environ.get("EPRT_TEST_DRAWS", "60"))
H200 = Device("cuda", 90)


@pytest.mark.parametrize(
    ("ranks", "weight_format", "pair", "options"),
    [
        (1, "f32", "none + torch_grouped", {}),
        (2, "f32", "torch + torch_grouped", {"bias": True}),
        (2, "bf16", "none + torch_grouped", {"dispatcher": "none"}),
        (2, "mxfp4", "torch + torch_grouped", {"token_format": "expert_major"}),
        (2, "f32", "torch + reference", {"executor": "reference", "bias": True}),
        (2, "f32", "torch + torch_grouped", {"graph": True}),
        (4, "f32", "torch + torch_grouped", {}),
    ],
)
def test_bits_of_a_token_are_its_own(pools, ranks: int, weight_format: str, pair: str, options: dict) -> None:
    limit_s = max(90.0, 0.1 * DRAWS)  # 10,000 draws of two ranks take more than 90 s on two busy cores
    found = pools(ranks).run(jobs.invariant, timeout_s=limit_s, weight_format=weight_format, draws=DRAWS, **options)
    for wrong, chosen in found:
        assert chosen == pair
        assert wrong == 0


def test_without_the_mode_the_draws_find_that_sums_follow_the_batch(pools) -> None:
    found = pools(1).run(jobs.invariant, weight_format="f32", draws=DRAWS, batch_invariant=False)
    assert found[0][0] > 0


def layer(ranks: int, **runtime):
    config = MoEConfig(8, 2, 2880, 2880, weight_format="mxfp4")
    options = RuntimeConfig(batch_invariant=True, **runtime)
    return config, ParallelConfig(ranks, ranks_per_host=8), options, H200


def test_the_plan_takes_pairs_that_keep_it() -> None:
    plan = make_plan(*layer(4))
    assert (plan.dispatcher, plan.executor) == ("symm", "triton_grouped")
    reasons = {(c.dispatcher, c.executor): c.support.reason for c in plan.candidates if not c.support}
    assert reasons["none", "triton_grouped"] == (
        "none: batch_invariant: adds up the outputs of more than 2 ranks in no fixed order"
    )
    assert reasons["symm", "cutlass_mxfp4"] == "cutlass_mxfp4: batch_invariant: sums follow the batch"
    assert not any(plan.engines.values())


def test_replicas_are_refused() -> None:
    config, parallel, runtime, device = layer(2)
    placement = ExpertPlacement(8, parallel, (*range(8), 3, 0))
    with pytest.raises(UnsupportedError, match="which replica a token visits follows the batch"):
        make_plan(config, parallel, runtime, device, placement)


@pytest.mark.parametrize(
    ("weight_format", "hopper", "by_size"), [("mxfp4", True, True), ("mxfp4", False, False), ("nvfp4", True, False)]
)
def test_schedules_are_those_of_one_order_of_sums(weight_format: str, hopper: bool, by_size: bool) -> None:
    """Few tokens get blocks that have it, where all tile schedules were seen to; else one serves all sizes."""
    config, sizes = make_config(weight_format), (1, 7, 100, 5000, 64 * MAX_TOKENS)
    runtime = RuntimeConfig(batch_invariant=True)
    executor = TritonGroupedExecutor(config, shard_of(config), make_weights(config), CPU, runtime)
    executor._hopper = hopper
    schedules = {executor._schedule(tokens) for tokens in sizes}
    of_sizes = {choose("w4a16", n / 2, config.hidden_size, hopper=True) for n in sizes}
    assert len(schedules) == (len(of_sizes) if by_size else 1)
    assert executor._few(1) is (FEW_INVARIANT["w4a16"][0] if by_size else None)


def test_blocks_of_few_tokens_have_one_sum() -> None:
    assert set(FEW_INVARIANT) <= set(ONE_ORDER)
    tiles = [tile for known in FEW_INVARIANT.values() for few in known for tile in (few.first, few.second)]
    assert {(tile.halves, tile.splits) for tile in tiles} == {(1, 1)}
    assert FEW_INVARIANT["w4a16"][-1].tokens <= FEW["w4a16"][-1].tokens
