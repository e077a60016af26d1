# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""The experts of a few tokens: no sort, no tile schedule, every token a column of every product.

Up to 16 tokens fit the narrow side of one tensor-core tile. A program therefore takes the ids themselves: it belongs to
one top-k entry and to a block of weight rows, ends at once unless its entry is the first that names a local expert, and
multiplies its weights by all tokens that name this expert. So an expert's weights are read once.

4-bit words go from memory into the registers of the threads that decode them, some blocks ahead. They are
the first to leave L2: else they would drive out what the next call needs, these kernels' own code included. With at
most 8 tokens a program may multiply two halves of K at once, 8 warps instead of 4: rows 64 on of its tile are the
weights of the second half, columns 8 on its tokens, and of the product two quarters are added, two left out.

The second GEMM writes float32 rows, weighted, of each of its parts of K. A last kernel adds them in a fixed order.
Under `batch_invariant` K has one part, and the second GEMM writes what it would for many tokens: bf16, without weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.four_bit import UNIT, UNIT_WORDS
from eprt.experts.grouped.four_bit_triton import four_bit_expert, four_bit_values, settled
from eprt.experts.grouped.gemm_triton import halves

_UNIT = tl.constexpr(UNIT)
_UNIT_WORDS = tl.constexpr(UNIT_WORDS)


@dataclass(frozen=True)
class FewConstants:
    """The compile-time constants of `few_gemm`.

    Attributes:
        PAIR, UNIT_SCALES, ZEROS, N, K, W_STRIDE, W_ROWS, W_TMA, FIRST, GATED to CUBIC: see `GemmConstants`.
        TOKENS: at least as many as come.  TOP_K, K_PAD: entries per token, and the next power of 2.
        BLOCK_N, BLOCK_K: weight rows and columns per block.  STAGES: depth of the pipeline; not of 4-bit weights.
        AHEAD, EAGER: of 4-bit weights, see `schedules.FewTile`.
        HALVES: parts of K that a program multiplies at once, 1 or 2; of 4-bit weights, TOKENS * HALVES is 16.
        SPLITS: programs that share K.
    """

    PAIR: str
    UNIT_SCALES: int
    ZEROS: bool
    N: int
    K: int
    W_STRIDE: int
    W_ROWS: int
    W_TMA: bool
    TOKENS: int
    TOP_K: int
    K_PAD: int
    BLOCK_N: int
    BLOCK_K: int
    STAGES: int
    AHEAD: int
    EAGER: bool
    HALVES: int
    SPLITS: int
    FIRST: bool
    GATED: bool
    ALPHA: float
    BETA: float
    LIMIT: float
    CUBIC: float


@triton.jit
def _entries_of(ids, weights, entry, num_tokens, first, L, C: tl.constexpr):
    """Returns the local expert that `entry` is the first to name, else -1; per token [TOKENS] its first entry that
    names this expert (one past all entries: none), and the sum of its weights for it (FIRST, or no weights: nothing of
    use); and this first entry of the token of `entry`, or -1 if the expert isn't local."""
    n, k = tl.arange(0, C.TOKENS)[:, None], tl.arange(0, C.K_PAD)[None, :]
    at = n * C.TOP_K + k
    there = (n < num_tokens) & (k < C.TOP_K)
    # Past L1, as a kernel that reads before it waits must.
    all_ids = tl.load(ids + at, mask=there, other=first - 1, cache_modifier=".cg")
    own = tl.load(ids + entry, cache_modifier=".cg")
    same = there & (all_ids == own)
    rows = tl.min(tl.where(same, at, C.TOKENS * C.TOP_K), axis=1)
    expert = own - first
    local = (expert >= 0) & (expert < L)
    token = tl.arange(0, C.TOKENS) == entry // C.TOP_K
    place = tl.where(local, tl.sum(tl.where(token, rows, 0), axis=0), -1)
    expert = tl.where((tl.min(rows, axis=0) == entry) & local, expert, -1)
    factor = rows.to(tl.float32)
    if not C.FIRST and weights is not None:
        factor = tl.sum(tl.load(weights + at, mask=same, other=0.0, cache_modifier=".cg"), axis=1)
    return expert, rows, factor, place


# ---- bf16 ------------------------------------------------------------------------------------------------------------


@triton.jit
def _weights_block(w, w_tiles, w_row, start, C: tl.constexpr):
    """BLOCK_N rows of all experts' from `w_row` on, BLOCK_K columns from `start` on; zeros past K."""
    if C.W_TMA:
        block = w_tiles.load([w_row, start])
    else:
        row, k = w_row + tl.arange(0, C.BLOCK_N), start + tl.arange(0, C.BLOCK_K)
        there = (row < C.W_ROWS)[:, None] & (k < C.K)[None, :]
        block = tl.load(w + row.to(tl.int64)[:, None] * C.W_STRIDE + k[None, :], mask=there, other=0.0)
    return block


