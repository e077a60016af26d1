# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The warpgroups of `gemm_gluon` that multiply: a part of a tile's weight rows each, times all of its tokens.

A stage of 4-bit weights has two parts where there is room: the second is decoded while the first one's product is under
way. wgmma reads its left operand from registers until it is waited for, so each part has its own, and the wait names
both; tests/upstream reads the machine code for it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.fp4 import UNIT
from eprt.experts.grouped.fp4_triton import pair_scales, pairs_of, rest_of
from eprt.experts.grouped.gemm_triton import halves
from eprt.experts.grouped.pipeline_gluon import (
    BLOCK_K,
    advance,
    barrier,
    by_height,
    first_of,
    in_blocks,
    memory_as,
    where_next,
)

_UNIT = gl.constexpr(UNIT)
_BLOCK_K = gl.constexpr(BLOCK_K)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# What a thread has of a unit: four of its words, and of scales [32, 4 threads that share them, words].
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 1, 1], [8, 4, 1], [4, 1, 1], [2, 1, 0]))
_PAIRED_SCALES = gl.constexpr(gl.BlockedLayout([1, 1, 2], [8, 4, 1], [4, 1, 1], [2, 1, 0]))


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
    there = (m < end)[:, None] & (n < width)[None, :]
    # What the sum reads next stays in the L2 cache; weights, read once, would drive it out.
    KEPT: gl.constexpr = "" if C.FIRST else "evict_last"
    gl.store(out + (begin[:, None] + n[None, :]), value, mask=there, eviction_policy=KEPT)


# ---- the left operand ------------------------------------------------------------------------------------------------


