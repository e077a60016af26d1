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

from eprt.experts.grouped.epilogue_gluon import finish, finish_tokens
from eprt.experts.grouped.four_bit import ROW_PAIRS, UNIT
from eprt.experts.grouped.four_bit_triton import pair_scales, pairs_of, settled
from eprt.experts.grouped.mxfp4_e4m3_triton import e4m3_of, e4m3_words, row_fields
from eprt.experts.grouped.pipeline_gluon import (
    advance,
    by_height,
    first_of,
    in_blocks,
    next_tile,
    reinterpreted,
)
from eprt.experts.grouped.weights import INTERLEAVE

_UNIT = gl.constexpr(UNIT)
_INTERLEAVE = gl.constexpr(INTERLEAVE)
_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_ROW_PAIRS = gl.constexpr(ROW_PAIRS)
_PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
# A thread's share of a unit: four of its words.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))


@gluon.constexpr_function
def _product_layout(tokens, depth=16):
    """Returns the layout of one warpgroup's float32 accumulator: weight rows x tokens. `depth`: columns of K that one
    instruction takes, 32 bytes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, depth])


@gluon.constexpr_function
def _fragment_layout(tokens, depth):
    """Returns the register layout of the left operand, 32 bits of neighbouring columns after each other; it is the same
    for any number of tokens."""
    return gl.DotOperandLayout(0, _product_layout(tokens, depth), depth // 8)


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
    total = gl.zeros((HEIGHT, TOKENS), gl.float32, _product_layout(TOKENS, C.PART_K // 4))
    tail = gl.zeros((HEIGHT, SHORT), gl.float32, _product_layout(SHORT, C.PART_K // 4))
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


# ---- FP8 with a scale per 128 columns ------------------------------------------------------------------------------


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
    """Adds one part's product, 64 tokens x the tile's weight rows, to `total` after its scales: `scales` of tokens,
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
def _scaled_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Does as `_tile`. Tensor cores sum 128 columns, which are then scaled and added in float32 while the other
    consumer's products go on."""
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
    total = gl.zeros((_UNIT, COLUMNS), gl.float32, _product_layout(COLUMNS, 32))
    more = total
    tail = gl.zeros((_UNIT, SHORT), gl.float32, _product_layout(SHORT, 32))
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
    LAYOUT: gl.constexpr = _product_layout(TOKENS, 32)
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    stages, _, staging, target, where, WHICH = fixed
    expert, row, end, first = where
    stage, phase, order_phase = state
    total = gl.zeros((_UNIT, TOKENS), gl.float32, LAYOUT)
    more = total
    tail = gl.zeros((_UNIT, SHORT), gl.float32, _product_layout(SHORT, 32))
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
    finish(total, staging, target, expert, row, end, first, C)
    if C.PIECES > 1:
        finish(more, staging, target, expert, row, end, first + _UNIT, C)


@gluon.jit
def consume(own, WHICH: gl.constexpr, C: gl.constexpr):
    """Is consumer WHICH of C.CONSUMERS: computes its part of the weight rows of all of this program's tiles.

    own: (target of the results, epilogue staging buffers, the pipeline, the barriers that order two consumers).
    """
    target, staging, stages, order = own
    HEIGHT: gl.constexpr = C.BLOCK_N // C.CONSUMERS
    gl.static_assert(C.K % C.PART_K == 0)
    state = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(1 - WHICH)
    expert, row, end, column = next_tile(stages, (state[0], state[1]))
    while expert >= 0:
        first = column * C.BLOCK_N + WHICH * HEIGHT
        fixed = stages, order, staging.index(WHICH), target, (expert, row, end, first), WHICH
        if C.SCALED:
            state = by_height(_scaled_tile, fixed, state, end - row, C)
        else:
            state = by_height(_tile, fixed, state, end - row, C)
        expert, row, end, column = next_tile(stages, (state[0], state[1]))
