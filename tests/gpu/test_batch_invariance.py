"""Batch invariance on GPUs: bits of a token in random batches, at random places, on any rank, in graphs or not."""

from __future__ import annotations

import os

import pytest
from support.cases.gpu_ranks import skip_if_refused
from support.jobs import invariance_jobs as jobs

from eprt.config import RuntimeConfig
from eprt.experts import EXECUTORS

pytestmark = pytest.mark.gpu

DRAWS = int(os.environ.get("EPRT_TEST_DRAWS", "400"))
HIDDEN = 1024  # so wide that the warp-specialized kernels take it
CASES = [(e.name, f) for e in EXECUTORS.values() if "cuda" in e.invariant for f in e.weights if f != "f32"]


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("executor", "weight_format"), CASES)
def test_bits_of_a_token_are_its_own(pool, executor: str, weight_format: str, graph: bool) -> None:
    runtime = RuntimeConfig(executor=executor, max_tokens_per_rank=jobs.MOST, batch_invariant=True)
    skip_if_refused(jobs.config_of(weight_format, hidden=HIDDEN), runtime)
    for wrong, pair in pool.run(
        jobs.invariant, weight_format=weight_format, draws=DRAWS, hidden=HIDDEN, executor=executor, graph=graph
    ):
        assert pair.endswith(executor)
        assert wrong == 0