@gluon.jit
def _weights(stages, stage, PART: gl.constexpr, WHICH: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """A part of a stage's weights of this multiplier: bf16 where they are, 4 bits decoded."""
    if C.FP4:
        OWN: gl.constexpr = _PAIRED_SCALES if C.PAIR == "nv4a16" else _SCALES
        COUNT: gl.constexpr = C.STAGES * C.UNIT_ROWS * C.PARTS
        unit = (stage * C.UNIT_ROWS + WHICH) * C.PARTS + PART
        words = memory_as(stages[0], gl.int32, [COUNT, 128, 4], _PLAIN).index(unit).load(_WORDS)
        scales = memory_as(stages[1], gl.int32, [COUNT, 32, C.UNIT_SCALES // 32], _PLAIN)
        scales = scales.index(unit).load(gl.SliceLayout(1, OWN))
        weights = _decoded(words.to(gl.uint32, bitcast=True), scales.to(gl.uint32, bitcast=True), LAYOUT)
    else:
        weights = in_blocks(stages[0], C.STAGES * C.MULTIPLIERS, C.BLOCK_N // C.MULTIPLIERS)
        weights = weights.index(stage * C.MULTIPLIERS + WHICH)
    return weights


@gluon.jit
def _decoded(words, scales, LAYOUT: gl.constexpr):
    """bf16 [64, 64] as left operand, of words [128 threads, 4] and scales [32, words for four threads]."""
    NV: gl.constexpr = scales.shape[1] == 2
    scales = scales[:, None, :].broadcast_to((32, 4, scales.shape[1]))
    a, b = gl.split(gl.reshape(words, (128, 2, 2)))  # [thread, q]
    scale, other = pair_scales(gl.reshape(scales, (128, 2) if NV else (128,)), NV)
    scale = gl.convert_layout(scale, a.type.layout, assert_trivial=True)
    other = gl.convert_layout(other, a.type.layout, assert_trivial=True)
    both = pairs_of(a, b, rest_of(a, b), scale, other)
    # w, g, t, q, j, i, l, h to rows (w, h, g) and columns (q, j, i, t, l)
    both = gl.permute(gl.reshape(both, (4, 8, 4, 2, 2, 2, 2, 2)), (0, 7, 1, 3, 4, 5, 2, 6))
    return gl.convert_layout(gl.reshape(both, (_UNIT, _UNIT)), LAYOUT, assert_trivial=True)


# ---- a program's tiles -----------------------------------------------------------------------------------------------


@gluon.jit
def _add(weights, ring, tail_ring, part, total, tail, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Begin to add a part's product."""
    block = first_of(ring.index(part), TOKENS)
    total = warpgroup_mma(weights, block.permute((1, 0)), total, is_async=True)
    if TAIL > 0:
        if C.FP4:
            weights = gl.convert_layout(weights, _fragment_layout(TAIL), assert_trivial=True)
        tail = warpgroup_mma(weights, tail_ring.index(part).permute((1, 0)), tail, is_async=True)
    return total, tail


@gluon.jit
def _done(total, tail, weights, others, IN_REGISTERS: gl.constexpr, TAIL: gl.constexpr):
    """What was begun. Weights in registers stay there until then."""
    if IN_REGISTERS and TAIL > 0:
        total, tail, weights, others = warpgroup_mma_wait(0, [total, tail, weights, others])
    elif IN_REGISTERS:
        total, weights, others = warpgroup_mma_wait(0, [total, weights, others])
    elif TAIL > 0:
        total, tail = warpgroup_mma_wait(0, [total, tail])
    else:
        total = warpgroup_mma_wait(0, [total])
    return total, tail


@gluon.jit
def _tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """While this multiplier waits for a product, or decodes, those of the others go on. Two that decode take turns:
    else both would decode at the same time, and wait at the same time."""
    HEIGHT: gl.constexpr = C.BLOCK_N // C.MULTIPLIERS
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    PARTS: gl.constexpr = C.PARTS
    TURNS: gl.constexpr = C.FP4 and C.MULTIPLIERS == 2
    stages, turns, desk, target, where, WHICH = fixed
    _, _, ring, tail_ring, full, empty, _ = stages
    expert, row, end, first = where
    stage, phase, turn_phase = state
    total = gl.zeros((HEIGHT, TOKENS), gl.float32, _product_layout(TOKENS))
    tail = gl.zeros((HEIGHT, SHORT), gl.float32, _product_layout(SHORT))
    for _ in range(C.NUM_K):
        mbarrier.wait(full.index(stage), phase)
        if not C.X_TMA:
            fence_async_shared()  # what threads have copied, for the tensor cores
        weights = _weights(stages, stage, 0, WHICH, C, _fragment_layout(TOKENS))
        others = weights
        if PARTS > 1:
            others = _weights(stages, stage, 1, WHICH, C, _fragment_layout(TOKENS))
        if TURNS:
            mbarrier.wait(turns.index(WHICH), turn_phase)
        total, tail = _add(weights, ring, tail_ring, stage * PARTS, total, tail, C, TOKENS, TAIL)
        if PARTS > 1:
            total, tail = _add(others, ring, tail_ring, stage * PARTS + 1, total, tail, C, TOKENS, TAIL)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHICH))
            turn_phase ^= 1
        total, tail = _done(total, tail, weights, others, C.FP4, TAIL)
        mbarrier.arrive(empty.index(stage))
        stage, phase = advance(stage, phase, C.STAGES)
    _finish(total, desk, target, expert, row, end, first, C)
    if TAIL > 0:
        _finish(tail, desk, target, expert, row + TOKENS, end, first, C)
    return stage, phase, turn_phase


@gluon.jit
def multiply(own, WHICH: gl.constexpr, C: gl.constexpr):
    """This program's tiles, the WHICHth of C.MULTIPLIERS parts of their weight rows.

    own: (where results go, shared memory of each multiplier for those on their way, the ring, barriers by which two
        take turns).
    """
    target, desks, stages, turns = own
    HEIGHT: gl.constexpr = C.BLOCK_N // C.MULTIPLIERS
    gl.static_assert(C.K % _BLOCK_K == 0)
    state = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1 - WHICH)
    expert, row, end, column = where_next(stages, (state[0], state[1]))
    while expert >= 0:
        first = column * C.BLOCK_N + WHICH * HEIGHT
        fixed = stages, turns, desks.index(WHICH), target, (expert, row, end, first), WHICH
        state = by_height(_tile, fixed, state, end - row, C)
        expert, row, end, column = where_next(stages, (state[0], state[1]))
