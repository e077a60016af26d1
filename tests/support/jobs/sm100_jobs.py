"""Jobs for test_sm100_pairs.py: the Blackwell executors in CPU ranks, on stand-in kernels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from eprt.conformance.checks import Check, CheckRow, run_checks
from eprt.experts import EXECUTORS
from eprt.experts.blackwell.cutedsl import CuteDslExecutor
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.ranks.process import RankContext
from eprt.weights import ExpertWeights, Fp8Tensor, Nvfp4
from support.stand_ins.cutedsl_kernels import FakeCuteDsl
from support.stand_ins.trtllm_kernels import FakeTrtllm

# The conformance tokens are whole numbers up to 15: FP8 holds them exactly over a power of two.
_TOKEN_SCALE = 2.0**-4


def _calibrated(weights: ExpertWeights) -> ExpertWeights:
    """Checkpoints of formats that quantise activations bring input scales; the conformance weights don't."""
    matrices = {}
    for name, matrix in (("gate_up", weights.gate_up), ("down", weights.down)):
        if not isinstance(matrix, (Nvfp4, Fp8Tensor)):
            return weights
        scale = matrix.global_scale if isinstance(matrix, Nvfp4) else matrix.scale
        own = (
            torch.linspace(0.5, 1.5, scale.numel()).view_as(scale)
            if name == "down"
            else torch.full_like(scale, _TOKEN_SCALE)
        )
        matrices[name] = replace(matrix, input_scale=own)
    return replace(weights, **matrices)


class StandInCuteDsl(CuteDslExecutor):
    kernels = FakeCuteDsl(rounding=False).kernels()

    def _prepare(self, weights: ExpertWeights) -> None:
        super()._prepare(_calibrated(weights))


class StandInTrtllm(TrtllmGenExecutor):
    kernels = FakeTrtllm(rounding=False).kernels()

    def _prepare(self, weights: ExpertWeights) -> None:
        super()._prepare(_calibrated(weights))


@contextmanager
def executors_on_cpu() -> Iterator[None]:
    """The two rows of the table, able to run here; put back afterwards, since ranks outlive a test."""
    before = dict(EXECUTORS)
    for name, kind in (("cutedsl_nvfp4", "StandInCuteDsl"), ("trtllm_gen", "StandInTrtllm")):
        EXECUTORS[name] = replace(EXECUTORS[name], devices=("cpu",), path=f"{__name__}:{kind}", requirement=None)
    try:
        yield
    finally:
        EXECUTORS.update(before)


def run_sm100_checks(context: RankContext, checks: Sequence[Check]) -> list[CheckRow]:
    with executors_on_cpu():
        return run_checks(context, checks)
