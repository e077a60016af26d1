"""tests/gpu's whole layers where there is no GPU: the plan takes them on an SM90, and the same jobs run on gloo."""

from __future__ import annotations

import pytest
from support.cases.gpu_cases import GRAPHS, PACKED, ROUNDS, ROWS, graph_layer, packed_case, turned_placements
from support.jobs import whole_layer_jobs as jobs
from support.jobs.humming_jobs import needs_humming, replayed_layers

from eprt.config import RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.ranks.launcher import launch
from eprt.support import Device

SM90 = Device.parse("sm90")


def test_every_graph_case_can_run_on_an_sm90():
    assert {case.name: case.refusal(SM90) for case in GRAPHS} == {case.name: "" for case in GRAPHS}
    assert {case.runtime.executor for case in GRAPHS} == {"humming", "cutlass_mxfp4", "torch_grouped", "triton_grouped"}
    assert {case.runtime.dispatcher for case in GRAPHS} == {"none", "symm", "flashinfer", "deepep"}


def test_every_packed_case_but_nvfp4_over_deepep_can_run_on_an_sm90():
    refused = {row for row in PACKED if packed_case(*row).refusal(SM90)}
    assert refused == {row for row in PACKED if row[1:] == ("deepep", "nvfp4")}
    assert {dispatcher for _, dispatcher, _ in PACKED} == set(DISPATCHERS)
    assert "deepep: payload nvfp4: carries bf16, fp8_block only" in packed_case("qwen3_moe", "deepep", "nvfp4").refusal(
        SM90
    )


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "fp8_block"])
def test_static_rows_with_changing_counts_and_idle_ranks(pools, weight_format):
    runtime = RuntimeConfig(dispatcher="none", executor="torch_grouped", max_tokens_per_rank=ROWS)
    for errors in pools(4).run(jobs.replayed_layer, config=graph_layer(weight_format), runtime=runtime, rounds=ROUNDS):
        assert max(errors) <= 1e-2, errors


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_experts_that_move_between_rounds(pools, phase):
    runtime = RuntimeConfig(dispatcher="none", executor="torch_grouped", max_tokens_per_rank=ROWS, phase=phase)
    config = graph_layer("mxfp4")
    placements = turned_placements(config.num_experts, 4)
    assert len(set(placements)) == 4
    settings = {"config": config, "runtime": runtime, "rounds": ROUNDS * 2, "placements": placements}
    for errors in pools(4).run(jobs.replayed_layer, **settings):
        assert max(errors) <= 1e-2, errors
    wrong = pools(4).run(jobs.replayed_layer, **settings, wrong_slots=True)
    assert max(max(errors) for errors in wrong) > 0.1, "weights elsewhere than the ids go"


def test_the_start_that_is_timed_on_gpus():
    runtime = RuntimeConfig(dispatcher="torch", executor="torch_grouped", max_tokens_per_rank=ROWS)
    for _, warm_up in launch(jobs.seconds_to_start, 2, config=graph_layer("mxfp4"), runtime=runtime):
        assert warm_up < 10


@needs_humming
def test_humming_on_stand_ins(pools):
    """Tuned in a warm-up, too: small, for that times some 30 schedules of each matrix."""
    runtime = RuntimeConfig(dispatcher="none", executor="humming", max_tokens_per_rank=2)
    configs = [graph_layer(weight_format) for weight_format in ("mxfp4", "fp8_block")]
    rounds = [[2, 2], [1, 0], [0, 0], [0, 1]]
    for found in pools(2).run(replayed_layers, configs=configs, runtime=runtime, rounds=rounds):
        for errors in found:
            assert max(errors) <= 1e-2, found
