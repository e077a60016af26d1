# ruff: noqa: ANN001, ANN201  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""Tokens, and what lies between the two GEMMs, as E4M3 with a scale for 128 values or for each row."""

from __future__ import annotations

import triton
import triton.language as tl

from eprt.experts.grouped.gemm_triton import position
from eprt.experts.sort_by_expert_triton import pdl_wait
from eprt.quant.elements import E4M3_MAX, TINY

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_TINY = tl.constexpr(TINY)


@triton.jit(do_not_specialize=["num_rows"])
def quantize_tiles(
    x, codes, scale, entries, num_entries, num_rows, x_stride, x_skip, code_stride,
    K: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantizes rows to E4M3: codes [rows, code_stride], scale [rows, ceil(K / GROUP)] float32; x, x_skip as in
    `grouped_gemm`.

    Args:
        entries, num_entries: the tile schedule, of BLOCK_M and TAIL rows, whose rows are quantized; None: the first
            `num_rows`.
        WIDTH: columns that are written, zeros past K.
        GROUP: columns that share a scale, a power of two.  ROWS: rows that are quantized together.
        SPLIT: the rounding error follows in the second half of the columns, with the same scale. A value of at most 448
            leaves at most 16, and of that at most 2^-5, or 2^-10 in all.
        PDL: see `pdl_wait`.

    A value is multiplied by the inverse of its scale: a true division, as `eprt.quant` makes it, takes ten times as
    long as the memory does.
    """
    if PDL:
        pdl_wait(True)
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    PIECES: tl.constexpr = GROUPS * ((BLOCK_M + TAIL + ROWS - 1) // ROWS)
    total = tl.cdiv(num_rows, BLOCK_M) if entries is None else tl.load(num_entries)
    for tile in tl.range(tl.program_id(0), total * PIECES, tl.num_programs(0)):
        if entries is None:
            expert, row, end, piece = 0, tile // PIECES * BLOCK_M, num_rows, tile % PIECES
        else:
            expert, row, end, piece = position(entries, tile, PIECES, BLOCK_M, 1, TAIL)
            end = tl.where(end - row <= BLOCK_M + TAIL, end, row + BLOCK_M)
        group = piece % GROUPS
        m = (row + piece // GROUPS * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        k = group * GROUP + tl.arange(0, GROUP)
        ok = (m < end)[:, None] & (k < K)[None, :]
        read = x + expert * x_skip.to(tl.int64) + m[:, None] * x_stride
        value = tl.load(read + k[None, :], mask=ok, other=0.0).to(tl.float32)
        factor = tl.maximum(tl.max(tl.abs(value), 1) / _E4M3_MAX, _TINY)
        value = tl.clamp(value * (1.0 / factor)[:, None], -_E4M3_MAX, _E4M3_MAX)
        code = value.to(tl.float8e4nv)
        target, there = codes + m[:, None] * code_stride + k[None, :], (m < end)[:, None] & (k < WIDTH)[None, :]
        tl.store(target, code, mask=there)
        if SPLIT:
            tl.store(target + WIDTH, (value - code.to(tl.float32)).to(tl.float8e4nv), mask=there)
        tl.store(scale + m * GROUPS + group, factor, mask=m < end)
