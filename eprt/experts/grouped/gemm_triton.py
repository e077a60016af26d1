# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""The grouped GEMM: rows of each expert times its matrix, by a tile schedule that lies on the device.

One kernel serves both matrices of an expert. The first gathers the rows it needs and ends in bias and activation, the
second reads what the first wrote. It is persistent, so a launch costs what came, not what could have come.

A tile is BLOCK_M rows x BLOCK_N columns; the last of an expert may be computed in half or a quarter of the height, or
with up to TAIL rows more, as a second product with the same weights. With SWAP the product is weights x tokens: the
tensor cores' 64 rows are then filled by weights, of which there are always enough, and tokens are its N, which may be
as few as 8.

MXFP4, NVFP4 and INT4 weights (w4a16, nv4a16, i4a16) are always the left operand, decoded in registers
(`eprt.experts.grouped.four_bit`).

FP8 weights (`PAIR` w8a8, w8a16) have a scale for 128 x 128 of them, tokens one for 128 values: each 128 columns of K
are summed by the tensor cores, then scaled and added in float32. In w8a16 a token's value is two E4M3 numbers, one
rounded and what that left over: together they keep the 8 bits of bf16, and weights needn't be converted.

Where weights have a scale per row and tokens one each (c8a8), the tensor cores sum all columns and scales come at the
end. They keep some 14 bits of a sum of FP8: 1% in norm at 7168 columns, beside 4.5% that E4M3 tokens cost.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.four_bit_triton import four_bit_block, four_bit_expert, settled
from eprt.experts.grouped.mxfp4_e4m3_triton import e4m3_block
from eprt.experts.grouped.weights import INTERLEAVE
from eprt.experts.sort_by_expert_triton import ENTRY, pdl_wait, tiles_of
from eprt.weights import FP8_BLOCK

_FP8_BLOCK = tl.constexpr(FP8_BLOCK)
_INTERLEAVE = tl.constexpr(INTERLEAVE)
_ENTRY = tl.constexpr(ENTRY)


@dataclass(frozen=True)
class GemmConstants:
    """The compile-time constants of a grouped GEMM.

    Attributes:
        PAIR: number formats (`schedules.Pair`).
        UNIT_SCALES: int32 words of scales per unit of 4-bit weights, else 0.  ZEROS: of INT4, zero points among them.
        N, K: rows of an expert's matrix (both parts, with padding) and columns without padding.
        W_STRIDE, W_ROWS: elements between weight rows, and how many of these all experts have.
        BLOCK_M, BLOCK_N, BLOCK_K: tokens, weight rows and columns per tile and stage.  STAGES: depth of the pipeline.
        GROUP_M: row tiles that share columns (`position`).
        TAIL: rows that an expert's last tile takes beyond BLOCK_M, as the schedule was made for.
        HALVINGS: how often a tile's height may be halved where that is enough for an expert's last rows: 0, 1 or 2.
        SWAP: weights x tokens.  FLATTEN: one pipeline over all tiles of a program, instead of one for each.
        X_TMA, W_TMA: tokens and weights come by TMA.
        LAUNCH_DEPENDENTS: see `sort_by_expert_triton.pdl_wait`.
        FIRST: the epilogue ends in the activation.  GATED to CUBIC: see `activation_triton.constants`.
    """

    PAIR: str
    UNIT_SCALES: int
    ZEROS: bool
    N: int
    K: int
    W_STRIDE: int
    W_ROWS: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    GROUP_M: int
    TAIL: int
    HALVINGS: int
    SWAP: bool
    FLATTEN: bool
    X_TMA: bool
    W_TMA: bool
    LAUNCH_DEPENDENTS: bool
    FIRST: bool
    GATED: bool
    ALPHA: float
    BETA: float
    LIMIT: float
    CUBIC: float


