"""Ranks left out, and outputs that travel back in FP8, on the GPUs of one NVLink host: one process a GPU, the real
FlashInfer and DeepEP."""

from __future__ import annotations

import math

import pytest
from support.builders import wrong_checks
from support.cases.gpu_ranks import SIZE, a_gpu_each, launch_here, several_gpus
from support.jobs import rank_mask_jobs as jobs

from eprt.conformance.cases import CASES
from eprt.conformance.checks import Check
from eprt.dispatch import DISPATCHERS


def _library(name: str, *values: object):
    found = DISPATCHERS[name].requirement.check()
    return pytest.param(name, *values, marks=pytest.mark.skipif(not found, reason=found.reason))


pytestmark = [*several_gpus, a_gpu_each]


@pytest.mark.parametrize("name", [_library("flashinfer"), _library("deepep")])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(2048, 1), (2880, 4), (7168, 8)])
def test_the_others_go_on_without_the_ranks_left_out(hidden_size, top_k, name):
    """In ranks of its own: no World of theirs is whole afterwards."""
    assert launch_here(jobs.left_out, name=name, hidden_size=hidden_size, top_k=top_k) == [[]] * SIZE


@pytest.mark.parametrize(("name", "follows"), [_library("flashinfer", False), _library("deepep", True)])
def test_graphs_and_the_mask(name, follows):
    assert launch_here(jobs.replayed, name=name, follows=follows) == [[]] * SIZE


@pytest.mark.parametrize("name", [_library("flashinfer")])
@pytest.mark.parametrize("kind", ["transport", "interleaved"])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(128, 1), (130, 3), (2880, 4), (7168, 8)])
def test_fp8_outputs_are_each_rank_s_row_rounded_and_summed(pool, hidden_size, top_k, kind, name):
    config = jobs.moe(hidden_size, top_k)
    checks = [Check(kind, case, name, config=config, combine_payload="fp8") for case in CASES]
    assert wrong_checks(pool, checks) == []


@pytest.mark.parametrize("name", [_library("flashinfer")])
@pytest.mark.parametrize(("hidden_size", "top_k"), [(130, 3), (2880, 4), (7168, 8)])
def test_fp8_outputs_in_a_graph_wherever_the_experts_write_them(pool, hidden_size, top_k, name):
    assert pool.run(jobs.fp8_replayed, hidden_size=hidden_size, top_k=top_k) == [[]] * SIZE


@pytest.mark.parametrize("name", [_library("flashinfer")])
def test_what_fp8_does_to_large_small_and_broken_outputs(pool, name):
    for returned in pool.run(jobs.fp8_extremes):
        assert returned == pytest.approx([448, -448, 448, -448, math.nan, 0, 2**-8, 0.3125], rel=0, abs=0, nan_ok=True)
