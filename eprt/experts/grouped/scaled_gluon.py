# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""Consumer warpgroups' tiles of FP8 weights with a scale per 128 x 128: products are scaled before they are added."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from eprt.experts.grouped.constants_gluon import product_layout
from eprt.experts.grouped.epilogue_gluon import finish, finish_tokens
from eprt.experts.grouped.four_bit import UNIT
from eprt.experts.grouped.four_bit_triton import settled
from eprt.experts.grouped.pipeline_gluon import advance, first_of, in_blocks, reinterpreted
from eprt.experts.grouped.weights import INTERLEAVE

_UNIT = gl.constexpr(UNIT)
_INTERLEAVE = gl.constexpr(INTERLEAVE)
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def _columns_layout(columns):
    """Returns the layout of an accumulator of 64 tokens x `columns` weight rows, seen as [64, columns // 16, 2, 8]:
    gate and up take turns by 8."""
    sixteens = [[0, count, 0, 0] for count in (1, 2, 4, 8) if count * 16 < columns]
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]]
    registers = [[0, 0, 0, 1], [8, 0, 0, 0], [0, 0, 1, 0], *sixteens]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0, 0, 0], [32, 0, 0, 0]], [], [64, columns // 16, 2, 8])


@gluon.constexpr_function
def _rows_layout():
    """Returns the layout of an accumulator's 64 weight rows, seen as [4, 2, 8]."""
    lanes = [[0, 0, 0], [0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]]
    return gl.DistributedLinearLayout([[0, 1, 0]], lanes, [[1, 0, 0], [2, 0, 0]], [], [4, 2, 8])


@gluon.jit
def _promote(tokens, weights, scales, factors, total, C: gl.constexpr):
    """Adds one part's product, 64 tokens x as many weight rows as `total` has, after its scales: `scales` of tokens,
    `factors` of gate and up, or of all weight rows. A thread has two tokens, so it reads two scales."""
    LAYOUT: gl.constexpr = total.type.layout
    product = warpgroup_mma(tokens, weights.permute((1, 0)), total, use_acc=False, is_async=True)
    if C.GATED:
        COLUMNS: gl.constexpr = total.shape[1]
        PARTS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, _columns_layout(COLUMNS)))
        token, factor = scales.load(gl.SliceLayout(1, PARTS)), factors.load(gl.SliceLayout(0, PARTS))
        scale = gl.expand_dims(gl.expand_dims(token[:, None] * factor[None, :], 1), 3)
        scale = gl.reshape(scale.broadcast_to((_UNIT, COLUMNS // 16, 2, _INTERLEAVE)), (_UNIT, COLUMNS))
        scale = gl.convert_layout(scale, LAYOUT, assert_trivial=True)
    else:
        token, factor = scales.load(gl.SliceLayout(1, LAYOUT)), factors.load(gl.SliceLayout(0, LAYOUT))
        scale = token[:, None] * factor[None, :]
    product = warpgroup_mma_wait(0, [product])
    return total + product * scale


@gluon.jit
def _promote_few(weights, tokens, scales, factors, total, C: gl.constexpr):
    """Does as `_promote` with this consumer's 64 weight rows x fewer tokens."""
    LAYOUT: gl.constexpr = total.type.layout
    product = warpgroup_mma(weights, tokens.permute((1, 0)), total, use_acc=False, is_async=True)
    if C.GATED:
        parts = factors.load(gl.SliceLayout(0, gl.SliceLayout(2, _rows_layout())))
        rows = gl.expand_dims(gl.expand_dims(parts, 0), 2).broadcast_to((4, 2, _INTERLEAVE))
        factor = gl.convert_layout(gl.reshape(rows, (_UNIT,)), gl.SliceLayout(1, LAYOUT), assert_trivial=True)
    else:
        factor = factors.load(gl.SliceLayout(1, LAYOUT))
    token = scales.load(gl.SliceLayout(0, LAYOUT))
    product = warpgroup_mma_wait(0, [product])
    return total + product * (token[None, :] * factor[:, None])


@gluon.jit
def scaled_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Does as `consumer_gluon._tile`. Sums of 128 columns are scaled and added in float32 while the other consumer's
    products go on."""
    gl.static_assert(TOKENS <= 128)
    if TOKENS > _UNIT:
        state = _scaled_by_tokens(fixed, state, C, TAIL)
    else:
        state = _scaled_by_rows(fixed, state, C, TOKENS, TAIL)
    return state


@gluon.jit
def _factors(stages, stage, block, C: gl.constexpr):
    """Returns a stage's scales of gate and up, or the one of its 128 weight rows `block`."""
    if C.GATED:
        factors = stages.w_scale.index(stage)
    else:
        scales = reinterpreted(stages.w_scale, gl.float32, [C.STAGES * C.PIECES, 1], _LINE)
        factors = scales.index(stage * C.PIECES + block)
    return factors


@gluon.jit
def _apart(total, stages, stage, phase):
    """Returns `total` as it is before the next product begins. Otherwise LLVM scales two products after both, and ptxas
    begins the second one early: either takes registers for two, and spills. ptxas keeps to the order of loops, so the
    full stage is waited for again."""
    total = settled(total)
    mbarrier.wait(stages.full.index(stage), phase)
    return total


@gluon.jit
def _scaled_by_tokens(fixed, state, C: gl.constexpr, TAIL: gl.constexpr):
    """Computes a tile of 128 tokens: a consumer has 64 of them, by all weight rows; a tail's tokens it has all, by half
    of the weight rows. Of 256 weight rows registers hold the sums, and the product of 128."""
    COLUMNS: gl.constexpr = C.BLOCK_N // C.PIECES
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    stages, _, staging, target, where, WHICH = fixed
    expert, row, end, first = where
    stage, phase, order_phase = state
    total = gl.zeros((_UNIT, COLUMNS), gl.float32, product_layout(COLUMNS, 32))
    more = total
    tail = gl.zeros((_UNIT, SHORT), gl.float32, product_layout(SHORT, 32))
    more_tail = tail
    tokens = in_blocks(stages.x, 2 * C.STAGES, _UNIT, C)
    pieces = in_blocks(stages.w, C.PIECES * C.STAGES, COLUMNS, C)
    scales = reinterpreted(stages.x_scale, gl.float32, [2 * C.STAGES, _UNIT], _LINE)
    for _ in range(C.NUM_K):
        mbarrier.wait(stages.full.index(stage), phase)
        if not C.X_TMA:
            fence_async_shared()  # what threads have copied, for the tensor cores
        half, factors = 2 * stage + WHICH, _factors(stages, stage, 0, C)
        total = _promote(tokens.index(half), pieces.index(C.PIECES * stage), scales.index(half), factors, total, C)
        if C.PIECES > 1:
            total = _apart(total, stages, stage, phase)
            piece, factors = pieces.index(C.PIECES * stage + 1), _factors(stages, stage, 1, C)
            more = _promote(tokens.index(half), piece, scales.index(half), factors, more, C)
        if TAIL > 0:
            if C.PIECES > 1:
                more = _apart(more, stages, stage, phase)
            rest = stages.tail, stages.tail_scale
            tail, more_tail = _promote_rows(rest, stages, stage, phase, WHICH, tail, more_tail, C)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = advance(stage, phase, C.STAGES)
    n = first - WHICH * (C.BLOCK_N // 2)
    finish_tokens(total, _as_tokens(staging), target, expert, row + WHICH * _UNIT, end, n, C)
    if C.PIECES > 1:
        finish_tokens(more, _as_tokens(staging), target, expert, row + WHICH * _UNIT, end, n + COLUMNS, C)
    if TAIL > 0:
        _finish_rows(tail, more_tail, staging, target, expert, row + 2 * _UNIT, end, first, C)
    return stage, phase, order_phase


@gluon.jit
def _as_tokens(staging):
    """Returns the same staging buffer as rows of 64 tokens."""
    DTYPE: gl.constexpr = staging.dtype
    COLUMNS: gl.constexpr = staging.shape[0] * staging.shape[1] // _UNIT
    WIDTH: gl.constexpr = DTYPE.primitive_bitwidth
    return reinterpreted(staging, DTYPE, [_UNIT, COLUMNS], gl.NVMMASharedLayout(64, WIDTH, 2))


@gluon.jit
def _scaled_by_rows(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """A consumer has half of the weight rows, by all tokens."""
    LAYOUT: gl.constexpr = product_layout(TOKENS, 32)
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    stages, _, staging, target, where, WHICH = fixed
    expert, row, end, first = where
    stage, phase, order_phase = state
    total = gl.zeros((_UNIT, TOKENS), gl.float32, LAYOUT)
    more = total
    tail = gl.zeros((_UNIT, SHORT), gl.float32, product_layout(SHORT, 32))
    more_tail = tail
    for _ in range(C.NUM_K):
        mbarrier.wait(stages.full.index(stage), phase)
        if not C.X_TMA:
            fence_async_shared()  # what threads have copied, for the tensor cores
        total, more = _promote_rows((stages.x, stages.x_scale), stages, stage, phase, WHICH, total, more, C)
        if TAIL > 0:
            rest = stages.tail, stages.tail_scale
            tail, more_tail = _promote_rows(rest, stages, stage, phase, WHICH, tail, more_tail, C)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = advance(stage, phase, C.STAGES)
    _finish_rows(total, more, staging, target, expert, row, end, first, C)
    if TAIL > 0:
        _finish_rows(tail, more_tail, staging, target, expert, row + TOKENS, end, first, C)
    return stage, phase, order_phase


@gluon.jit
def _promote_rows(read, stages, stage, phase, WHICH: gl.constexpr, total, more, C: gl.constexpr):
    """Does as `_promote_few` with each 64 of this consumer's weight rows, all of one block. read: the first of these
    tokens and their scales, of all stages."""
    PIECES: gl.constexpr = C.PIECES
    units = in_blocks(stages.w, C.STAGES * 2 * PIECES, _UNIT, C)
    unit = units.index(stage * (2 * PIECES) + WHICH * PIECES)
    factors = _factors(stages, stage, WHICH * PIECES // 2, C)
    tokens, scales = first_of(read[0].index(stage), total.shape[1]), first_of(read[1].index(stage), total.shape[1])
    total = _promote_few(unit, tokens, scales, factors, total, C)
    if PIECES > 1:
        total = _apart(total, stages, stage, phase)
        unit = units.index(stage * (2 * PIECES) + (WHICH * PIECES + 1))
        more = _promote_few(unit, tokens, scales, factors, more, C)
    return total, more


@gluon.jit
def _finish_rows(total, more, staging, target, expert, row, end, first, C: gl.constexpr):
    """Writes what `_promote_rows` has summed."""
    finish(total, staging, target, expert, row, end, first, C)
    if C.PIECES > 1:
        finish(more, staging, target, expert, row, end, first + _UNIT, C)