@triton.jit
def _product(x, x_offset, x_ok, w, w_tiles, w_row, C: tl.constexpr):
    """float32 [BLOCK_N, TOKENS] of the weight rows from `w_row` on."""
    BLOCK_N: tl.constexpr = C.BLOCK_N
    TOKENS: tl.constexpr = C.TOKENS
    total = tl.zeros((BLOCK_N, TOKENS), dtype=tl.float32)
    for start in tl.range(0, C.K, C.BLOCK_K, num_stages=C.STAGES):
        k = start + tl.arange(0, C.BLOCK_K)
        there = x_ok[:, None] & (k < C.K)[None, :]
        tokens = tl.load(x + x_offset[:, None] + k[None, :], mask=there, other=0.0)
        total = tl.dot(_weights_block(w, w_tiles, w_row, start, C), tokens.T, total)
    return total


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


@triton.jit
def _words_ahead(w, w_scale, unit, half, middle, end, C: tl.constexpr):
    """Loads words and scales of BLOCK_K columns from `unit` on, and of as many `half` later, all in units of one row.
    Of units past `middle` and `end` scales are zero, and words anything: whatever they hold is finite."""
    BK: tl.constexpr = C.BLOCK_K // _UNIT
    UNIT_SCALES: tl.constexpr = C.UNIT_SCALES
    # Halves are the outer dimension of the loads: so warps divide them as the product does its rows.
    h, k = tl.arange(0, C.HALVES)[:, None, None], tl.arange(0, BK)[None, :, None]
    at = h * half + k + unit
    there = at < tl.where(h == 0, middle, end)
    word, scale = tl.arange(0, _UNIT_WORDS)[None, None, :], tl.arange(0, UNIT_SCALES)[None, None, :]
    words = tl.load(w + (at * _UNIT_WORDS + word), mask=there, eviction_policy="evict_first")
    scales = tl.load(w_scale + (at * UNIT_SCALES + scale), mask=there, other=0, eviction_policy="evict_first")
    words, scales = tl.permute(words, (1, 0, 2)), tl.permute(scales, (1, 0, 2))
    return words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True)


@triton.jit
def _tokens_ahead(x, x_offset, x_ok, unit, half, middle, end, C: tl.constexpr):
    """bf16 [HALVES * TOKENS, BLOCK_K]: tokens' columns from `unit` on, then those `half` later."""
    h = tl.arange(0, C.HALVES * C.TOKENS) // C.TOKENS
    k = ((h * half + unit) * _UNIT)[:, None] + tl.arange(0, C.BLOCK_K)[None, :]
    stop = tl.minimum(tl.where(h == 0, middle, end) * _UNIT, C.K)
    return tl.load(x + x_offset[:, None] + k, mask=x_ok[:, None] & (k < stop[:, None]), other=0.0)


@triton.jit
def _for_each_half(values, C: tl.constexpr):
    HALVES: tl.constexpr = C.HALVES
    TOKENS: tl.constexpr = C.TOKENS
    return tl.reshape(tl.broadcast_to(values[None, :], (HALVES, TOKENS)), (HALVES * TOKENS,))


@triton.jit
def _part(C: tl.constexpr):
    """(first unit, units of the first half, unit where that ends, unit where all ends) of this program's part of K."""
    HALVES: tl.constexpr = C.HALVES
    UNITS: tl.constexpr = (C.K + _UNIT - 1) // _UNIT
    split = tl.program_id(2)
    begin, end = split * UNITS // C.SPLITS, (split + 1) * UNITS // C.SPLITS
    half = (end - begin + HALVES - 1) // HALVES
    return begin, half, begin + half, end


@triton.jit
def _own_words(w, w_scale, expert, column, C: tl.constexpr):
    """Where an expert's words and scales of the rows from `column` on begin."""
    UNITS: tl.constexpr = (C.K + _UNIT - 1) // _UNIT
    own, own_scale = four_bit_expert(w, w_scale, expert, C)
    own += column // _UNIT * UNITS * _UNIT_WORDS
    own_scale += column // _UNIT * UNITS * C.UNIT_SCALES
    return own, own_scale


@triton.jit
def _first_words(w, w_scale, expert, column, there, C: tl.constexpr):
    """Loads the first AHEAD blocks, each (words, scales), if they are `there`."""
    BK: tl.constexpr = C.BLOCK_K // _UNIT
    AHEAD: tl.constexpr = C.AHEAD
    own, own_scale = _own_words(w, w_scale, expert, column, C)
    begin, half, middle, end = _part(C)
    middle, end = tl.where(there, middle, 0), tl.where(there, end, 0)
    blocks = ()
    for i in tl.static_range(AHEAD):
        block = _words_ahead(own, own_scale, begin + i * BK, half, middle, end, C)
        blocks = blocks + (block,)  # noqa: RUF005  (Triton unpacks nothing)
    return blocks


