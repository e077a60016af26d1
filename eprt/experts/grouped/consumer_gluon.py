# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The consumer warpgroups of `gemm_gluon`: each multiplies a part of the tile's weight rows by all of its tokens.

A stage of 4-bit weights has two parts where shared memory allows: the second is decoded while the first one's wgmma is
in flight. wgmma reads its left operand from registers until it is waited for. So each part has registers of its own,
and the wait names both; tests/upstream checks that in the machine code.
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

from eprt.experts.grouped.constants_gluon import product_layout
from eprt.experts.grouped.epilogue_gluon import finish
from eprt.experts.grouped.four_bit import ROW_PAIRS, UNIT
from eprt.experts.grouped.four_bit_triton import pair_scales, pairs_of
from eprt.experts.grouped.mxfp4_e4m3_triton import e4m3_of, e4m3_words, row_fields
from eprt.experts.grouped.pipeline_gluon import (
    advance,
    by_height,
    first_of,
    in_blocks,
    next_tile,
    reinterpreted,
)
from eprt.experts.grouped.scaled_gluon import scaled_tile

_UNIT = gl.constexpr(UNIT)
_ROW_PAIRS = gl.constexpr(ROW_PAIRS)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A thread's share of a unit: four of its words.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))


@gluon.constexpr_function
def _fragment_layout(tokens, depth):
    """Returns the register layout of the left operand, 32 bits of neighbouring columns after each other; it is the same
    for any number of tokens."""
    return gl.DotOperandLayout(0, product_layout(tokens, depth), depth // 8)


# ---- the left operand ------------------------------------------------------------------------------------------------


@gluon.jit
def _weights(stages, stage, PART: gl.constexpr, WHICH: gl.constexpr, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns one part of a stage's weights for this consumer, in shared memory or, of 4 bits, decoded to registers,
    and what names those registers (`_done`)."""
    if C.FOUR_BIT:
        UNITS: gl.constexpr = C.PART_K // _UNIT
        unit = (stage * C.UNIT_ROWS + WHICH) * (C.PARTS * UNITS) + PART * UNITS
        if UNITS == 1:
            weights = gl.convert_layout(_unit_of(stages, unit, C)[0], LAYOUT, assert_trivial=True)
            held = weights
        else:
            left, left_words = _unit_of(stages, unit, C)
            right, right_words = _unit_of(stages, unit + 1, C)
            both = gl.reshape(gl.permute(gl.join(left, right), (0, 2, 1)), (_UNIT, 2 * _UNIT))
            weights, held = gl.convert_layout(both, LAYOUT, assert_trivial=True), gl.join(left_words, right_words)
    else:
        weights = in_blocks(stages.w, C.STAGES * C.CONSUMERS, C.BLOCK_N // C.CONSUMERS, C)
        weights = weights.index(stage * C.CONSUMERS + WHICH)
        held = weights
    return weights, held


@gluon.jit
def _unit_of(stages, unit, C: gl.constexpr):
    """Decodes one unit of the pipeline's; see `_decoded`."""
    PER_ROW: gl.constexpr = C.UNIT_SCALES // _ROW_PAIRS
    # Of its scales [32, 4 threads that share them, words].
    OWN: gl.constexpr = gl.BlockedLayout([1, 1, PER_ROW], [8, 4, 1], [4, 1, 1], [2, 1, 0])
    COUNT: gl.constexpr = C.STAGES * C.UNIT_ROWS * (C.BLOCK_K // _UNIT)
    words = reinterpreted(stages.w, gl.int32, [COUNT, 128, 4], _PLAIN).index(unit).load(_WORDS)
    scales = reinterpreted(stages.w_scale, gl.int32, [COUNT, _ROW_PAIRS, PER_ROW], _PLAIN)
    scales = scales.index(unit).load(gl.SliceLayout(1, OWN))
    return _decoded(words.to(gl.uint32, bitcast=True), scales.to(gl.uint32, bitcast=True), C)


@gluon.jit
def _decoded(words, scales, C: gl.constexpr):
    """Decodes words [128 threads, 4] with scales [32, words for four threads] to bf16 or E4M3 [64, 64], in registers as
    the left operand's; returns it, and of E4M3 the words of four."""
    PAIR: gl.constexpr = C.PAIR
    ZEROS: gl.constexpr = C.ZEROS
    PER_ROW: gl.constexpr = scales.shape[1]
    scales = scales[:, None, :].broadcast_to((32, 4, PER_ROW))
    a, b = gl.split(gl.reshape(words, (128, 2, 2)))  # [thread, q]
    scales = gl.reshape(scales, (128, PER_ROW) if PER_ROW > 1 else (128,))
    if PAIR == "w4a8":
        upper, lower = row_fields(scales)
        upper = gl.convert_layout(upper, a.type.layout, assert_trivial=True)
        lower = gl.convert_layout(lower, a.type.layout, assert_trivial=True)
        held = e4m3_words(a, b, upper, lower)
        both = e4m3_of(held)
        # w, g, t, q, j, h, l to rows (w, h, g) and columns (q, j, t, l)
        both = gl.permute(gl.reshape(both, (4, 8, 4, 2, 2, 2, 4)), (0, 5, 1, 3, 4, 2, 6))
    else:
        scale, sixteenth, other = pair_scales(scales, PER_ROW, PAIR, ZEROS)
        scale = gl.convert_layout(scale, a.type.layout, assert_trivial=True)
        sixteenth = gl.convert_layout(sixteenth, a.type.layout, assert_trivial=True)
        other = gl.convert_layout(other, a.type.layout, assert_trivial=True)
        both = pairs_of(a, b, scale, sixteenth, other, PAIR, ZEROS)
        # w, g, t, q, j, i, l, h to rows (w, h, g) and columns (q, j, i, t, l)
        both = gl.permute(gl.reshape(both, (4, 8, 4, 2, 2, 2, 2, 2)), (0, 7, 1, 3, 4, 5, 2, 6))
        held = both
    return gl.reshape(both, (_UNIT, _UNIT)), held


# ---- a program's tiles -----------------------------------------------------------------------------------------------


@gluon.jit
def _add(weights, stages, part, total, tail, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Issues the asynchronous product of one part, added to `total` and `tail`."""
    block = first_of(stages.x.index(part), TOKENS)
    total = warpgroup_mma(weights, block.permute((1, 0)), total, is_async=True)
    if TAIL > 0:
        if C.FOUR_BIT:
            weights = gl.convert_layout(weights, _fragment_layout(TAIL, C.PART_K // 4), assert_trivial=True)
        tail = warpgroup_mma(weights, stages.tail.index(part).permute((1, 0)), tail, is_async=True)
    return total, tail


@gluon.jit
def _done(total, tail, weights, others, IN_REGISTERS: gl.constexpr, TAIL: gl.constexpr):
    """Waits for the issued products. Weights in registers are named, so that they stay there until then: E4M3 as words,
    as Triton names no 8 bits."""
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
    """Computes and stores one tile; returns the next stage and phases.

    Two consumers that decode issue their products in order (as CUTLASS's ping-pong kernels do). Otherwise both would
    decode at the same time and then wait at the same time.
    """
    HEIGHT: gl.constexpr = C.BLOCK_N // C.CONSUMERS
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    PARTS: gl.constexpr = C.PARTS
    ORDERED: gl.constexpr = C.ORDERED
    stages, order, staging, target, where, WHICH = fixed
    expert, row, end, first = where
    stage, phase, order_phase = state
    total = gl.zeros((HEIGHT, TOKENS), gl.float32, product_layout(TOKENS, C.PART_K // 4))
    tail = gl.zeros((HEIGHT, SHORT), gl.float32, product_layout(SHORT, C.PART_K // 4))
    for _ in range(C.NUM_K):
        mbarrier.wait(stages.full.index(stage), phase)
        if not C.X_TMA:
            fence_async_shared()  # what threads have copied, for the tensor cores
        weights, held = _weights(stages, stage, 0, WHICH, C, _fragment_layout(TOKENS, C.PART_K // 4))
        others, others_held = weights, held
        if PARTS > 1:
            others, others_held = _weights(stages, stage, 1, WHICH, C, _fragment_layout(TOKENS, C.PART_K // 4))
        if ORDERED:
            mbarrier.wait(order.index(WHICH), order_phase)
        total, tail = _add(weights, stages, stage * PARTS, total, tail, C, TOKENS, TAIL)
        if PARTS > 1:
            total, tail = _add(others, stages, stage * PARTS + 1, total, tail, C, TOKENS, TAIL)
        if ORDERED:
            mbarrier.arrive(order.index(1 - WHICH))
            order_phase ^= 1
        total, tail = _done(total, tail, held, others_held, C.FOUR_BIT, TAIL)
        mbarrier.arrive(stages.empty.index(stage))
        stage, phase = advance(stage, phase, C.STAGES)
    finish(total, staging, target, expert, row, end, first, C)
    if TAIL > 0:
        finish(tail, staging, target, expert, row + TOKENS, end, first, C)
    return stage, phase, order_phase


@gluon.jit
def consume(own, WHICH: gl.constexpr, C: gl.constexpr):
    """Is consumer WHICH of C.CONSUMERS: computes its part of the weight rows of all of this program's tiles.

    own: (target of the results, epilogue staging buffers, the pipeline, the barriers that order two consumers).
    """
    target, staging, stages, order = own
    HEIGHT: gl.constexpr = C.BLOCK_N // C.CONSUMERS
    gl.static_assert(C.X_TMA or C.K % C.PART_K == 0)  # TMA alone reads zeros past K within a part
    state = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1 - WHICH)
    expert, row, end, column = next_tile(stages, (state[0], state[1]))
    while expert >= 0:
        first = column * C.BLOCK_N + WHICH * HEIGHT
        fixed = stages, order, staging.index(WHICH), target, (expert, row, end, first), WHICH
        if C.SCALED:
            state = by_height(scaled_tile, fixed, state, end - row, C)
        else:
            state = by_height(_tile, fixed, state, end - row, C)
        expert, row, end, column = next_tile(stages, (state[0], state[1]))
