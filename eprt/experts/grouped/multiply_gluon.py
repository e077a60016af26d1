# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The two warpgroups of `gemm_gluon` that multiply: half of a tile's weight rows each, times all of its tokens.

bf16 weights lie in the ring. The words of 4-bit weights come from global memory, a block ahead of their decoding,
across tiles as well: at a tile's end the next one's first block is decoded already. wgmma reads its left operand from
registers until it is waited for, so two sets of them take turns, and each wait names both (`_fp4_step`); tests/upstream
reads the machine code for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.fp4 import MX_UNIT_SCALES, NV_UNIT_SCALES, UNIT, UNIT_WORDS
from eprt.experts.grouped.fp4_triton import pair_scales, pairs_of, rest_of
from eprt.experts.grouped.gemm_triton import halves, position, turn
from eprt.experts.grouped.ring_gluon import BLOCK_K, advance, barrier, by_height, first_of, in_blocks

LEAST_BLOCKS = 4  # of K: so many are under way before a tile's first product

_UNIT = gl.constexpr(UNIT)
_UNIT_WORDS = gl.constexpr(UNIT_WORDS)
_MX_UNIT_SCALES = gl.constexpr(MX_UNIT_SCALES)
_NV_UNIT_SCALES = gl.constexpr(NV_UNIT_SCALES)
_BLOCK_K = gl.constexpr(BLOCK_K)
_LEAST_BLOCKS = gl.constexpr(LEAST_BLOCKS)
# What a thread has of a unit: its words, and of scales one word (MXFP4) or two.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0]))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _product_layout(tokens):
    """Weight rows x tokens, float32, of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _fragment_layout(tokens):
    """Its left operand; the same for any number of tokens."""
    return gl.DotOperandLayout(0, _product_layout(tokens), 2)


# ---- what becomes of a product -------------------------------------------------------------------------------------


@gluon.jit
def _finish(total, desk, target, expert, row, end, first, C: gl.constexpr):
    """Weight rows from `first` on of the tokens from `row` on, as many at once as `desk` has room for."""
    rows: gl.constexpr = total.shape[0]
    tokens: gl.constexpr = total.shape[1]
    if tokens > desk.shape[0]:
        # A thread has some of both.
        low, high = gl.split(gl.permute(gl.reshape(total, (rows, 2, tokens // 2)), (0, 2, 1)))
        _finish(low, desk, target, expert, row, end, first, C)
        _finish(high, desk, target, expert, row + tokens // 2, end, first, C)
    else:
        _finish_part(total, first_of(desk, tokens), target, expert, row, end, first, C)


@gluon.jit
def _finish_part(total, desk, target, expert, row, end, first, C: gl.constexpr):
    """Rows' factors, bias, activation; over `desk` [tokens, columns] into `out`, whole 16 bytes a thread."""
    parts: gl.constexpr = 2 if C.GATED else 1
    width: gl.constexpr = C.N // parts
    w_factor, bias, out, out_stride, out_skip = target
    if C.GATED:
        gate, up = halves(total, True)
    else:
        gate, up = total, total
    height: gl.constexpr = gate.shape[0]
    n = first // parts + gl.arange(0, height, gl.SliceLayout(1, gate.type.layout))
    there = n < width
    if w_factor is not None:
        factor = w_factor + expert * C.N + n
        gate *= gl.load(factor, mask=there, other=0.0)[:, None]
        if C.GATED:
            up *= gl.load(factor + width, mask=there, other=0.0)[:, None]
    if bias is not None:
        own = bias + expert * C.N + n
        gate += gl.load(own, mask=there, other=0.0)[:, None]
        if C.GATED:
            up += gl.load(own + width, mask=there, other=0.0)[:, None]
    if C.FIRST:
        gate = activated(gate, up, C.GATED, C.ALPHA, C.BETA, C.LIMIT)
    desk.permute((1, 0)).store(gate.to(out.dtype.element_ty))
    barrier()
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // height, height // 8], [4, 1], [1, 0])
    value = desk.load(STORE)
    n = first // parts + gl.arange(0, height, gl.SliceLayout(0, STORE))
    m = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, STORE))
    begin = m.to(gl.int64) * out_stride + expert.to(gl.int64) * out_skip
    gl.store(out + (begin[:, None] + n[None, :]), value, mask=(m < end)[:, None] & (n < width)[None, :])


# ---- bf16 weights ----------------------------------------------------------------------------------------------------


