# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The grouped GEMM of 4-bit weights where an expert has hundreds of rows, on Hopper: warps with roles.

What `gemm_triton.grouped_gemm` computes, bit by bit, with weights x tokens alone. There all warps of a program fetch,
decode, multiply and wait together. Here a program is alone on its multiprocessor and has three warpgroups: two decode
and multiply 64 rows of weights each, a third copies the tokens of both into a ring of stages in shared memory. While a
product is under way, a multiplier decodes the weights of the next, and between its products those of the other go on.

Of a stage `full` says that its tokens are there, and `empty` that both multipliers have read them. A multiplier's words
come from global memory, a block ahead of their decoding, across tiles as well: at a tile's end the next one's first
block is decoded already. wgmma reads its left operand from registers until it is waited for, so two sets of them take
turns, and each wait names both (`_step`); tests/upstream reads the machine code for it.

Gluon's kernels can't be interpreted: tests on a GPU hold this one to the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.fp4 import MX_UNIT_SCALES, NV_UNIT_SCALES, UNIT, UNIT_WORDS
from eprt.experts.grouped.fp4_triton import pair_scales, pairs_of, rest_of
from eprt.experts.grouped.gemm_triton import halves, position

ROWS = 128  # of weights, of a program's tile
BLOCK_K = 64
LEAST_BLOCKS = 4  # of K: so many are under way before a tile's first product

# Triton 3.6 has the first names, later ones the second.
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared

_UNIT = gl.constexpr(UNIT)
_UNIT_WORDS = gl.constexpr(UNIT_WORDS)
_MX_UNIT_SCALES = gl.constexpr(MX_UNIT_SCALES)
_NV_UNIT_SCALES = gl.constexpr(NV_UNIT_SCALES)
_ROWS = gl.constexpr(ROWS)
_BLOCK_K = gl.constexpr(BLOCK_K)
_LEAST_BLOCKS = gl.constexpr(LEAST_BLOCKS)
_LAG = gl.constexpr(2)  # copies that stay under way while the one before them is announced
# What a thread has of a unit: its words, and of scales one word (MXFP4) or two.
_WORDS = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
_SCALES = gl.constexpr(gl.BlockedLayout([1, 2], [32, 1], [4, 1], [1, 0]))
_THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.constexpr_function
def _product_layout(tokens):
    """64 weight rows x tokens, float32, of one warpgroup."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 16])


@gluon.constexpr_function
def _fragment_layout(tokens):
    """Its left operand; the same for any number of tokens."""
    return gl.DotOperandLayout(0, _product_layout(tokens), 2)


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _back(stage, by, STAGES: gl.constexpr):
    earlier = stage - by
    return gl.where(earlier < 0, earlier + STAGES, earlier)


@gluon.jit
def _part(ring, stage, TOKENS: gl.constexpr, ROOM: gl.constexpr):
    """The first TOKENS rows of a stage."""
    slot = ring.index(stage)
    if TOKENS < ROOM:
        slot = slot.slice(0, TOKENS, 0)
    return slot


# ---- the warpgroup that fetches tokens -------------------------------------------------------------------------


@gluon.jit
def _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """(from where, offsets of TOKENS rows). Those past the end repeat the last: what comes of them isn't stored."""
    m = gl.minimum(gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), end - 1 - row)
    begin = x
    if source is None:
        begin += row.to(gl.int64) * x_stride + expert.to(gl.int64) * x_skip
    else:
        m = gl.load(source + (row + m))
    return begin, m * x_stride


@gluon.jit
def _copy(ring, stage, x, offset, start, TOKENS: gl.constexpr, ROOM: gl.constexpr, LAYOUT: gl.constexpr):
    k = gl.arange(0, _BLOCK_K, gl.SliceLayout(0, LAYOUT))
    _copy_async(_part(ring, stage, TOKENS, ROOM), (x + start) + (offset[:, None] + k[None, :]))


@gluon.jit
def _announce(full, stage, pred):
    """That a stage's copies, waited for by each thread for its own, are there, for the tensor cores' proxy as well."""
    fence_async_shared()
    _barrier()  # all threads' fences come before the one arrival
    mbarrier.arrive(full.index(stage), pred=pred)


