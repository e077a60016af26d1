"""Checkpoints as ModelOpt writes them, from their bytes to the whole layer's output.

The files are written here from numbers chosen here: what they mean is known without eprt's readers and decoders.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.cases.gpu_cases import PACKED_SIZES
from support.cases.packed_checkpoints import FAMILIES, write
from support.jobs.checkpoint_jobs import BOUND, COST, errors, run_layer
from support.jobs.humming_jobs import needs_humming, run_layers

from eprt.config import RuntimeConfig
from eprt.models import load_layer
from eprt.weights import Dense

RUNTIME = RuntimeConfig(max_tokens_per_rank=32)
PAIRS = (("none", "reference"), ("torch", "torch_grouped"))


def by_pairs(pool, folder, written, **runtime):
    """What each rank saw, by one pair and by the other."""
    for dispatcher, executor in PAIRS:
        settings = replace(RUNTIME, dispatcher=dispatcher, executor=executor, **runtime)
        yield pool.run(run_layer, folder=str(folder), number=written.layer, runtime=settings)


@pytest.mark.parametrize("algorithm", ["nvfp4", "fp8_tensor"])
@pytest.mark.parametrize("name", FAMILIES)
def test_layer_from_a_modelopt_checkpoint(pools, tmp_path, name, algorithm):
    written = write(tmp_path, name, algorithm)
    assert load_layer(tmp_path, written.layer).config.weight_format == algorithm
    experts = written.known.experts
    rolled = replace(experts, gate_up=Dense(experts.gate_up.data.roll(1, dims=0)))
    swapped = replace(written, known=replace(written.known, experts=rolled))
    for ranks in by_pairs(pools(2), tmp_path, written):
        assert errors(written, ranks)[0] <= BOUND
        assert errors(swapped, ranks)[0] > 5 * BOUND


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_tokens_meet_packed_weights(pools, tmp_path, name):
    """NVFP4 weights at EP4, one rank idle: as tests/gpu/test_checkpoints.py runs them."""
    written = write(tmp_path, name, "nvfp4")
    for payload, (low, high) in COST.items():
        for ranks in by_pairs(pools(4), tmp_path, written, payload=payload):
            error, cost = errors(written, ranks, payload)
            assert error <= BOUND, payload
            assert low <= cost <= high, payload
            if payload == "nvfp4":
                assert [float(ran.scale) for ran in ranks] == [pytest.approx(written.input_scale)] * 4


def test_a_checkpoint_that_calibrates_no_nvfp4_tokens(pools, tmp_path):
    written = write(tmp_path, "qwen3_moe", "fp8_tensor")
    for ranks in by_pairs(pools(2), tmp_path, written, payload="nvfp4"):
        assert [float(ran.scale) for ran in ranks] == [1.0] * 2
        assert errors(written, ranks, "nvfp4")[0] <= BOUND


@needs_humming
@pytest.mark.parametrize("name", FAMILIES)
def test_through_humming(pools, tmp_path, name):
    """Its checks, schedules and activations at the sizes that GPUs get; stand-ins for its kernels."""
    written = write(tmp_path, name, "nvfp4", PACKED_SIZES)
    runs = [("none", "flat", payload) for payload in (None, *COST)] + [("torch", "expert_major", None)]
    runtimes = [
        replace(RUNTIME, dispatcher=dispatcher, token_format=form, payload=payload, executor="humming")
        for dispatcher, form, payload in runs
    ]
    ranks = pools(2).run(run_layers, folder=str(tmp_path), number=written.layer, runtimes=runtimes)
    for (_, form, payload), found in zip(runs, zip(*ranks, strict=True), strict=True):
        error, cost = errors(written, found, payload)
        assert error <= BOUND, (form, payload)
        low, high = COST.get(payload, (0.0, BOUND))
        assert low <= cost <= high, (form, payload)