@triton.jit
def turn(tile, total):
    """The tile that a program takes when it would come to `tile`, one every `num_programs`: in each round its next
    neighbour's. Else, where the number of programs is a multiple of the tiles along M that experts have, the same
    programs would always get the last of an expert, which are higher or lower than the others."""
    programs = tl.num_programs(0)
    round = tile // programs
    begin = round * programs
    return tl.where(begin + programs <= total, begin + (tile - begin + round) % programs, tile)


@triton.jit
def position(entries, tile, NUM_N: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr, TAIL: tl.constexpr):
    """(expert, first row, row after the expert's last, index along N) of a tile. Tiles of GROUP_M neighbours along M
    follow each other, so that weights stay in L2 while rows do."""
    entry = entries + (tile // NUM_N) * _ENTRY
    expert, begin = tl.load(entry), tl.load(entry + 1)
    end, first = tl.load(entry + 2), tl.load(entry + 3)
    inside = tile - first * NUM_N
    group = inside // (GROUP_M * NUM_N)
    height = tl.minimum(tiles_of(end - begin, BLOCK_M, TAIL) - group * GROUP_M, GROUP_M)
    inside -= group * (GROUP_M * NUM_N)
    return expert, begin + (group * GROUP_M + inside % height) * BLOCK_M, end, inside // height


@triton.jit
def halves(tile, SWAP: tl.constexpr):
    """(gate, up) of a product whose columns (rows with SWAP) alternate by INTERLEAVE."""
    first: tl.constexpr = tile.shape[0]
    last: tl.constexpr = tile.shape[1]
    if SWAP:
        groups = tl.reshape(tile, (first // (2 * _INTERLEAVE), 2, _INTERLEAVE, last))
        gate, up = tl.split(tl.permute(groups, (0, 2, 3, 1)))
        gate, up = tl.reshape(gate, (first // 2, last)), tl.reshape(up, (first // 2, last))
    else:
        groups = tl.reshape(tile, (first, last // (2 * _INTERLEAVE), 2, _INTERLEAVE))
        gate, up = tl.split(tl.permute(groups, (0, 1, 3, 2)))
        gate, up = tl.reshape(gate, (first, last // 2)), tl.reshape(up, (first, last // 2))
    return gate, up


@triton.jit
def _across(vector, SWAP: tl.constexpr):
    """A value for each token, along a product's token dimension."""
    return vector[None, :] if SWAP else vector[:, None]


@triton.jit
def _along(vector, SWAP: tl.constexpr):
    """A value for each weight row, along a product's other dimension."""
    return vector[:, None] if SWAP else vector[None, :]


@triton.jit
def _block(
    pointer, tiles, offset, ok, row, start, SHIFT: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """BLOCK_K columns from SHIFT + `start` of some rows: by the copy engine from `row` on, or those at `offset` that
    are `ok`; zeros past K columns."""
    if TMA:
        value = tiles.load([row, SHIFT + start])
    else:
        k = start + tl.arange(0, BLOCK_K)
        there = ok[:, None]
        if K % BLOCK_K != 0:
            there = there & (k < K)[None, :]
        value = tl.load(pointer + offset[:, None] + (SHIFT + k)[None, :], mask=there, other=0.0)
    return value


@triton.jit
def _dot(tokens, weights, total, SWAP: tl.constexpr):
    return tl.dot(weights, tokens.T, total) if SWAP else tl.dot(tokens, weights.T, total)


@triton.jit
def _product(
    read, w, w_scale, w_row, x_scale, rows, tail_rows, row, column, C: tl.constexpr, BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr, X_TMA: tl.constexpr,
):  # fmt: skip
    """float32 product of one tile: (gate, up), or twice the same where the matrix has one part; then of its tail, both
    parts in one.

    Args:
        read: x and x_tiles of `grouped_gemm`.
        w, w_scale: of 4 bits, the expert's.  w_scale: of FP8, the scales of this tile's first 128-block along N;
            `UP_SCALE` further on lie those of up.
        w_row: the tile's first row among all experts'.  column: in its expert's matrix.
        x_scale: [BLOCK_M] where the scales of the rows begin.
        rows: [BLOCK_M] offsets of rows and which there are. `row`: the first of them, for TMA.
        tail_rows: [TAIL] the same of the rows after them.
    """
    K: tl.constexpr = C.K
    BLOCK_N: tl.constexpr = C.BLOCK_N
    BLOCK_K: tl.constexpr = C.BLOCK_K
    PAIR: tl.constexpr = C.PAIR
    SWAP: tl.constexpr = C.SWAP
    PARTS: tl.constexpr = 2 if C.GATED else 1
    K_BLOCKS: tl.constexpr = (K + _FP8_BLOCK - 1) // _FP8_BLOCK
    UP_SCALE: tl.constexpr = (C.N // 2 + _FP8_BLOCK - 1) // _FP8_BLOCK * K_BLOCKS
    LOW: tl.constexpr = (K + 15) // 16 * 16  # columns of a token's first numbers: whole 16 bytes
    FOUR_BIT: tl.constexpr = C.UNIT_SCALES > 0
    WHOLE: tl.constexpr = PAIR == "bf16" or PAIR == "c8a8" or FOUR_BIT  # both parts are summed together
    WIDTH: tl.constexpr = BLOCK_N if WHOLE else BLOCK_N // PARTS
    x, x_tiles = read
    x_offset, x_ok = rows
    tail_offset, tail_ok = tail_rows
    total = tl.zeros((WIDTH, BLOCK_M) if SWAP else (BLOCK_M, WIDTH), dtype=tl.float32)
    second = total
    tail = tl.zeros((WIDTH, TAIL), dtype=tl.float32) if TAIL > 0 else total  # with SWAP alone
    w_rows = w_row + tl.arange(0, BLOCK_N)
    w_offset, w_ok = w_rows.to(tl.int64) * C.W_STRIDE, w_rows < C.W_ROWS
    for start in tl.range(0, K, BLOCK_K, num_stages=C.STAGES):
        tokens = _block(x, x_tiles, x_offset, x_ok, row, start, 0, K, BLOCK_K, X_TMA)
        if PAIR == "w4a8":
            weights = e4m3_block(w, w_scale, column, start, C)
        elif FOUR_BIT:
            weights = four_bit_block(w, w_scale, column, start, C)
        else:
            weights = _block(w, w, w_offset, w_ok, w_row, start, 0, K, BLOCK_K, C.W_TMA)
        if WHOLE:
            if TAIL > 0:
                more = _block(x, x, tail_offset, tail_ok, 0, start, 0, K, BLOCK_K, False)
                tail = _dot(more, weights, tail, SWAP)
            total = _dot(tokens, weights, total, SWAP)
            if FOUR_BIT:
                total = settled(total)
                if TAIL > 0:
                    tail = settled(tail)
        else:
            block = start // _FP8_BLOCK
            factor = 1.0 if w_scale is None else tl.load(w_scale + block)
            token = tl.load(x_scale + block, mask=x_ok, other=0.0)
            part = _dot(tokens, weights, None, SWAP)
            if PAIR == "w8a16":
                rest = _block(x, x_tiles, x_offset, x_ok, row, start, LOW, K, BLOCK_K, X_TMA)
                part = _dot(rest, weights, part, SWAP)
            if PARTS == 2:
                gate, up = halves(part, SWAP)
                other = 1.0 if w_scale is None else tl.load(w_scale + UP_SCALE + block)
                total += gate * _across(token * factor, SWAP)
                second += up * _across(token * other, SWAP)
            else:
                total += part * _across(token * factor, SWAP)
    if WHOLE and PARTS == 2:
        total, second = halves(total, SWAP)
    return total, second, tail


@triton.jit
def _finish(gate, up, target, expert, m, ok, column, C: tl.constexpr, x_scale=None):
    """Stores rows m that are `ok`, after the epilogue. `x_scale`: where their scales lie, or None."""
    w_factor, bias, out, out_stride, out_skip = target
    SWAP: tl.constexpr = C.SWAP
    if x_scale is not None:
        token = _across(tl.load(x_scale, mask=ok, other=0.0), SWAP)
        gate *= token
        if C.GATED:
            up *= token
    parts: tl.constexpr = 2 if C.GATED else 1
    n = column * (C.BLOCK_N // parts) + tl.arange(0, C.BLOCK_N // parts)
    width: tl.constexpr = C.N // parts
    if w_factor is not None:
        factor = w_factor + expert * C.N + n
        gate *= _along(tl.load(factor, mask=n < width, other=0.0), SWAP)
        if C.GATED:
            up *= _along(tl.load(factor + width, mask=n < width, other=0.0), SWAP)
    if bias is not None:
        own = bias + expert * C.N + n
        gate += _along(tl.load(own, mask=n < width, other=0.0), SWAP)
        if C.GATED:
            up += _along(tl.load(own + width, mask=n < width, other=0.0), SWAP)
    if C.FIRST:
        gate = activated(gate, up, C.GATED, C.ALPHA, C.BETA, C.LIMIT, C.CUBIC)
    there = m.to(tl.int64) * out_stride + expert.to(tl.int64) * out_skip
    tl.store(
        out + _across(there, SWAP) + _along(n, SWAP),
        gate.to(out.dtype.element_ty),
        mask=_across(ok, SWAP) & _along(n < width, SWAP),
    )


@triton.jit
def _read(source, row, end, expert, x_stride, x_skip, ROWS: tl.constexpr):
    """ROWS rows from `row` on: (their numbers, which there are, the rows of x, where those begin)."""
    m = row + tl.arange(0, ROWS)
    ok = m < end
    read = m if source is None else tl.load(source + m, mask=ok, other=0)
    read = read.to(tl.int64)
    return m, ok, read, read * x_stride + expert.to(tl.int64) * x_skip


@triton.jit
def _tile(read, target, where, C: tl.constexpr, BLOCK_M: tl.constexpr, TAIL: tl.constexpr, X_TMA: tl.constexpr):
    x, x_tiles, source, x_scale, w, w_scale, x_stride, x_skip = read
    expert, row, end, column = where
    parts: tl.constexpr = 2 if C.GATED else 1
    k_blocks: tl.constexpr = (C.K + _FP8_BLOCK - 1) // _FP8_BLOCK
    part_blocks: tl.constexpr = (C.N // parts + _FP8_BLOCK - 1) // _FP8_BLOCK
    m, ok, numbers, offset = _read(source, row, end, expert, x_stride, x_skip, BLOCK_M)
    tail_m, tail_ok, tail_numbers, tail_offset = m, ok, numbers, offset
    if TAIL > 0:
        tail_m, tail_ok, tail_numbers, tail_offset = _read(source, row + BLOCK_M, end, expert, x_stride, x_skip, TAIL)
    w_scale_tile, x_scale_rows = w_scale, x_scale
    w_expert = w
    if C.UNIT_SCALES > 0:
        w_expert, w_scale_tile = four_bit_expert(w, w_scale, expert, C)
    if C.PAIR == "w8a8" or C.PAIR == "w8a16":
        x_scale_rows = x_scale + numbers * k_blocks
        if w_scale is not None:
            block = expert * parts * part_blocks + column * C.BLOCK_N // parts // _FP8_BLOCK
            w_scale_tile = w_scale + block * k_blocks
    gate, up, tail = _product(
        (x, x_tiles), w_expert, w_scale_tile, expert * C.N + column * C.BLOCK_N, x_scale_rows, (offset, ok),
        (tail_offset, tail_ok), row, column * C.BLOCK_N, C, BLOCK_M, TAIL, X_TMA,
    )  # fmt: skip
    PER_TOKEN: tl.constexpr = C.PAIR == "c8a8" or C.PAIR == "w4a8"
    _finish(gate, up, target, expert, m, ok, column, C, x_scale + numbers if PER_TOKEN else None)
    if TAIL > 0:
        tl.static_assert(C.SWAP, "a tail of fewer than 64 tokens has to be the right operand")
        tail_gate, tail_up = halves(tail, C.SWAP) if C.GATED else (tail, tail)
        tail_scale = x_scale + tail_numbers if PER_TOKEN else None
        _finish(tail_gate, tail_up, target, expert, tail_m, tail_ok, column, C, tail_scale)


@triton.jit
def _scheduled_tile(read, target, entries, tile, C: tl.constexpr):
    """A tile in the least height that holds its rows."""
    expert, row, end, column = position(entries, tile, (C.N + C.BLOCK_N - 1) // C.BLOCK_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
    where = expert, row, end, column
    SCALED: tl.constexpr = C.PAIR == "w8a8" or C.PAIR == "w8a16"
    if C.TAIL > 0 and end - row > C.BLOCK_M and end - row <= C.BLOCK_M + C.TAIL:
        _tile(read, target, where, C, C.BLOCK_M, 0 if SCALED else C.TAIL, C.X_TMA)
        if SCALED:  # the tail's scales are of other tokens
            _tile(read, target, (expert, row + C.BLOCK_M, end, column), C, C.TAIL, 0, False)
    elif C.HALVINGS > 1 and end - row <= C.BLOCK_M // 4:
        _tile(read, target, where, C, C.BLOCK_M // 4, 0, False)
    elif C.HALVINGS > 0 and end - row <= C.BLOCK_M // 2:
        _tile(read, target, where, C, C.BLOCK_M // 2, 0, False)
    else:
        _tile(read, target, where, C, C.BLOCK_M, 0, C.X_TMA)


@triton.jit
def grouped_gemm(
    x, x_tiles, source, x_scale, w, w_scale, w_factor, bias, out, entries, num_entries,
    x_stride, x_skip, out_stride, out_skip, C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`out[m] = x[m or source[m]] @ w[expert of m].T`, plus bias; the FIRST matrix's through the activation.

    Args:
        x: [rows, K]; in w8a16 [rows, 2 * K rounded up to 16].  x_tiles: the same as a descriptor of blocks
            [BLOCK_M, BLOCK_K] (X_TMA).  source: [rows] int32, the row to read, or None.
        x_scale: [rows, ceil(K / 128)] float32 where tokens are FP8; in c8a8 and w4a8 [rows].
        w: [experts * N, W_STRIDE]: a pointer, or a descriptor of blocks [BLOCK_N, BLOCK_K] (W_TMA); gate and up rows
            alternate by INTERLEAVE.  w_scale: [experts, parts, ceil(N / parts / 128), ceil(K / 128)] float32,
            or None. Of 4 bits, w and w_scale are words.  w_factor: [experts, parts, N / parts] float32, or None.
        bias: [experts, parts, N / parts] float32, or None.
        entries, num_entries: the tile schedule: int32 [.., ENTRY], and how many entries there are.
        x_stride, out_stride: elements between rows.  x_skip, out_skip: more elements for each expert (the masked
            layout, whose experts lie further apart than their rows fill).
        C: GemmConstants.  PDL: see `pdl_wait`.
    """
    if PDL:
        pdl_wait(C.LAUNCH_DEPENDENTS)
    read = x, x_tiles, source, x_scale, w, w_scale, x_stride, x_skip
    target = w_factor, bias, out, out_stride, out_skip
    NUM_N: tl.constexpr = (C.N + C.BLOCK_N - 1) // C.BLOCK_N
    total = tl.load(num_entries) * NUM_N
    for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=C.FLATTEN):
        _scheduled_tile(read, target, entries, turn(tile, total), C)