@gluon.jit
def _fetch_tile(
    x, source, x_stride, x_skip, stages, expert, row, end, stage, phase,
    K: gl.constexpr, M: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ring, tail_ring, full, empty = stages
    begin, offset = _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS, LAYOUT)
    if TAIL > 0:
        tail_begin, tail_offset = _rows(x, source, expert, row + TOKENS, end, x_stride, x_skip, TAIL, LAYOUT)
    for k in range(K // _BLOCK_K):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        _copy(ring, stage, begin, offset, k * _BLOCK_K, TOKENS, M, LAYOUT)
        if TAIL > 0:
            _copy(tail_ring, stage, tail_begin, tail_offset, k * _BLOCK_K, TAIL, TAIL, LAYOUT)
        async_copy.commit_group()
        async_copy.wait_group(_LAG)
        _announce(full, _back(stage, _LAG, STAGES), k >= _LAG)
        stage, phase = _advance(stage, phase, STAGES)
    async_copy.wait_group(0)
    for earlier in gl.static_range(_LAG):
        _announce(full, _back(stage, _LAG - earlier, STAGES), True)
    return stage, phase


@gluon.jit
def _fetch(
    x, source, ring, tail_ring, full, empty, items, num_items, x_stride, x_skip,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    HALVINGS: gl.constexpr,
):  # fmt: skip
    NUM_N: gl.constexpr = (N + _ROWS - 1) // _ROWS
    stages = ring, tail_ring, full, empty
    total = gl.load(num_items) * NUM_N
    stage, phase = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, end, _ = position(items, tile, NUM_N, M, GROUP_M, TAIL)
        rows = end - row
        if TAIL > 0 and (rows > M and rows <= M + TAIL):
            stage, phase = _fetch_tile(
                x, source, x_stride, x_skip, stages, expert, row, end, stage, phase, K, M, M, TAIL, STAGES
            )
        elif HALVINGS > 1 and rows <= M // 4:
            stage, phase = _fetch_tile(
                x, source, x_stride, x_skip, stages, expert, row, end, stage, phase, K, M, M // 4, 0, STAGES
            )
        elif HALVINGS > 0 and rows <= M // 2:
            stage, phase = _fetch_tile(
                x, source, x_stride, x_skip, stages, expert, row, end, stage, phase, K, M, M // 2, 0, STAGES
            )
        else:
            stage, phase = _fetch_tile(
                x, source, x_stride, x_skip, stages, expert, row, end, stage, phase, K, M, M, 0, STAGES
            )


# ---- the warpgroups that multiply --------------------------------------------------------------------------------


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
def _step(
    weights, words, scales, total, tail, w, w_scale, stages, unit, next_unit, k, stage, phase,
    M: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    NV: gl.constexpr,
):  # fmt: skip
    """Multiply a block's `weights`; meanwhile decode the next one's `words`, and read those of block k."""
    ring, tail_ring, full, empty = stages
    mbarrier.wait(full.index(stage), phase)
    total = warpgroup_mma(weights, _part(ring, stage, TOKENS, M).permute((1, 0)), total, is_async=True)
    if TAIL > 0:
        same = gl.convert_layout(weights, _fragment_layout(TAIL), assert_trivial=True)
        tail = warpgroup_mma(same, tail_ring.index(stage).permute((1, 0)), tail, is_async=True)
    after = _decoded(words, scales, _fragment_layout(TOKENS), NV)
    words, scales = _words(w, w_scale, unit, next_unit, k, BLOCKS, NV)
    if TAIL > 0:
        total, tail, weights, after = warpgroup_mma_wait(0, [total, tail, weights, after])
    else:
        total, weights, after = warpgroup_mma_wait(0, [total, weights, after])
    mbarrier.arrive(empty.index(stage))
    stage, phase = _advance(stage, phase, STAGES)
    return total, tail, after, words, scales, stage, phase


@gluon.jit
def _finish(
    total, target, expert, row, end, first,
    N: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr,
    LIMIT: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """64 weight rows from `first` on of the tokens from `row` on. WIDE: through shared memory, for whole 16 bytes."""
    parts: gl.constexpr = 2 if GATED else 1
    width: gl.constexpr = N // parts
    w_factor, bias, out, out_stride, out_skip = target
    if GATED:
        gate, up = halves(total, True)
    else:
        gate, up = total, total
    height: gl.constexpr = gate.shape[0]
    LAYOUT: gl.constexpr = gate.type.layout
    n = first // parts + gl.arange(0, height, gl.SliceLayout(1, LAYOUT))
    there = n < width
    factor = w_factor + expert * N + n
    gate *= gl.load(factor, mask=there, other=0.0)[:, None]
    if GATED:
        up *= gl.load(factor + width, mask=there, other=0.0)[:, None]
    if bias is not None:
        own = bias + expert * N + n
        gate += gl.load(own, mask=there, other=0.0)[:, None]
        if GATED:
            up += gl.load(own + width, mask=there, other=0.0)[:, None]
    if FIRST:
        gate = activated(gate, up, GATED, ALPHA, BETA, LIMIT)
    value = gate.to(out.dtype.element_ty)
    if WIDE:
        STORE: gl.constexpr = gl.BlockedLayout([8, 1], [height // 8, 256 // height], [1, 4], [0, 1])
        value = gl.convert_layout(value, STORE)
    else:
        STORE: gl.constexpr = LAYOUT
    n = first // parts + gl.arange(0, height, gl.SliceLayout(1, STORE))
    m = row + gl.arange(0, value.shape[1], gl.SliceLayout(0, STORE))
    begin = m.to(gl.int64) * out_stride + expert.to(gl.int64) * out_skip
    gl.store(out + (begin[None, :] + n[:, None]), value, mask=(m < end)[None, :] & (n < width)[:, None])


@gluon.jit
def _multiply_tile(
    even, ahead, w, w_scale, stages, target, where, stage, phase,
    N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    NV: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr,
    LIMIT: gl.constexpr,
):  # fmt: skip
    """A tile: its first block is decoded (`even`), the words of the two after it read (`ahead`, even blocks' first).
    Returns the same of the next."""
    BLOCKS: gl.constexpr = K // _BLOCK_K
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    words0, scales0, words1, scales1 = ahead
    expert, row, end, first, unit, next_unit = where
    even = gl.convert_layout(even, _fragment_layout(TOKENS), assert_trivial=True)
    total = gl.zeros((_UNIT, TOKENS), gl.float32, _product_layout(TOKENS))
    tail = gl.zeros((_UNIT, SHORT), gl.float32, _product_layout(SHORT))
    for k in range(0, BLOCKS // 2 * 2, 2):
        total, tail, odd, words1, scales1, stage, phase = _step(
            even, words1, scales1, total, tail, w, w_scale, stages, unit, next_unit, k + 3, stage, phase,
            M, TOKENS, TAIL, BLOCKS, STAGES, NV,
        )  # fmt: skip
        total, tail, even, words0, scales0, stage, phase = _step(
            odd, words0, scales0, total, tail, w, w_scale, stages, unit, next_unit, k + 4, stage, phase,
            M, TOKENS, TAIL, BLOCKS, STAGES, NV,
        )  # fmt: skip
    if BLOCKS % 2 == 1:
        following = gl.to_tensor(BLOCKS + 2)
        total, tail, odd, words1, scales1, stage, phase = _step(
            even, words1, scales1, total, tail, w, w_scale, stages, unit, next_unit, following, stage, phase,
            M, TOKENS, TAIL, BLOCKS, STAGES, NV,
        )  # fmt: skip
        even = odd
        words0, scales0, words1, scales1 = words1, scales1, words0, scales0
    _finish(total, target, expert, row, end, first, N, FIRST, GATED, ALPHA, BETA, LIMIT, True)
    if TAIL > 0:
        _finish(tail, target, expert, row + TOKENS, end, first, N, FIRST, GATED, ALPHA, BETA, LIMIT, False)
    even = gl.convert_layout(even, _fragment_layout(_UNIT), assert_trivial=True)
    return even, (words0, scales0, words1, scales1), stage, phase


@gluon.jit
def _multiply(
    w, w_scale, w_factor, bias, out, ring, tail_ring, full, empty, items, num_items, out_stride, out_skip,
    WHICH: gl.constexpr, N: gl.constexpr, K: gl.constexpr, M: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, HALVINGS: gl.constexpr, NV: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """The 64 rows WHICH of every tile of this program."""
    NUM_N: gl.constexpr = (N + _ROWS - 1) // _ROWS
    BLOCKS: gl.constexpr = K // _BLOCK_K
    UNITS: gl.constexpr = (N + _UNIT - 1) // _UNIT
    gl.static_assert(K % _BLOCK_K == 0 and BLOCKS >= _LEAST_BLOCKS)
    target, stages = (w_factor, bias, out, out_stride, out_skip), (ring, tail_ring, full, empty)
    total = gl.load(num_items) * NUM_N
    start = gl.program_id(0)
    if start < total:
        expert, row, end, column = position(items, start, NUM_N, M, GROUP_M, TAIL)
        unit = (expert * UNITS + column * 2 + WHICH) * BLOCKS
        words0, scales0 = _words(w, w_scale, unit, unit, gl.to_tensor(0), BLOCKS, NV)
        words1, scales1 = _words(w, w_scale, unit, unit, gl.to_tensor(1), BLOCKS, NV)
        even = _decoded(words0, scales0, _fragment_layout(_UNIT), NV)
        words0, scales0 = _words(w, w_scale, unit, unit, gl.to_tensor(2), BLOCKS, NV)
        ahead = words0, scales0, words1, scales1
        stage, phase = gl.to_tensor(0), gl.to_tensor(0)
        for tile in range(start, total, gl.num_programs(0)):
            following = gl.minimum(tile + gl.num_programs(0), total - 1)
            expert_, row_, end_, column_ = position(items, following, NUM_N, M, GROUP_M, TAIL)
            unit_ = (expert_ * UNITS + column_ * 2 + WHICH) * BLOCKS
            where = expert, row, end, column * _ROWS + WHICH * _UNIT, unit, unit_
            rows = end - row
            if TAIL > 0 and (rows > M and rows <= M + TAIL):
                even, ahead, stage, phase = _multiply_tile(
                    even, ahead, w, w_scale, stages, target, where, stage, phase,
                    N, K, M, M, TAIL, STAGES, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                )  # fmt: skip
            elif HALVINGS > 1 and rows <= M // 4:
                even, ahead, stage, phase = _multiply_tile(
                    even, ahead, w, w_scale, stages, target, where, stage, phase,
                    N, K, M, M // 4, 0, STAGES, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                )  # fmt: skip
            elif HALVINGS > 0 and rows <= M // 2:
                even, ahead, stage, phase = _multiply_tile(
                    even, ahead, w, w_scale, stages, target, where, stage, phase,
                    N, K, M, M // 2, 0, STAGES, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                )  # fmt: skip
            else:
                even, ahead, stage, phase = _multiply_tile(
                    even, ahead, w, w_scale, stages, target, where, stage, phase,
                    N, K, M, M, 0, STAGES, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                )  # fmt: skip
            expert, row, end, column, unit = expert_, row_, end_, column_, unit_


# ---- the kernel --------------------------------------------------------------------------------------------------


@gluon.jit
def grouped_gemm_by_roles(
    x, source, w, w_scale, w_factor, bias, out, items, num_items, x_stride, x_skip, out_stride, out_skip,
    N: gl.constexpr, K: gl.constexpr, BLOCK_M: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, HALVINGS: gl.constexpr, NV: gl.constexpr, FIRST: gl.constexpr, GATED: gl.constexpr,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Arguments as those of `gemm_triton.grouped_gemm` under the same names. One program a multiprocessor.

    BLOCK_M: 64, 128 or 256.  TAIL: 0, 16 or 32.  STAGES: more than `_LAG`.
    REGISTERS: of a thread that multiplies, and of one that fetches.
    """
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_M, _BLOCK_K], SHARED)
    tail_ring = ring
    if TAIL > 0:
        tail_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TAIL, _BLOCK_K], SHARED)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    _barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (
                    w, w_scale, w_factor, bias, out, ring, tail_ring, full, empty, items, num_items, out_stride,
                    out_skip, 0, N, K, BLOCK_M, TAIL, STAGES, GROUP_M, HALVINGS, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                ),
            ),
            (
                _multiply,
                (
                    w, w_scale, w_factor, bias, out, ring, tail_ring, full, empty, items, num_items, out_stride,
                    out_skip, 1, N, K, BLOCK_M, TAIL, STAGES, GROUP_M, HALVINGS, NV, FIRST, GATED, ALPHA, BETA, LIMIT,
                ),
            ),
            (
                _fetch,
                (
                    x, source, ring, tail_ring, full, empty, items, num_items, x_stride, x_skip,
                    N, K, BLOCK_M, TAIL, STAGES, GROUP_M, HALVINGS,
                ),
            ),
        ],
        [4, 4],
        [REGISTERS[0], REGISTERS[1]],
    )  # fmt: skip
