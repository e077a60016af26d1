"""The expert bench without a GPU: its cases are real layers, its random weights pass the layer's own checks."""

from __future__ import annotations

import pytest
import torch

from eprt.bench import experts as bench
from eprt.bench.experts import (
    SHAPES,
    Ceilings,
    ExpertRow,
    choose_cases,
    experts_report,
    random_experts,
    random_matrix,
)
from eprt.config import Activation, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError
from eprt.experts import EXECUTORS
from eprt.experts.reference import decode_matrix
from eprt.experts.timing import sample_ids
from eprt.placement import ExpertPlacement
from eprt.support import Device
from eprt.weights import Nvfp4

CPU = torch.device("cpu")


@pytest.mark.parametrize("weight_format", ["mxfp4", "nvfp4", "fp8_block", "bf16"])
def test_random_weights_are_the_configs(weight_format):
    config = MoEConfig(8, 2, 256, 96, Activation(limit=10.0), bias=True, weight_format=weight_format)
    shard = ExpertPlacement(8, ParallelConfig(4)).shard(0)
    weights = random_experts(config, shard.num_local_experts, CPU)
    weights.check(config, shard)
    values = decode_matrix(weights.gate_up, 2)
    assert values.isfinite().all()
    assert 0.1 < values.std() * 256**0.5 < 10
    if isinstance(weights.gate_up, Nvfp4) and isinstance(weights.down, Nvfp4):  # Blackwell's executors need these
        assert weights.gate_up.input_scale is not None
        assert weights.down.input_scale is not None


def test_unknown_names_and_machines_are_refused():
    with pytest.raises(ConfigError, match="fp8_tensor"):
        random_matrix("fp8_tensor", 1, 128, 128, 1, CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            experts_report(tokens=[1])


@pytest.mark.parametrize("device", ["sm90", "sm100"])
def test_every_executor_but_the_witness_is_measured_or_left_out_with_its_reason(device):
    cases, left_out = choose_cases(SHAPES, None, RuntimeConfig(), Device.parse(device))
    pairs = [(case.executor, case.shape) for case in cases]
    refused = [tuple(line.split(":")[0].split(" on ")) for line in left_out]
    everything = {(name, shape) for name in EXECUTORS for shape in SHAPES if name != "reference"}
    assert len(pairs) + len(refused) == len(everything)
    assert {*pairs, *refused} == everything
    assert all(line.split(": ", 1)[1] for line in left_out)


def test_the_cases_of_each_generation():
    def found(device: str, shape: str) -> dict[str, str]:
        cases, _ = choose_cases([shape], None, RuntimeConfig(), Device.parse(device))
        return {case.executor: case.config.weight_format for case in cases}

    # An executor that decodes at load is timed with what it then computes with.
    assert found("sm90", "gpt-oss-120b") == {"torch_grouped": "bf16", "humming": "mxfp4", "cutlass_mxfp4": "mxfp4"}
    nvfp4 = {"torch_grouped": "bf16", "cutedsl_nvfp4": "nvfp4", "trtllm_gen": "nvfp4"}
    assert found("sm100", "deepseek-v3-nvfp4") == nvfp4
    _, left_out = choose_cases(["deepseek-v3-fp8"], ["cutlass_mxfp4"], RuntimeConfig(), Device.parse("sm90"))
    assert left_out == ["cutlass_mxfp4 on deepseek-v3-fp8: takes mxfp4 weights, not fp8_block"]
    for shapes, executors, message in ((["gpt-6"], None, "shape 'gpt-6'"), (SHAPES, ["marlin"], "executor 'marlin'")):
        with pytest.raises(ConfigError, match=message):
            choose_cases(shapes, executors, RuntimeConfig(), Device.parse("sm90"))


def test_the_report_says_what_was_left_out(monkeypatch):
    row = ExpertRow("humming", "gpt-oss-120b", "mxfp4", 1, 1, 7.5, None, 128.0, 1.0, 0.0, 7.5, 2.9, 57.1, 0.0221)
    monkeypatch.setattr(bench, "_cuda", lambda device: CPU)
    monkeypatch.setattr(bench.Ceilings, "measure", lambda device: Ceilings(4.25678e12, 8e14))
    monkeypatch.setattr(bench, "_bench_one", lambda case, *rest: [row] if case.executor == "torch_grouped" else [])
    kept: list[int] = []
    report = experts_report(["gpt-oss-120b"], tokens=[1], keep=lambda report: kept.append(len(report.rows)))
    assert kept == [1]
    assert report.rows == [row.as_dict()]
    assert report.limits == {"copy_gb_per_s": 4256.8, "bf16_tflop_per_s": 800.0}
    assert "humming on gpt-oss-120b: runs on cuda, not on cpu" in report.notes
    assert len(report.notes) == len(EXECUTORS) - 2


@pytest.mark.parametrize("name", list(SHAPES))
def test_shapes_split_over_their_ranks(name):
    case = SHAPES[name]
    assert ExpertPlacement(case.config.num_experts, ParallelConfig(case.ep_size)).num_local_experts in (32, 64)


def test_sampled_routing_is_distinct_even_and_repeatable():
    ids = sample_ids(4000, 4, 32, CPU, seed=3)
    assert ids.dtype == torch.int32
    assert all(len(set(row)) == 4 for row in ids.tolist())
    assert torch.equal(ids, sample_ids(4000, 4, 32, CPU, seed=3))
    counts = torch.bincount(ids.flatten(), minlength=32)
    assert counts.min() > 400
    assert counts.max() < 600


def test_a_row_is_plain_data():
    row = ExpertRow("humming", "gpt-oss-120b", "mxfp4", 1, 0, 7.5, None, 128.0, 0.0, 0.0, None, 2.9, 57.1, 0.0221)
    assert row.as_dict()["prepare_peak"] == 0.022
    assert row.as_dict()["ratio"] is None
    assert Ceilings(4.3e12, 8e14).copy_bytes == 4.3e12
