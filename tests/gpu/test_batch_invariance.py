"""Batch invariance on GPUs: bits of a token in random batches, at random places, on any rank, in graphs or not."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from support.builders import JOB_S
from support.cases.gpu_ranks import SIZE, skip_if_refused, this_gpu
from support.jobs import invariance_jobs as jobs

from eprt.config import ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.experts import EXECUTORS
from eprt.plan import make_plan
from eprt.ranks.launcher import WorldPool

pytestmark = pytest.mark.gpu

DRAWS = int(os.environ.get("EPRT_TEST_DRAWS", "400"))
HIDDEN = 1024  # so wide that the warp-specialized kernels take it
MOST = 1024  # tokens of a call: 384 rows an expert, more than any schedule but the last is for
CASES = [(e.name, f) for e in EXECUTORS.values() if "cuda" in e.invariant for f in e.weights if f != "f32"]
FP8_TOKENS = "fp8_block", "fp8_channel", "mxfp4"
ALONE = [(*case, False) for case in CASES] + [("triton_grouped", form, True) for form in FP8_TOKENS]


@pytest.fixture(scope="module")
def alone() -> Iterator[WorldPool]:
    """One rank on one GPU."""
    with WorldPool(1, device="cuda", timeout_s=JOB_S, grace_s=2) as held:
        yield held


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("executor", "weight_format", "fp8_tokens"), ALONE)
def test_bits_of_a_token_are_its_own_on_one_rank(
    alone: WorldPool, executor: str, weight_format: str, fp8_tokens: bool, graph: bool
) -> None:
    runtime = {"executor": executor, "max_tokens_per_rank": MOST, "low_precision_activations": fp8_tokens}
    try:
        config = jobs.config_of(weight_format, hidden=HIDDEN)
        make_plan(config, ParallelConfig(1), RuntimeConfig(**runtime, batch_invariant=True), this_gpu())
    except UnsupportedError as error:
        pytest.skip(f"the plan refuses it: {error}")
    [(wrong, pair)] = alone.run(
        jobs.invariant, weight_format=weight_format, draws=DRAWS, hidden=HIDDEN, graph=graph, **runtime
    )
    assert (wrong, pair) == (0, f"none + {executor}")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("shape", jobs.SHAPES)
def test_bits_of_a_token_are_its_own_in_published_widths(alone: WorldPool, shape: str, graph: bool) -> None:
    options = {"max_tokens_per_rank": MOST, "executor": "triton_grouped"}
    [(wrong, pair)] = alone.run(
        jobs.invariant, weight_format="of shape", draws=DRAWS, shape=shape, graph=graph, **options
    )
    assert (wrong, pair) == (0, "none + triton_grouped")


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize(("executor", "weight_format"), CASES)
def test_bits_of_a_token_are_its_own(pool, executor: str, weight_format: str, graph: bool) -> None:
    draws = DRAWS if SIZE > 2 else DRAWS // 10  # ranks of one GPU take turns on it
    runtime = RuntimeConfig("symm", executor, max_tokens_per_rank=jobs.MOST, batch_invariant=True)
    skip_if_refused(jobs.config_of(weight_format, hidden=HIDDEN), runtime)
    options = {"dispatcher": "symm", "executor": executor}
    for wrong, pair in pool.run(
        jobs.invariant, weight_format=weight_format, draws=draws, hidden=HIDDEN, graph=graph, **options
    ):
        assert pair.endswith(executor)
        assert wrong == 0
