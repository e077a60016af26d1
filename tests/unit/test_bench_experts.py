"""The expert bench without a GPU: its cases are real layers, its random weights pass the layer's own checks."""

from __future__ import annotations

import pytest
import torch

from eprt.bench.experts import SHAPES, Ceilings, ExpertRow, bench_experts, random_experts, random_matrix
from eprt.config import Activation, MoEConfig, ParallelConfig
from eprt.errors import ConfigError
from eprt.experts.reference import decode_matrix
from eprt.experts.timing import sample_ids
from eprt.placement import ExpertPlacement

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


def test_unknown_names_and_machines_are_refused():
    with pytest.raises(ConfigError, match="fp8_tensor"):
        random_matrix("fp8_tensor", 1, 128, 128, 1, CPU)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            bench_experts()


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
