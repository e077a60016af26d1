"""What Triton and ptxas make of the few-token kernels of 4-bit weights, for sm_90a and without a GPU."""

from __future__ import annotations

import pytest
import torch

from eprt.config import Activation
from eprt.weights import Int4, Mxfp4, Nvfp4

pytest.importorskip("triton", reason="triton isn't installed")

from support.sass import count, in_place_of_prepared, overwritten_operands

from eprt.experts.grouped import few
from eprt.experts.grouped.launch import Chip, Gemm
from eprt.experts.grouped.schedules import FEW
from eprt.experts.grouped.weights import GroupedMatrix
from eprt.placement import ExpertShard

CPU = torch.device("cpu")
ROWS, COLS = 832, 736  # no whole units
TILES = {
    (form, pair, tokens.tokens, what): (tokens.first, tokens.second)[what == "second"]
    for form, pair in (("mxfp4", "w4a16"), ("nvfp4", "nv4a16"), ("int4", "i4a16"))
    for tokens in FEW[pair]
    for what in ("first", "second")
}


@pytest.mark.parametrize("case", TILES)
def test_few_token_kernels_keep_to_registers(case, monkeypatch, unless_kept):
    """In the loop nothing is spilled, programs of at least 16 warps fit a multiprocessor (Triton 3.6: 20), 12 that have
    three blocks on their way, and no product's operand is written before the product is done."""
    form, pair, _, what = case
    tile, parts = TILES[case], 2 if what == "first" else 1
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    found = {}
    monkeypatch.setattr(few, "CachedKernel", in_place_of_prepared(found, unless_kept))
    codes = torch.zeros(1, ROWS, COLS // 2, dtype=torch.uint8)
    if form == "mxfp4":
        matrix = Mxfp4(codes, torch.zeros(1, ROWS, COLS // 32, dtype=torch.uint8))
    elif form == "int4":
        matrix = Int4(codes, torch.ones(1, ROWS, COLS // 32, dtype=torch.bfloat16), None)
    else:
        matrix = Nvfp4(codes, torch.zeros(1, ROWS, COLS // 16).to(torch.float8_e4m3fn), *torch.ones(2, 1, parts))
    prepared = GroupedMatrix.prepare(matrix, torch.zeros(1, ROWS), parts, CPU)
    activation = Activation(alpha=1.702, beta=1.0, limit=7.0) if what == "first" else None
    gemm = Gemm(prepared, activation, pair, Chip(132, True, True))
    ids = torch.zeros(4, 4, dtype=torch.int32)
    out = torch.zeros(16, 832, dtype=torch.bfloat16 if what == "first" else torch.float32)
    experts = few.FewExperts((gemm, gemm), ExpertShard(1, 0, 1))
    experts._multiply(gemm, tile, 4, torch.zeros(16, COLS, dtype=torch.bfloat16), ids, torch.zeros(4, 4), out)
    (made,) = found.values()
    assert made.local == 0
    assert made.stack <= 8  # by Triton 3.9, for one token; 3.6: 0
    warps = 4 * tile.halves
    assert 65536 // (-(-made.registers // 8) * 8 * warps * 32) * warps >= (12 if tile.ahead > 2 else 16)
    (loop,) = made.loops
    assert count(loop)["HGMMA"] == tile.ahead * tile.k // 16
    assert not count(loop).keys() & {"LDL", "STL", "SHFL"}
    assert overwritten_operands(loop) == []
