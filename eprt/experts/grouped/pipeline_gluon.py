# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The multistage pipeline of `gemm_gluon`, and its producer warps.

A stage holds C.BLOCK_K columns of a tile's tokens and weights, in parts of C.PART_K, which are 128 bytes of a token.
Its `full` barrier completes when they have arrived, its `empty` barrier when every consumer has read them. Weights, and
tokens in consecutive rows, come by TMA. Tokens that are gathered, or lie in the masked layout, are copied by the
producer's threads. Either copy arrives at `full` by itself.

Tiles of experts with more rows take longer, so the scheduler is dynamic: a program's producer claims each next tile
from an atomic counter. The stage in which a tile begins also holds the tile's scheduler entry, for the consumers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from eprt.experts.grouped.constants_gluon import BLOCK_K, SHARED, SHARED_8
from eprt.experts.grouped.four_bit import UNIT, UNIT_WORDS
from eprt.experts.grouped.gemm_triton import position
from eprt.weights import FP8_BLOCK

PRODUCER_WARPS = 4
# Triton 3.6 has the first names, later ones the second.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_async_copy = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_UNDERSCORED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))

_ROW_BYTES = gl.constexpr(BLOCK_K * 2)
_UNIT = gl.constexpr(UNIT)
_UNIT_WORDS = gl.constexpr(UNIT_WORDS)
_FP8_BLOCK = gl.constexpr(FP8_BLOCK)
TILE_INFO = gl.constexpr(4)  # int32 per tile: expert, first row, row after the expert's last, index along N


class Pipeline(NamedTuple):
    """The circular buffers of all stages in shared memory, and their barriers.

    Attributes:
        w, w_scale, x, tail: weights, their scales (of 4 bits; of a block: for gate and up, or one), tokens, tokens of
            the tail.
        x_scale, tail_scale: scales of those tokens, where FP8 tokens have one per part.
        full, empty: one barrier per stage.
        tile_info: TILE_INFO numbers per stage, valid where a tile begins.
    """

    w: Any
    w_scale: Any
    x: Any
    tail: Any
    x_scale: Any
    tail_scale: Any
    full: Any
    empty: Any
    tile_info: Any


