"""Blackwell layouts: sizes and factors by hand, and bytes that lie elsewhere are noticed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.cases.expert_cases import make_flat, rows_with_expert, valid_rows
from support.cases.sm100_cases import as_slabs, build, case, packed, witness
from support.stand_ins.cutedsl_kernels import FakeCuteDsl
from support.stand_ins.trtllm_kernels import FakeTrtllm

from eprt.conformance.oracle import relative_error
from eprt.experts.blackwell import scales, trtllm_formats
from eprt.experts.blackwell.cutedsl import CuteDslExecutor, padded_size
from eprt.experts.blackwell.scales import Nvfp4Factors
from eprt.experts.blackwell.trtllm import TrtllmGenExecutor
from eprt.experts.padding import pad_parts
from eprt.tokens import FlatTokens
from eprt.weights import ExpertWeights, Nvfp4


def test_padding_what_fits_copies_it_too():
    matrix = torch.arange(2 * 128 * 8, dtype=torch.int16).view(2, 128, 8)
    padded = pad_parts(matrix, 2, 64, 8)
    assert torch.equal(padded, matrix)
    assert padded.data_ptr() != matrix.data_ptr()


def nvfp4(L: int, rows: int, cols: int, parts: int, input_scale: torch.Tensor | None = None) -> Nvfp4:
    generator = torch.Generator().manual_seed(rows)
    scales = torch.rand(L, rows, cols // 16, generator=generator).add(0.5).to(torch.float8_e4m3fn)
    codes = torch.randint(0, 256, (L, rows, cols // 2), dtype=torch.uint8, generator=generator)
    return Nvfp4(codes, scales, torch.rand(L, parts, generator=generator) + 0.5, input_scale)


def test_sizes_that_kernels_see():
    def weights(H: int, I: int, parts: int) -> ExpertWeights:
        return ExpertWeights(nvfp4(1, parts * I, H, parts), nvfp4(1, H, I, 1))

    assert padded_size(weights(96, 48, 2), 2) == (128, 64)
    assert padded_size(weights(2880, 1856, 2), 2) == (2944, 1856)
    assert padded_size(weights(2880, 1856, 1), 1) == (2944, 1920)


def test_factors_take_the_largest_input_scale_and_keep_both_halves():
    gate_up = nvfp4(3, 64, 32, 2, torch.tensor([[1.0, 1.0], [3.0, 2.0], [0.5, 4.0]]))
    down = nvfp4(3, 32, 32, 1, torch.tensor([[1.0], [2.0], [3.0]]))
    factors = Nvfp4Factors.from_matrices(gate_up, down, torch.device("cpu"))
    assert factors.input is not None
    assert factors.input.tolist() == [4.0]
    assert factors.intermediate is not None
    assert factors.intermediate.tolist() == [1.0, 2.0, 3.0]
    torch.testing.assert_close(factors.gate * factors.ratio, gate_up.global_scale[:, 1])
    weight_only = nvfp4(1, 64, 32, 2), nvfp4(1, 32, 32, 1)
    assert Nvfp4Factors.from_matrices(*weight_only, torch.device("cpu")).input is None


def gate_scale_for_up(weights: ExpertWeights) -> ExpertWeights:
    scale = weights.gate_up.global_scale[:, :1].expand(-1, 2).contiguous()
    return replace(weights, gate_up=replace(weights.gate_up, global_scale=scale))


def swapped_halves(weights: ExpertWeights) -> ExpertWeights:
    gate_up = weights.gate_up.map(lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t)
    codes, scales = (each.roll(each.shape[1] // 2, 1) for each in (gate_up.codes, gate_up.scales))
    return replace(weights, gate_up=replace(weights.gate_up, codes=codes, scales=scales.view(torch.float8_e4m3fn)))


def late_padding(matrix, parts, rows, cols, *, reverse=False):
    """Everything after the last row, as if the halves were one matrix."""
    L, total, width = matrix.shape
    padded = matrix.new_zeros((L, parts * rows, cols))
    padded[:, :total, :width] = matrix
    return padded.view(torch.uint8).roll(reverse * rows, 1).view(matrix.dtype)


def error_of(executor, config, shard, weights, tokens) -> float:
    rows = rows_with_expert(tokens, shard) if isinstance(tokens, FlatTokens) else valid_rows(tokens)
    return relative_error(executor(tokens)[rows], witness(config, shard, weights, tokens)[rows])


@pytest.mark.parametrize(
    ("kind", "fake", "where", "slabs"),
    [
        (CuteDslExecutor, FakeCuteDsl, scales, False),
        (CuteDslExecutor, FakeCuteDsl, scales, True),
        (TrtllmGenExecutor, FakeTrtllm, trtllm_formats, False),
    ],
    ids=["cutedsl", "cutedsl-masked", "trtllm"],
)
@pytest.mark.parametrize("mistake", ["unswizzled", "late padding", "gate's scale for up", "swapped halves", "none"])
def test_wrong_layouts_fail(kind, fake, where, slabs, mistake, monkeypatch):
    """An executor built with a function or its weights replaced; a broken kernel contract is an infinite error."""
    config, shard, weights = case("nvfp4", (128, 48) if mistake == "late padding" else (128, 64))
    flat = packed(make_flat(config), weights)
    tokens = as_slabs(flat, shard) if slabs else flat
    if mistake == "unswizzled":
        monkeypatch.setattr(where, "swizzle_scales", lambda scales: scales)
    if mistake == "late padding":
        monkeypatch.setattr(where, "pad_parts", late_padding)
    changes = {"gate's scale for up": gate_scale_for_up, "swapped halves": swapped_halves}
    changed = changes.get(mistake, lambda weights: weights)(weights)
    try:
        error = error_of(build(kind, fake(rounding=False), config, shard, changed), config, shard, weights, tokens)
    except AssertionError:
        error = float("inf")
    assert (error <= 1e-2) is (mistake == "none"), error


@pytest.mark.parametrize("weight_format", ["fp8_tensor", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("mistake", ["canonical rows", "none"])
def test_wrong_fp8_rows_fail(weight_format, mistake, monkeypatch):
    """Rows left as [gate; up]."""
    if mistake == "canonical rows":
        monkeypatch.setattr(trtllm_formats, "take_rows", lambda matrix, order: matrix)
        monkeypatch.setattr(trtllm_formats, "pad_parts", lambda *args, reverse=False: pad_parts(*args))
    config, shard, weights = case(weight_format, (128, 128))
    tokens = make_flat(config, dtype=torch.bfloat16)
    executor = build(TrtllmGenExecutor, FakeTrtllm(rounding=False), config, shard, weights)
    error = error_of(executor, config, shard, weights, tokens)
    assert (error <= 0.05) is (mistake == "none"), error