@triton.jit
def _four_bit_product(
    x, read, x_stride, x_ok, w, w_scale, expert, column, blocks, C: tl.constexpr, WAIT: tl.constexpr
):  # fmt: skip
    """float32 [64, TOKENS] of an expert's weight rows from `column` on, over this program's part of K.

    Args:
        read: [TOKENS] rows of x, those that are `x_ok`.
        blocks: of `_first_words`.  WAIT: x is written by the previous kernel.
    """
    HALVES: tl.constexpr = C.HALVES
    TOKENS: tl.constexpr = C.TOKENS
    BK: tl.constexpr = C.BLOCK_K // _UNIT
    AHEAD: tl.constexpr = C.AHEAD
    tl.static_assert(C.BLOCK_N == _UNIT)
    total = tl.zeros((HALVES * _UNIT, HALVES * TOKENS), dtype=tl.float32)
    own, own_scale = _own_words(w, w_scale, expert, column, C)
    begin, half, middle, end = _part(C)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    x_offset, x_ok = _for_each_half(read, C).to(tl.int64) * x_stride, _for_each_half(x_ok.to(tl.int32), C) > 0
    tokens = _tokens_ahead(x, x_offset, x_ok, begin, half, middle, end, C)
    for start in tl.range(begin, middle, BK * AHEAD, num_stages=1):
        following = ()
        for i in tl.static_range(AHEAD):
            unit = start + i * BK
            words, scales = blocks[i]
            later = _words_ahead(own, own_scale, unit + BK * AHEAD, half, middle, end, C)
            following = following + (later,)  # noqa: RUF005
            next_tokens = _tokens_ahead(x, x_offset, x_ok, unit + BK, half, middle, end, C)
            block = four_bit_values(words, scales, HALVES, BK, C)
            total = settled(tl.dot(block, tokens.T, total))
            tokens = next_tokens
        blocks = following
    if HALVES == 2:
        left, right = tl.split(tl.permute(tl.reshape(total, (2, _UNIT, 2, TOKENS)), (1, 3, 0, 2)))
        total = tl.split(left)[0] + tl.split(right)[1]
    return total


# ---- both ------------------------------------------------------------------------------------------------------------


@triton.jit
def _terms(w_factor, bias, expert, column, C: tl.constexpr):
    """Loads what sums of gate and up are multiplied by, and what is added to each, for weight rows from `column` on."""
    parts: tl.constexpr = 2 if C.GATED else 1
    width: tl.constexpr = C.N // parts
    n = column // parts + tl.arange(0, C.BLOCK_N // parts)
    there = n < width
    gate_factor, up_factor, gate_bias, up_bias = 1.0, 1.0, 0.0, 0.0
    if w_factor is not None:
        own = w_factor + expert * C.N + n
        gate_factor = tl.load(own, mask=there, other=0.0)[:, None]
        if C.GATED:
            up_factor = tl.load(own + width, mask=there, other=0.0)[:, None]
    if bias is not None:
        own, once = bias + expert * C.N + n, there & (tl.program_id(2) == 0)
        gate_bias = tl.load(own, mask=once, other=0.0)[:, None]
        if C.GATED:
            up_bias = tl.load(own + width, mask=once, other=0.0)[:, None]
    return gate_factor, up_factor, gate_bias, up_bias


@triton.jit
def _finished(total, terms, w_factor, bias, column, C: tl.constexpr):
    """Returns the result [BLOCK_N / parts, TOKENS], its columns, and which of them there are."""
    parts: tl.constexpr = 2 if C.GATED else 1
    width: tl.constexpr = C.N // parts
    gate, up = halves(total, True) if C.GATED else (total, total)
    n = column // parts + tl.arange(0, C.BLOCK_N // parts)
    gate_factor, up_factor, gate_bias, up_bias = terms
    if w_factor is not None:
        gate *= gate_factor
        if C.GATED:
            up *= up_factor
    if bias is not None:
        gate += gate_bias
        if C.GATED:
            up += up_bias
    if C.FIRST:
        gate = activated(gate, up, C.GATED, C.ALPHA, C.BETA, C.LIMIT, C.CUBIC)
    return gate, n, n < width