@gluon.jit
def by_height(TILE: gl.constexpr, fixed, state, rows, C: gl.constexpr):
    """Returns TILE(fixed, state, C, TOKENS, TAIL) for the narrowest tile that holds `rows` rows."""
    if C.TAIL > 0 and (rows > C.BLOCK_M and rows <= C.BLOCK_M + C.TAIL):
        state = TILE(fixed, state, C, C.BLOCK_M, C.TAIL)
    elif C.HALVINGS > 1 and rows <= C.BLOCK_M // 4:
        state = TILE(fixed, state, C, C.BLOCK_M // 4, 0)
    elif C.HALVINGS > 0 and rows <= C.BLOCK_M // 2:
        state = TILE(fixed, state, C, C.BLOCK_M // 2, 0)
    else:
        state = TILE(fixed, state, C, C.BLOCK_M, 0)
    return state


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Returns the next stage of the circular buffer, and its barriers' phase."""
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def first_of(block, TOKENS: gl.constexpr):
    """Returns the first TOKENS rows of a shared-memory block."""
    if block.shape[0] > TOKENS:
        block = block.slice(0, TOKENS, 0)
    return block


@gluon.jit
def reinterpreted(memory, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the same shared memory with another dtype, shape and layout."""
    return memory._reinterpret(DTYPE, SHAPE, LAYOUT) if _UNDERSCORED else memory.reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def in_blocks(memory, COUNT: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr):
    """Returns the same shared memory as COUNT blocks of ROWS rows."""
    PART_K: gl.constexpr = C.PART_K
    if C.FP8:
        blocks = reinterpreted(memory, gl.float8e4nv, [COUNT, ROWS, PART_K], SHARED_8)
    else:
        blocks = reinterpreted(memory, gl.bfloat16, [COUNT, ROWS, PART_K], SHARED)
    return blocks


@gluon.jit
def _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns (base pointer, offsets of TOKENS rows). Rows past the end repeat the last; theirs isn't stored."""
    m = gl.minimum(gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), end - 1 - row)
    begin = x
    if source is None:
        begin += row.to(gl.int64) * x_stride + expert.to(gl.int64) * x_skip
    else:
        m = gl.load(source + (row + m))
    return begin, m * x_stride


@gluon.jit
def _copy_rows(block, x, offset, start, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Copies columns from `start` on, as TMA would: zeros past K."""
    k = gl.arange(0, C.PART_K, gl.SliceLayout(0, LAYOUT))
    there = (x + start) + (offset[:, None] + k[None, :])
    if C.K % C.BLOCK_K > 0:
        _async_copy(block, there, mask=start < C.K)
    else:
        _async_copy(block, there)


@gluon.jit
def _scales(x_scale, source, row, end, C: gl.constexpr, TOKENS: gl.constexpr):
    """Returns pointers to the first scale of each of TOKENS tokens. Rows past the end repeat the last."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    m = gl.minimum(row + gl.arange(0, TOKENS, LAYOUT), end - 1)
    read = m if source is None else gl.load(source + m)
    return x_scale + read * C.NUM_K


@gluon.jit
def _block_scales(w_scale, expert, first, C: gl.constexpr):
    """Returns pointers to the first scales of gate and up, or of each 128 rows, for the tile from weight row `first` of
    all experts on. All of its gate rows share one, as do up rows."""
    PARTS: gl.constexpr = 2 if C.GATED else 1
    BLOCKS: gl.constexpr = (C.N // PARTS + _FP8_BLOCK - 1) // _FP8_BLOCK
    block = gl.minimum((first - expert * C.N) // PARTS // _FP8_BLOCK, BLOCKS - 1)
    part = gl.arange(0, 2 if C.GATED else C.PIECES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    if C.PIECES > PARTS:
        block, part = gl.minimum(block + part, BLOCKS - 1), 0
    return w_scale + ((expert * PARTS + part) * BLOCKS + block) * C.NUM_K


@gluon.jit
def _fetch_weights(w, w_scale, stages, stage, there, first, index, C: gl.constexpr):
    """Issues the TMA loads of one stage's weights, of 4 bits with their scales."""
    if C.FOUR_BIT:
        _tma_load(w, [first, index * w.block_shape[1], 0], there, stages.w.index(stage))
        _tma_load(w_scale, [first, index * w_scale.block_shape[1]], there, stages.w_scale.index(stage))
    else:
        _tma_load(w, [first, index * C.PART_K], there, stages.w.index(stage))


@gluon.jit
def _fetch_rows(
    x_tiles, tail_tiles, blocks, stages, stage, there, row, index, C: gl.constexpr, TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """Issues the TMA loads of one stage's tokens, TOKENS from `row` on and TAIL more. `blocks`: those of all stages."""
    PARTS: gl.constexpr = C.PARTS
    ALL_BLOCKS: gl.constexpr = C.BLOCK_M // C.LEAST
    for part in gl.static_range(PARTS):
        k = (index * PARTS + part) * C.PART_K
        for block in gl.static_range(TOKENS // C.LEAST):
            place = blocks.index((stage * PARTS + part) * ALL_BLOCKS + block)
            _tma_load(x_tiles, [row + block * C.LEAST, k], there, place)
        if TAIL > 0:
            _tma_load(tail_tiles, [row + TOKENS, k], there, stages.tail.index(stage * PARTS + part))


@gluon.jit
def _copy_tokens(
    rows, tail_rows, stages, stage, index, C: gl.constexpr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr,
    TAIL: gl.constexpr,
):  # fmt: skip
    """As `_fetch_rows`, by the producer's threads: of `_rows`."""
    PARTS: gl.constexpr = C.PARTS
    for part in gl.static_range(PARTS):
        k = (index * PARTS + part) * C.PART_K
        _copy_rows(first_of(stages.x.index(stage * PARTS + part), TOKENS), rows[0], rows[1], k, C, LAYOUT)
        if TAIL > 0:
            _copy_rows(stages.tail.index(stage * PARTS + part), tail_rows[0], tail_rows[1], k, C, LAYOUT)


@gluon.jit
def _produce_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    """Loads one tile, stage by stage; returns the next stage and phase."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, C.PART_K // 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    read, stages, where = fixed
    x, x_tiles, tail_tiles, source, x_scale, w, w_scale, x_stride, x_skip = read
    expert, row, end, first = where
    stage, phase = state
    SHORT: gl.constexpr = TAIL if TAIL > 0 else 16
    UNITS_BYTES: gl.constexpr = C.UNIT_ROWS * (C.BLOCK_K // _UNIT) * (_UNIT_WORDS + C.UNIT_SCALES) * 4
    WEIGHTS: gl.constexpr = UNITS_BYTES if C.FOUR_BIT else C.BLOCK_N * _ROW_BYTES
    EXPECTED: gl.constexpr = WEIGHTS + ((TOKENS + TAIL) * _ROW_BYTES * C.PARTS if C.X_TMA else 0)
    blocks = in_blocks(stages.x, C.STAGES * C.PARTS * (C.BLOCK_M // C.LEAST), C.LEAST, C)
    if not C.X_TMA:
        rows = _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS, LAYOUT)
        tail_rows = _rows(x, source, expert, row + TOKENS, end, x_stride, x_skip, SHORT, LAYOUT)
    if C.SCALED:
        block_scales = _block_scales(w_scale, expert, first, C)
        scales = _scales(x_scale, source, row, end, C, TOKENS)
        tail_scales = _scales(x_scale, source, row + TOKENS, end, C, SHORT)
    for index in range(C.NUM_K):
        mbarrier.wait(stages.empty.index(stage), phase ^ 1)
        there = stages.full.index(stage)
        if C.X_TMA:
            barrier()  # all threads are past their wait, before what could make its phase come round again
        mbarrier.expect(there, EXPECTED)
        _fetch_weights(w, w_scale, stages, stage, there, first, index, C)
        if C.X_TMA:
            _fetch_rows(x_tiles, tail_tiles, blocks, stages, stage, there, row, index, C, TOKENS, TAIL)
        else:
            _copy_tokens(rows, tail_rows, stages, stage, index, C, LAYOUT, TOKENS, TAIL)
        if C.SCALED:
            _async_copy(stages.w_scale.index(stage), block_scales + index)
            _async_copy(first_of(stages.x_scale.index(stage), TOKENS), scales + index)
            if TAIL > 0:
                _async_copy(stages.tail_scale.index(stage), tail_scales + index)
        if C.COPIES:
            async_copy.mbarrier_arrive(there, increment_count=False)
        stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase


@gluon.constexpr_function
def arrivals(C):
    """Returns the arrivals per stage that `full` expects: TMA's one, and one per thread that copies."""
    return 1 + 32 * producer_warps(C) if C.COPIES else 1


@gluon.constexpr_function
def producer_warps(C):
    """Returns the number of producer warps: one where tokens come by TMA."""
    return 1 if C.X_TMA else PRODUCER_WARPS


@gluon.jit
def _publish_tile(stages, state, where):
    """Writes the scheduler entry of the tile that begins at this stage. Consumers read it when the stage is full."""
    SCALAR: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    stage, phase = state
    mbarrier.wait(stages.empty.index(stage), phase ^ 1)
    for i in gl.static_range(TILE_INFO):
        stages.tile_info.index(stage * TILE_INFO + i).store(gl.full([1], where[i], gl.int32, SCALAR))
    barrier()


@gluon.jit
def next_tile(stages, state):
    """Returns the published entry: (expert, first row, row after the expert's last, index along N). Expert -1 means
    that no tile is left."""
    stage, phase = state
    mbarrier.wait(stages.full.index(stage), phase)
    info, first = stages.tile_info, stage * TILE_INFO
    return _scalar(info, first), _scalar(info, first + 1), _scalar(info, first + 2), _scalar(info, first + 3)


@gluon.jit
def _scalar(tile_info, index):
    return gl.max(tile_info.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _claim_tile(tile_counter):
    """Returns the next tile that no program has claimed; the first `num_programs` are one per program."""
    return gl.num_programs(0) + gl.atomic_add(tile_counter, 1, sem="relaxed")


@gluon.jit
def produce(read, stages, tiles, C: gl.constexpr):
    """Is the producer: claims tiles and loads them, until none is left.

    read: (x, x_tiles, tail_tiles, source, x_scale, w, w_scale, x_stride, x_skip) of `grouped_gemm_warp_specialized`.
    tiles: (entries, num_entries, tile_counter) of it.
    """
    entries, num_entries, tile_counter = tiles
    total = gl.load(num_entries) * C.NUM_N
    state = gl.to_tensor(0), gl.to_tensor(0)
    tile = gl.program_id(0)
    following = _claim_tile(tile_counter)  # claimed one tile ahead
    while tile < total:
        expert, row, end, column = position(entries, tile, C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
        _publish_tile(stages, state, (expert, row, end, column))
        if C.FOUR_BIT:
            first = expert * ((C.N + _UNIT - 1) // _UNIT) + column * C.CONSUMERS
        else:
            first = expert * C.N + column * C.BLOCK_N
        where = expert, row, end, first
        state = by_height(_produce_tile, (read, stages, where), state, end - row, C)
        tile = following
        if tile < total:
            following = _claim_tile(tile_counter)
    _publish_tile(stages, state, (-1, 0, 0, 0))
    there = stages.full.index(state[0])
    mbarrier.expect(there, 0)
    if C.COPIES:
        async_copy.mbarrier_arrive(there, increment_count=False)
    # Every program claims once in vain; the last of those claims resets the counter for the next GEMM.
    if following == gl.maximum(total, gl.num_programs(0)) + gl.num_programs(0) - 1:
        gl.store(tile_counter, 0)
