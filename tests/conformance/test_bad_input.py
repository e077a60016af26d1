"""Every bad call is the same typed error, in the same words, on every rank; and the next correct call works."""

from __future__ import annotations

import pytest
from support.jobs import conformance_jobs as jobs


def same_error_everywhere(pools, kind, error, word, pair, through_layer=False):
    found = pools(4).run(jobs.bad_call, kind=kind, pair=pair, through_layer=through_layer, timeout_s=30)
    assert len({(name, text) for name, text, _ in found}) == 1, found
    name, text, _ = found[0]
    assert name == error, text
    assert word in text
    assert max(after for *_, after in found) < 1e-5, "the next correct call was wrong"


@pytest.mark.parametrize("pair", jobs.PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", [*jobs.INPUT, *jobs.CALLS])
def test_dispatcher(pools, kind, pair):
    same_error_everywhere(pools, kind, *(jobs.INPUT | jobs.CALLS)[kind][1:], pair)


@pytest.mark.parametrize("pair", jobs.PAIRS, ids="-".join)
@pytest.mark.parametrize("kind", jobs.INPUT)
def test_layer(pools, kind, pair):
    error, word = LAYER_WORDS.get(kind, jobs.INPUT[kind][1:])
    same_error_everywhere(pools, kind, error, word, pair, through_layer=True)


# The layer sees these first and says them in its own words.
LAYER_WORDS = {
    "hidden_too_narrow": ("InputError", "expected [..., 72]"),
    "hidden_of_one_dimension": ("InputError", "expected [..., 72]"),
    "weights_of_another_shape": ("InputError", "topk_weights is (5, 2)"),
}
