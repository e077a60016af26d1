"""NVFP4 tokens: one second-level scale for all ranks, and what it costs against bf16 tokens."""

from __future__ import annotations

import pytest
from support.jobs.conformance_jobs import PAIRS
from support.jobs.payload_jobs import agree, blackwell_errors, layer_errors

# E2M1 keeps one mantissa bit: blocks of 16 Gaussian values, each with a scale of its own, lose 0.10 in norm, whatever
# the second-level scale, as long as no block saturates or underflows. silu(gate) * up loses that twice, independently:
# times the root of 2, found 0.137 to 0.148.
AGAINST_BF16 = 0.16
AGAINST_ORACLE = 1e-2  # the same rounded numbers in bf16 and in float32


@pytest.mark.parametrize(
    ("scales", "payload", "found"),
    [
        ((0.5, 0.25), "nvfp4", [0.5]),  # the largest of all ranks
        ((0.25, 0.5), "nvfp4", [0.5]),
        ((0.5, 0.5), "nvfp4", [0.5]),
        ((None, None), "nvfp4", [1.0]),  # without calibration
        ((0.5, 0.25), "bf16", None),
    ],
)
def test_one_scale_for_all_ranks(pools, scales, payload, found):
    assert pools(2).run(agree, scales=scales, payloads=(payload,) * 2) == [found] * 2


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ((0.5, None), "gate_up.input_scale is missing on ranks [1] and set on the others"),
        ((None, 0.5), "gate_up.input_scale is missing on ranks [0] and set on the others"),
        ((0.5, float("nan")), "rank 1: gate_up.input_scale reaches nan: expected positive numbers"),
        ((0.0, 0.5), "rank 0: gate_up.input_scale reaches 0.0: expected positive numbers"),
    ],
)
def test_ranks_that_disagree_get_the_same_error(pools, scales, text):
    first, second = pools(2).run(agree, scales=scales)
    assert first == second
    assert first[0] == "ConfigError"
    assert text in first[1]


def test_a_rank_with_another_payload_is_named(pools):
    for kind, text in pools(2).run(agree, scales=(0.5, 0.5), payloads=("nvfp4", "bf16")):
        assert (kind, "(fingerprint, payload)" in text) == ("WorldMismatch", True)


@pytest.mark.parametrize("executor", ["reference", "torch_grouped"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_layer_against_bf16_tokens_and_the_oracle(pools, pair, executor):
    for size in (0.02, 1.0, 300.0):
        for against_bf16, against_oracle in pools(2).run(layer_errors, pair=pair, executor=executor, size=size):
            assert 0.1 <= against_bf16 <= AGAINST_BF16  # below: nothing was rounded
            assert against_oracle <= AGAINST_ORACLE


@pytest.mark.parametrize("executor", ["cutedsl_nvfp4", "trtllm_gen"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_blackwell_executors_take_the_payloads_own_scale(pools, pair, executor):
    for size in (0.02, 1.0, 300.0):
        for _, against_oracle in pools(2).run(blackwell_errors, pair=pair, executor=executor, size=size):
            assert against_oracle <= AGAINST_ORACLE


@pytest.mark.parametrize("mutation", ["scale dropped on arrival", "a scale for each rank"])
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_a_wrong_scale_fails(pools, pair, mutation):
    for against_bf16, against_oracle in pools(2).run(layer_errors, pair=pair, executor="reference", mutation=mutation):
        assert against_bf16 > AGAINST_BF16
        assert against_oracle > 10 * AGAINST_ORACLE


@pytest.mark.parametrize(("size", "fits"), [(1.0, True), (1e-4, False), (1000.0, False)])
def test_uncalibrated_range(pools, size, fits):
    """A scale of 1 holds blocks whose largest value lies between 0.006 and 2688: enough behind a norm, not beyond."""
    for against_bf16, against_oracle in pools(2).run(
        layer_errors, pair=("torch", "flat"), executor="reference", size=size, calibrated=False
    ):
        assert (against_bf16 <= AGAINST_BF16) is fits
        assert against_oracle <= AGAINST_ORACLE or not fits
