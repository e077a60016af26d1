# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The ring of stages of `gemm_gluon`, and the warps that fill it.

A stage has C.BLOCK_K columns of a tile's tokens and weights, in parts of BLOCK_K. `full` says that they are there, and
`empty` that all multipliers have read them. The copy engine brings weights, and tokens that lie in rows. Tokens that
are gathered, or lie in slabs, are copied by the threads. What either has copied arrives at `full` by itself.

Tiles take longer where an expert has more rows, so programs take one after another off the list. They ask here, and the
stage with which a tile begins says where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from eprt.experts.grouped.fp4 import MX_UNIT_SCALES, NV_UNIT_SCALES, UNIT, UNIT_WORDS
from eprt.experts.grouped.gemm_triton import position
from eprt.rounding import ceil_div, next_power_of_2

BLOCK_K = 64
LEAST_BLOCKS = 4  # of K: no shorter sum was tested
COPYING_WARPS = 4
# Registers of a thread that fetches: it copies up to 64 tokens, or more, or lets the copy engine do it.
_FEW_TOKENS, _MANY_TOKENS, _BY_ENGINE = 32, 56, 24

# Triton 3.6 has the first names, later ones the second.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_UNDERSCORED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))

_BLOCK_K = gl.constexpr(BLOCK_K)
_ROW_BYTES = gl.constexpr(BLOCK_K * 2)
_UNIT = gl.constexpr(UNIT)
_UNIT_WORDS = gl.constexpr(UNIT_WORDS)
WHERE = gl.constexpr(4)  # numbers: an expert, a row, the row after its last, an index along N
_LINE = 256  # words: as long as a block's side can be
SHARED = gl.constexpr(NVMMASharedLayout(128, 16, 2))  # of rows of BLOCK_K values
# Of words, as they lie in memory.
UNITS, SCALES = gl.constexpr(NVMMASharedLayout(0, 32, 3)), gl.constexpr(NVMMASharedLayout(0, 32, 2))