@triton.jit(do_not_specialize=["num_tokens", "first", "L"], do_not_specialize_on_alignment=["ids", "weights"])
def few_gemm(
    x, w, w_tiles, w_scale, w_factor, bias, ids, weights, places, out, num_tokens, first, L, x_stride, out_stride,
    C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid: blocks of weight rows x top-k entries x SPLITS (1 if FIRST). Entry e is its token's first that names its
    expert, which is local; nothing is written for others.

    FIRST: `out[e] = activation(x[token of e] @ w[expert of e].T + bias)`, bf16; x [tokens, K]. Else the SPLITS parts of
    `weight of e * (x[e] @ w[expert of e].T + bias)`, float32 [SPLITS, entries, N]; x [entries, K]. The weight of e is
    the sum of all that its token gives its expert.

    Args:
        w, w_tiles: the weights, and their descriptor of blocks or None.  w_scale, w_factor, bias: see `grouped_gemm`.
        ids, weights: [tokens, TOP_K] int32 (global) and float32. Weights None: rows are written without.
        places: int32 [entries], where the second GEMM writes which row holds an entry's result, -1 for none; or None.
        first, L: the first local expert, and how many there are.
        C: FewConstants.  PDL: by programmatic dependent launch. The second GEMM is set up when the first one has
            waited: ids and weights are then written.
    """
    FOUR_BITS: tl.constexpr = C.UNIT_SCALES > 0
    if PDL and C.FIRST:
        gdc_wait()
        gdc_launch_dependents()
    column = tl.program_id(0) * C.BLOCK_N
    early = ()
    if C.EAGER and C.FIRST:
        named = tl.load(ids + tl.program_id(1), cache_modifier=".cg") - first
        local = (named >= 0) & (named < L)
        early = _first_words(w, w_scale, tl.where(local, named, 0), column, local, C)
    expert, rows, factor, place = _entries_of(ids, weights, tl.program_id(1), num_tokens, first, L, C)
    if places is not None:  # not by the first GEMM: where no expert is local, the second one may end before it
        tl.store(places + tl.program_id(1), place, mask=tl.program_id(0) == 0)
    if PDL and not C.FIRST and not FOUR_BITS:
        gdc_wait()
        gdc_launch_dependents()
    if expert >= 0:
        chosen = rows < C.TOKENS * C.TOP_K
        read = tl.arange(0, C.TOKENS) if C.FIRST else rows
        if C.EAGER and not C.FIRST:
            terms = _terms(w_factor, bias, expert, column, C)
        if FOUR_BITS:
            blocks = early if C.EAGER and C.FIRST else _first_words(w, w_scale, expert, column, True, C)
            total = _four_bit_product(
                x, read, x_stride, chosen, w, w_scale, expert, column, blocks, C, PDL and not C.FIRST
            )  # fmt: skip
        else:
            w_row = expert * C.N + column
            total = _product(x, read.to(tl.int64) * x_stride, chosen, w, w_tiles, w_row, C)
        if not (C.EAGER and not C.FIRST):
            terms = _terms(w_factor, bias, expert, column, C)
        value, n, there = _finished(total, terms, w_factor, bias, column, C)
        if not C.FIRST and weights is not None:
            value *= factor[None, :]
        target = (rows + tl.program_id(2) * num_tokens * C.TOP_K).to(tl.int64) * out_stride
        tl.store(
            out + target[None, :] + n[:, None], value.to(out.dtype.element_ty), mask=chosen[None, :] & there[:, None]
        )


@triton.jit(do_not_specialize=["num_rows", "first", "L"], do_not_specialize_on_alignment=["ids"])
def few_sum(
    rows, ids, out, num_rows, first, L, H: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_H: tl.constexpr, EVERY_ROW: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds what the second `few_gemm` has written for a token, `rows` [SPLITS, num_rows, H]. Grid: tokens x blocks of
    columns. EVERY_ROW: tokens without a local expert become zeros, else they aren't written."""
    token, k = tl.program_id(0), tl.arange(0, K_PAD)
    own = tl.load(ids + token * TOP_K + k, mask=k < TOP_K, other=first - 1, cache_modifier=".cg")
    there = (own >= first) & (own < first + L)
    local = tl.max(there.to(tl.int32), axis=0)
    for earlier in tl.static_range(TOP_K - 1):
        there = there & ((tl.load(ids + token * TOP_K + earlier, cache_modifier=".cg") != own) | (k <= earlier))
    if PDL:
        gdc_wait()  # for rows alone: ids were there before the second GEMM was
    cols = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], dtype=tl.float32)
    for split in tl.static_range(SPLITS):
        at = (split * num_rows + token * TOP_K + k).to(tl.int64)[:, None] * H + cols[None, :]
        value = tl.load(rows + at, mask=there[:, None] & (cols < H)[None, :], other=0.0)
        total += tl.sum(value, axis=0)
    target = out + token.to(tl.int64) * H + cols
    tl.store(target, total.to(out.dtype.element_ty), mask=(cols < H) & (EVERY_ROW or local > 0))