@gluon.jit
def _bf16_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """While this multiplier waits for its product and for the next block, the other one's goes on."""
    HEIGHT: gl.constexpr = C.BLOCK_N // 2
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    stages, desk, target, where = fixed
    w_ring, ring, tail_ring, full, empty = stages
    expert, row, end, which, first = where
    own = in_blocks(w_ring, C.STAGES * 2, HEIGHT)
    stage, phase = state
    total = gl.zeros((HEIGHT, TOKENS), gl.float32, _product_layout(TOKENS))
    tail = gl.zeros((HEIGHT, SHORT), gl.float32, _product_layout(SHORT))
    for _ in range(C.K // _BLOCK_K):
        mbarrier.wait(full.index(stage), phase)
        weights = own.index(stage * 2 + which)
        total = warpgroup_mma(weights, first_of(ring.index(stage), TOKENS).permute((1, 0)), total, is_async=True)
        if TAIL > 0:
            tail = warpgroup_mma(weights, tail_ring.index(stage).permute((1, 0)), tail, is_async=True)
            total, tail = warpgroup_mma_wait(0, [total, tail])
        else:
            total = warpgroup_mma_wait(0, [total])
        mbarrier.arrive(empty.index(stage))
        stage, phase = advance(stage, phase, C.STAGES)
    _finish(total, desk, target, expert, row, end, first, C)
    if TAIL > 0:
        _finish(tail, desk, target, expert, row + TOKENS, end, first, C)
    return stage, phase


@gluon.jit
def _multiply_bf16(target, desk, stages, items, num_items, WHICH: gl.constexpr, C: gl.constexpr):
    total = gl.load(num_items) * C.NUM_N
    start = gl.program_id(0)
    if start < total:
        expert, row, end, column = position(items, turn(start, total), C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
        state = gl.to_tensor(0), gl.to_tensor(0)
        for tile in range(start, total, gl.num_programs(0)):
            following = turn(gl.minimum(tile + gl.num_programs(0), total - 1), total)
            expert_, row_, end_, column_ = position(items, following, C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
            where = expert, row, end, WHICH, column * C.BLOCK_N + WHICH * C.BLOCK_N // 2
            state = by_height(_bf16_tile, (stages, desk, target, where), state, end - row, C)
            expert, row, end, column = expert_, row_, end_, column_


# ---- 4-bit weights ---------------------------------------------------------------------------------------------------


@gluon.jit
def _words(w, w_scale, unit, next_unit, k, BLOCKS: gl.constexpr, NV: gl.constexpr):
    """(words, scales) of block k from `unit` on; those past the last are the first of `next_unit`."""
    own = gl.where(k < BLOCKS, unit + k, next_unit + (k - BLOCKS))
    thread = gl.arange(0, 128, gl.SliceLayout(1, _WORDS))
    word = gl.arange(0, 4, gl.SliceLayout(0, _WORDS))
    words = gl.load(w + own * _UNIT_WORDS + (thread[:, None] * 4 + word[None, :]))
    if NV:
        thread = gl.arange(0, 128, gl.SliceLayout(1, _SCALES))
        word = gl.arange(0, 2, gl.SliceLayout(0, _SCALES))
        scales = gl.load(w_scale + own * _NV_UNIT_SCALES + (thread[:, None] // 4 * 2 + word[None, :]))
    else:
        scales = gl.load(w_scale + own * _MX_UNIT_SCALES + gl.arange(0, 128, _THREADS) // 4)
    return words, scales


@gluon.jit
def _decoded(words, scales, LAYOUT: gl.constexpr, NV: gl.constexpr):
    """bf16 [64, 64] as left operand, of what `_words` read."""
    a, b = gl.split(gl.reshape(words.to(gl.uint32, bitcast=True), (128, 2, 2)))  # [thread, q]
    scale, other = pair_scales(scales.to(gl.uint32, bitcast=True), NV)
    scale = gl.convert_layout(scale, a.type.layout, assert_trivial=True)
    other = gl.convert_layout(other, a.type.layout, assert_trivial=True)
    both = pairs_of(a, b, rest_of(a, b), scale, other)
    # w, g, t, q, j, i, l, h to rows (w, h, g) and columns (q, j, i, t, l)
    both = gl.permute(gl.reshape(both, (4, 8, 4, 2, 2, 2, 2, 2)), (0, 7, 1, 3, 4, 5, 2, 6))
    return gl.convert_layout(gl.reshape(both, (_UNIT, _UNIT)), LAYOUT, assert_trivial=True)


@gluon.jit
def _fp4_step(
    weights, words, scales, total, tail, source, stages, k, stage, phase,
    C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr,
):  # fmt: skip
    """Multiply a block's `weights`; meanwhile decode the next one's `words`, and read those of block k."""
    NV: gl.constexpr = C.PAIR == "nv4a16"
    w, w_scale, unit, next_unit = source
    _, ring, tail_ring, full, empty = stages
    mbarrier.wait(full.index(stage), phase)
    total = warpgroup_mma(weights, first_of(ring.index(stage), TOKENS).permute((1, 0)), total, is_async=True)
    if TAIL > 0:
        same = gl.convert_layout(weights, _fragment_layout(TAIL), assert_trivial=True)
        tail = warpgroup_mma(same, tail_ring.index(stage).permute((1, 0)), tail, is_async=True)
    after = _decoded(words, scales, _fragment_layout(TOKENS), NV)
    words, scales = _words(w, w_scale, unit, next_unit, k, C.K // _BLOCK_K, NV)
    if TAIL > 0:
        total, tail, weights, after = warpgroup_mma_wait(0, [total, tail, weights, after])
    else:
        total, weights, after = warpgroup_mma_wait(0, [total, weights, after])
    mbarrier.arrive(empty.index(stage))
    stage, phase = advance(stage, phase, C.STAGES)
    return total, tail, after, words, scales, stage, phase


@gluon.jit
def _fp4_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """A tile: its first block is decoded (`even`), the words of the two after it read (`ahead`, even blocks' first).
    Returns the same of the next."""
    BLOCKS: gl.constexpr = C.K // _BLOCK_K
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    stages, desk, target, source, where = fixed
    even, ahead, stage, phase = state
    words0, scales0, words1, scales1 = ahead
    expert, row, end, first = where
    even = gl.convert_layout(even, _fragment_layout(TOKENS), assert_trivial=True)
    total = gl.zeros((_UNIT, TOKENS), gl.float32, _product_layout(TOKENS))
    tail = gl.zeros((_UNIT, SHORT), gl.float32, _product_layout(SHORT))
    for k in range(0, BLOCKS // 2 * 2, 2):
        total, tail, odd, words1, scales1, stage, phase = _fp4_step(
            even, words1, scales1, total, tail, source, stages, k + 3, stage, phase, C, TOKENS, TAIL
        )
        total, tail, even, words0, scales0, stage, phase = _fp4_step(
            odd, words0, scales0, total, tail, source, stages, k + 4, stage, phase, C, TOKENS, TAIL
        )
    if BLOCKS % 2 == 1:
        following = gl.to_tensor(BLOCKS + 2)
        total, tail, odd, words1, scales1, stage, phase = _fp4_step(
            even, words1, scales1, total, tail, source, stages, following, stage, phase, C, TOKENS, TAIL
        )
        even = odd
        words0, scales0, words1, scales1 = words1, scales1, words0, scales0
    _finish(total, desk, target, expert, row, end, first, C)
    if TAIL > 0:
        _finish(tail, desk, target, expert, row + TOKENS, end, first, C)
    even = gl.convert_layout(even, _fragment_layout(_UNIT), assert_trivial=True)
    return even, (words0, scales0, words1, scales1), stage, phase


@gluon.jit
def _multiply_fp4(w, w_scale, target, desk, stages, items, num_items, WHICH: gl.constexpr, C: gl.constexpr):
    BLOCKS: gl.constexpr = C.K // _BLOCK_K
    UNITS: gl.constexpr = (C.N + _UNIT - 1) // _UNIT
    NV: gl.constexpr = C.PAIR == "nv4a16"
    gl.static_assert(C.K % _BLOCK_K == 0 and BLOCKS >= _LEAST_BLOCKS and C.BLOCK_N == 2 * _UNIT)
    total = gl.load(num_items) * C.NUM_N
    start = gl.program_id(0)
    if start < total:
        expert, row, end, column = position(items, turn(start, total), C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
        unit = (expert * UNITS + column * 2 + WHICH) * BLOCKS
        words0, scales0 = _words(w, w_scale, unit, unit, gl.to_tensor(0), BLOCKS, NV)
        words1, scales1 = _words(w, w_scale, unit, unit, gl.to_tensor(1), BLOCKS, NV)
        even = _decoded(words0, scales0, _fragment_layout(_UNIT), NV)
        words0, scales0 = _words(w, w_scale, unit, unit, gl.to_tensor(2), BLOCKS, NV)
        state = even, (words0, scales0, words1, scales1), gl.to_tensor(0), gl.to_tensor(0)
        for tile in range(start, total, gl.num_programs(0)):
            following = turn(gl.minimum(tile + gl.num_programs(0), total - 1), total)
            expert_, row_, end_, column_ = position(items, following, C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
            unit_ = (expert_ * UNITS + column_ * 2 + WHICH) * BLOCKS
            source = w, w_scale, unit, unit_
            where = expert, row, end, column * C.BLOCK_N + WHICH * _UNIT
            state = by_height(_fp4_tile, (stages, desk, target, source, where), state, end - row, C)
            expert, row, end, column, unit = expert_, row_, end_, column_, unit_


@gluon.jit
def multiply(
    w, w_scale, w_factor, bias, out, desks, stages, items, num_items, out_stride, out_skip,
    WHICH: gl.constexpr, C: gl.constexpr,
):  # fmt: skip
    """The half WHICH of every tile of this program. w: words of 4-bit weights; bf16's come from the ring.
    desks: shared memory of each multiplier for results on their way out."""
    target = w_factor, bias, out, out_stride, out_skip
    if C.FP4:
        _multiply_fp4(w, w_scale, target, desks.index(WHICH), stages, items, num_items, WHICH, C)
    else:
        _multiply_bf16(target, desks.index(WHICH), stages, items, num_items, WHICH, C)