@dataclass(frozen=True)
class Cut:
    """What the kernel is compiled for, beside the kinds of its arguments.

    Attributes:
        PAIR: "bf16", "w4a16" or "nv4a16".
        N, K: rows of an expert's matrix (both parts, with padding) and columns.
        BLOCK_N: weight rows of a tile; FP4: 128, 192 or 256.  BLOCK_M: tokens of one, 16 to 256.
        BLOCK_K: columns of a stage, 64; FP4: 64 or 128.  STAGES: of the ring.
        X_TMA: the copy engine brings tokens.
        TAIL: 0, 16 or 32 tokens more.  HALVINGS, GROUP_M: see `gemm_triton.grouped_gemm`.
        LAUNCH_DEPENDENTS: see `sort_by_expert_triton.pdl_wait`.
        FIRST, GATED, ALPHA, BETA, LIMIT: see `activation_triton.constants`.
        FP4: weights have 4 bits.  UNIT_SCALES: words of a unit's scales.  UNIT_ROWS: rows of units that the copy engine
            brings of a tile.
        MULTIPLIERS: warpgroups that share BLOCK_N.  PARTS: of a stage.
        REGISTERS: of a thread that multiplies, and of one that fetches.
        NUM_N: tiles along N.  NUM_K: stages that a tile goes through.
        LEAST: tokens of the lowest tile, and of what the copy engine brings at once.
    """

    PAIR: str
    N: int
    K: int
    BLOCK_N: int
    BLOCK_M: int
    BLOCK_K: int
    X_TMA: bool
    TAIL: int
    HALVINGS: int
    GROUP_M: int
    STAGES: int
    LAUNCH_DEPENDENTS: bool
    FIRST: bool
    GATED: bool
    ALPHA: float
    BETA: float
    LIMIT: float
    FP4: bool = field(init=False)
    UNIT_SCALES: int = field(init=False)
    UNIT_ROWS: int = field(init=False)
    MULTIPLIERS: int = field(init=False)
    PARTS: int = field(init=False)
    REGISTERS: tuple[int, int] = field(init=False)
    NUM_N: int = field(init=False)
    NUM_K: int = field(init=False)
    LEAST: int = field(init=False)

    def __post_init__(self) -> None:
        multipliers = 2 if self.PAIR == "bf16" else self.BLOCK_N // UNIT
        fetching = _BY_ENGINE if self.X_TMA else _FEW_TOKENS if self.BLOCK_M <= 64 else _MANY_TOKENS
        # Fields, as Triton's cache knows a kernel by what they print.
        for name, value in (
            ("FP4", self.PAIR != "bf16"),
            ("UNIT_SCALES", NV_UNIT_SCALES if self.PAIR == "nv4a16" else MX_UNIT_SCALES),
            ("UNIT_ROWS", next_power_of_2(self.BLOCK_N // UNIT)),
            ("MULTIPLIERS", multipliers),
            ("PARTS", self.BLOCK_K // BLOCK_K),
            ("REGISTERS", (_rest_of_registers(multipliers, fetching), fetching)),
            ("NUM_N", ceil_div(self.N, self.BLOCK_N)),
            ("NUM_K", ceil_div(self.K, self.BLOCK_K)),
            ("LEAST", self.BLOCK_M >> self.HALVINGS),
        ):
            object.__setattr__(self, name, value)


def _rest_of_registers(multipliers: int, fetching: int) -> int:
    """What a thread that multiplies can have. A program starts with as many a thread as 65,536 allow, in eights; its
    warpgroups then share them otherwise."""
    groups = multipliers + 1
    all_of_them = 65536 // (groups * 128) // 8 * 8 * groups
    return (all_of_them - fetching) // multipliers // 8 * 8


def blocks_of(rows: torch.Tensor, count: int) -> Any:
    """[.., K] for the copy engine, in blocks of so many rows and BLOCK_K columns."""
    return TensorDescriptor.from_tensor(rows, [count, BLOCK_K], SHARED.value)


def words_of(units: torch.Tensor, blocks: int, rows: int, parts: int) -> Any:
    """int32 [L, rows of units x `blocks`, UNIT_WORDS] for the copy engine: of so many rows `parts` units."""
    lines = UNIT_WORDS // _LINE
    words = units.view(-1, blocks * lines, _LINE)
    return TensorDescriptor.from_tensor(words, [rows, parts * lines, _LINE], UNITS.value)


def scales_of(units: torch.Tensor, blocks: int, rows: int, parts: int) -> Any:
    """The same of int32 [L, rows of units x `blocks`, words of a unit's scales]."""
    width = units.shape[-1]
    return TensorDescriptor.from_tensor(units.view(-1, blocks * width), [rows, width * parts], SCALES.value)


@gluon.jit
def by_height(TILE: gl.constexpr, fixed, state, rows, C: gl.constexpr):
    """What TILE(fixed, state, C, TOKENS, TAIL) makes of `state` in the least height that holds so many rows."""
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
    wrapped = stage + 1 == STAGES
    return gl.where(wrapped, 0, stage + 1), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def first_of(block, TOKENS: gl.constexpr):
    """Its first TOKENS rows."""
    if block.shape[0] > TOKENS:
        block = block.slice(0, TOKENS, 0)
    return block


@gluon.jit
def memory_as(ring, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """The same memory, seen otherwise."""
    return ring._reinterpret(DTYPE, SHAPE, LAYOUT) if _UNDERSCORED else ring.reinterpret(DTYPE, SHAPE, LAYOUT)


@gluon.jit
def in_blocks(ring, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """The same memory as COUNT blocks of ROWS rows."""
    return memory_as(ring, gl.bfloat16, [COUNT, ROWS, _BLOCK_K], SHARED)


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
def _copy(block, x, offset, start, C: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns from `start` on; past K zeros, as the copy engine brings them."""
    k = gl.arange(0, _BLOCK_K, gl.SliceLayout(0, LAYOUT))
    there = (x + start) + (offset[:, None] + k[None, :])
    if C.K % C.BLOCK_K > 0:
        _copy_async(block, there, mask=start < C.K)
    else:
        _copy_async(block, there)


@gluon.jit
def _fetch_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    read, stages, where = fixed
    x, x_tiles, tail_tiles, source, w, w_scale, x_stride, x_skip = read
    w_ring, scale_ring, ring, tail_ring, full, empty, _ = stages
    expert, row, end, first = where
    stage, phase = state
    BLOCKS: gl.constexpr = TOKENS // C.LEAST
    ALL_BLOCKS: gl.constexpr = C.BLOCK_M // C.LEAST
    PARTS: gl.constexpr = C.PARTS
    UNITS_BYTES: gl.constexpr = C.UNIT_ROWS * PARTS * (_UNIT_WORDS + C.UNIT_SCALES) * 4
    WEIGHTS: gl.constexpr = UNITS_BYTES if C.FP4 else C.BLOCK_N * _ROW_BYTES
    EXPECTED: gl.constexpr = WEIGHTS + ((TOKENS + TAIL) * _ROW_BYTES * PARTS if C.X_TMA else 0)
    tokens = in_blocks(ring, C.STAGES * PARTS * ALL_BLOCKS, C.LEAST)
    if not C.X_TMA:
        begin, offset = _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS, LAYOUT)
        if TAIL > 0:
            tail_begin, tail_offset = _rows(x, source, expert, row + TOKENS, end, x_stride, x_skip, TAIL, LAYOUT)
    for index in range(C.NUM_K):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        there = full.index(stage)
        if C.X_TMA:
            barrier()  # all threads are past their wait, before what could make its phase come round again
        mbarrier.expect(there, EXPECTED)
        if C.FP4:
            _copy_tile(w, [first, index * w.block_shape[1], 0], there, w_ring.index(stage))
            _copy_tile(w_scale, [first, index * (PARTS * C.UNIT_SCALES)], there, scale_ring.index(stage))
        else:
            _copy_tile(w, [first, index * _BLOCK_K], there, w_ring.index(stage))
        for part in gl.static_range(PARTS):
            k = (index * PARTS + part) * _BLOCK_K
            if C.X_TMA:
                for block in gl.static_range(BLOCKS):
                    place = tokens.index((stage * PARTS + part) * ALL_BLOCKS + block)
                    _copy_tile(x_tiles, [row + block * C.LEAST, k], there, place)
                if TAIL > 0:
                    _copy_tile(tail_tiles, [row + TOKENS, k], there, tail_ring.index(stage * PARTS + part))
            else:
                _copy(first_of(ring.index(stage * PARTS + part), TOKENS), begin, offset, k, C, LAYOUT)
                if TAIL > 0:
                    _copy(tail_ring.index(stage * PARTS + part), tail_begin, tail_offset, k, C, LAYOUT)
        if not C.X_TMA:
            async_copy.mbarrier_arrive(there, increment_count=False)
        stage, phase = advance(stage, phase, C.STAGES)
    return stage, phase


@gluon.constexpr_function
def arrivals(cut):
    """At `full` for each stage: the copy engine's, and those of the threads that copy."""
    return 1 if cut.X_TMA else 1 + 32 * COPYING_WARPS


@gluon.jit
def _tell(stages, state, where):
    """Where the tile lies that begins at this stage. Those who multiply read it when the stage is full."""
    NUMBER: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    _, _, _, _, _, empty, told = stages
    stage, phase = state
    mbarrier.wait(empty.index(stage), phase ^ 1)
    for i in gl.static_range(WHERE):
        told.index(stage * WHERE + i).store(gl.full([1], where[i], gl.int32, NUMBER))
    barrier()


@gluon.jit
def where_next(stages, state):
    """What was told: (expert, first row, row after the expert's last, index along N); expert -1: no tile is left."""
    _, _, _, _, full, _, told = stages
    stage, phase = state
    mbarrier.wait(full.index(stage), phase)
    first = stage * WHERE
    return _number(told, first), _number(told, first + 1), _number(told, first + 2), _number(told, first + 3)


@gluon.jit
def _number(told, index):
    return gl.max(told.index(index).load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def _take(taken):
    """A tile that no program has: they begin with one each, and come back at different times."""
    return gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")


@gluon.jit
def fetch(read, stages, tiles, C: gl.constexpr):
    """read: (x, x_tiles, tail_tiles, source, w, w_scale, x_stride, x_skip) of `grouped_gemm_warp_specialized`.
    tiles: (entries, num_entries, taken) of it."""
    entries, num_entries, taken = tiles
    total = gl.load(num_entries) * C.NUM_N
    state = gl.to_tensor(0), gl.to_tensor(0)
    tile = gl.program_id(0)
    following = _take(taken)  # asked for a tile ahead
    while tile < total:
        expert, row, end, column = position(entries, tile, C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
        _tell(stages, state, (expert, row, end, column))
        if C.FP4:
            first = expert * ((C.N + _UNIT - 1) // _UNIT) + column * C.MULTIPLIERS
        else:
            first = expert * C.N + column * C.BLOCK_N
        where = expert, row, end, first
        state = by_height(_fetch_tile, (read, stages, where), state, end - row, C)
        tile = following
        if tile < total:
            following = _take(taken)
    _tell(stages, state, (-1, 0, 0, 0))
    _, _, _, _, full, _, _ = stages
    there = full.index(state[0])
    mbarrier.expect(there, 0)
    if not C.X_TMA:
        async_copy.mbarrier_arrive(there, increment_count=False)
    # Every program asks once in vain; after the last of them nobody does.
    if following == gl.maximum(total, gl.num_programs(0)) + gl.num_programs(0) - 1:
        gl.store(taken, 0)
