"""dispatch + identity + combine returns x * sum(weights) for any routing, bit for bit."""

from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.jobs import conformance_jobs as jobs

E, W = 8, 4


@st.composite
def worlds(draw):
    """Any counts, any ids (repeated, invalid, all on one rank), any weights in eighths (negative, zero), any R."""
    top_k = draw(st.integers(1, 5))
    expert = st.one_of(st.integers(0, E), st.sampled_from(draw(st.lists(st.integers(0, E), min_size=1, max_size=2))))
    row = st.lists(expert, min_size=top_k, max_size=top_k)
    weight = st.lists(st.integers(-64, 64), min_size=top_k, max_size=top_k)
    ids = [draw(st.lists(row, max_size=9)) for _ in range(W)]
    ids[0] = ids[0] or [draw(row)]  # rank 0 names K
    weights = [[draw(weight) for _ in rank] for rank in ids]
    largest = max(map(len, ids))
    return ids, weights, draw(st.one_of(st.none(), st.integers(max(largest, 1), 20)))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(world=worlds())
def test_any_routing(pools, world):
    ids, weights, agreed = world
    found = pools(W).run(jobs.round_trips, ids_by_rank=ids, eighths_by_rank=weights, agreed=agreed)
    for rank, of_rank in enumerate(found):
        for pair, problems in of_rank:
            assert problems == [], f"rank {rank}, {pair}"
