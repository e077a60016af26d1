"""Every bad call is the same typed error, in the same words, on every rank; and the next correct call works."""

from __future__ import annotations

import pytest
from support.jobs import conformance_jobs as jobs

# What is wrong -> error type and a word of its text. Wrong on rank 1 only unless the name says otherwise.
INPUT = {
    "hidden_of_whole_numbers": ("InputError", "torch.int32"),
    "hidden_in_float64": ("InputError", "float64"),
    "hidden_too_narrow": ("InputError", "expected [T, 72]"),
    "hidden_for_fewer_tokens": ("InputError", "must agree"),
    "hidden_of_one_dimension": ("InputError", "expected [T, 72]"),
    "everything_on_another_device": ("InputError", "meta"),
    "ids_in_int64": ("InputError", "expected int32"),
    "ids_of_another_top_k": ("InputError", "expected [T, 3]"),
    "ids_on_another_device": ("InputError", "meta"),
    "id_below_zero": ("InputError", "spans [-1, "),
    "id_above_the_invalid_one": ("InputError", ", 9]"),
    "weights_in_bf16": ("InputError", "expected float32"),
    "weights_of_another_shape": ("InputError", "expected the shape of topk_ids"),
    "tokens_over_capacity": ("CapacityError", "max_tokens_per_rank >= 65"),
    "agreed_over_capacity": ("CapacityError", "max_tokens_per_rank >= 65"),
    "tokens_over_agreed": ("CapacityError", "tokens_per_rank >= 5"),
    "agreed_zero": ("InputError", "at least 1"),
    "different_agreed": ("WorldMismatch", "tokens_per_rank"),
    "agreed_on_one_rank_only": ("WorldMismatch", "tokens_per_rank"),
    "different_dtype": ("WorldMismatch", "dtype"),
    "skipped_step": ("WorldMismatch", "step"),
    "different_generation": ("WorldMismatch", "this call (generation);"),
}
CALLS = {
    "non_finite_weight": ("InputError", "1 non-finite"),
    "different_layer_order": ("WorldMismatch", "layer"),
    "different_combine_order": ("WorldMismatch", "this call (call);"),
    "different_config": ("WorldMismatch", "routing.scaling_factor"),
    "top_k_over_experts": ("ConfigError", "larger than num_experts"),
    "experts_that_do_not_divide": ("ConfigError", "9 experts"),
}


def same_error_everywhere(pools, kind, error, word, pair, through_layer=False):
    found = pools(4).run(jobs.bad_call, kind=kind, pair=pair, through_layer=through_layer, timeout_s=30)
    assert len({(name, text) for name, text, _ in found}) == 1, found
    name, text, _ = found[0]
    assert name == error, text
    assert word in text
    assert max(after for *_, after in found) < 1e-5, "the next correct call was wrong"


def test_every_bad_call_is_tested():
    assert set(INPUT) | set(CALLS) == set(jobs.BAD)


@pytest.mark.parametrize("pair", jobs.PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", [*INPUT, *CALLS])
def test_dispatcher(pools, kind, pair):
    same_error_everywhere(pools, kind, *(INPUT | CALLS)[kind], pair)


@pytest.mark.parametrize("pair", jobs.PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", INPUT)
def test_layer(pools, kind, pair):
    error, word = LAYER_WORDS.get(kind, INPUT[kind])
    same_error_everywhere(pools, kind, error, word, pair, through_layer=True)


# The layer sees these first and says them in its own words.
LAYER_WORDS = {
    "hidden_too_narrow": ("InputError", "expected [..., 72]"),
    "hidden_of_one_dimension": ("InputError", "expected [..., 72]"),
    "weights_of_another_shape": ("InputError", "topk_weights is (5, 2)"),
}
