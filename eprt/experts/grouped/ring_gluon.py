# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The ring of stages of `gemm_gluon`, and the warpgroup that fills it.

A stage has BLOCK_K columns of a tile's tokens, and of its weights where those are bf16. `full` says that they are
there, and `empty` that both multipliers have read them. The copy engine brings weights, and tokens that lie in rows;
its bytes arrive at `full` by themselves. Tokens that are gathered, or lie in slabs, are copied by the threads, which
wait for a copy, and announce it, two blocks later.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from eprt.experts.grouped.gemm_triton import position, turn
from eprt.rounding import ceil_div

BLOCK_K = 64

# Triton 3.6 has the first names, later ones the second.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
_copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
_copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
_UNDERSCORED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))

_BLOCK_K = gl.constexpr(BLOCK_K)
_ROW_BYTES = gl.constexpr(BLOCK_K * 2)
_LAG = gl.constexpr(2)  # copies that stay under way while the one before them is announced
SHARED = gl.constexpr(NVMMASharedLayout(128, 16, 2))  # of rows of BLOCK_K values


@dataclass(frozen=True)
class Cut:
    """What the kernel is compiled for, beside the kinds of its arguments.

    Attributes:
        PAIR: "bf16", "w4a16" or "nv4a16".
        N, K: rows of an expert's matrix (both parts, with padding) and columns.
        BLOCK_N: weight rows of a tile; FP4: 128.  BLOCK_M: tokens of one, 64, 128 or 256.  Both: at most 128 x 256.
        TAIL: 0, 16 or 32 tokens more.  HALVINGS, GROUP_M: see `gemm_triton.grouped_gemm`.
        STAGES: of the ring, more than two.
        FIRST, GATED, ALPHA, BETA, LIMIT: see `activation_triton.constants`.
        REGISTERS: of a thread that multiplies, and of one that fetches.
        FP4: weights have 4 bits.  NUM_N: tiles along N.  LEAST: tokens of the lowest tile, and of what the copy engine
            brings at once.
    """

    PAIR: str
    N: int
    K: int
    BLOCK_N: int
    BLOCK_M: int
    TAIL: int
    HALVINGS: int
    GROUP_M: int
    STAGES: int
    FIRST: bool
    GATED: bool
    ALPHA: float
    BETA: float
    LIMIT: float
    REGISTERS: tuple[int, int]
    FP4: bool = field(init=False)
    NUM_N: int = field(init=False)
    LEAST: int = field(init=False)

    def __post_init__(self) -> None:
        # Fields, as Triton's cache knows a kernel by what they print.
        for name, value in (
            ("FP4", self.PAIR != "bf16"),
            ("NUM_N", ceil_div(self.N, self.BLOCK_N)),
            ("LEAST", self.BLOCK_M >> self.HALVINGS),
        ):
            object.__setattr__(self, name, value)


def blocks_of(rows: torch.Tensor, count: int) -> Any:
    """[.., K] for the copy engine, in blocks of so many rows and BLOCK_K columns."""
    return TensorDescriptor.from_tensor(rows, [count, BLOCK_K], NVMMASharedLayout(128, 16, 2))


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
def in_blocks(ring, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """The same memory as COUNT blocks of ROWS rows."""
    if _UNDERSCORED:
        blocks = ring._reinterpret(gl.bfloat16, [COUNT, ROWS, _BLOCK_K], SHARED)
    else:
        blocks = ring.reinterpret(gl.bfloat16, [COUNT, ROWS, _BLOCK_K], SHARED)
    return blocks


@gluon.jit
def _back(stage, by, STAGES: gl.constexpr):
    earlier = stage - by
    return gl.where(earlier < 0, earlier + STAGES, earlier)


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
def _copy(block, x, offset, start, LAYOUT: gl.constexpr):
    k = gl.arange(0, _BLOCK_K, gl.SliceLayout(0, LAYOUT))
    _copy_async(block, (x + start) + (offset[:, None] + k[None, :]))


@gluon.jit
def _announce(full, stage, pred):
    """That a stage's copies, waited for by each thread for its own, are there, for the tensor cores' proxy as well."""
    fence_async_shared()
    barrier()  # all threads' fences come before the one arrival
    mbarrier.arrive(full.index(stage), pred=pred)


@gluon.jit
def _fetch_tile(fixed, state, C: gl.constexpr, TOKENS: gl.constexpr, TAIL: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    read, stages, where = fixed
    x, x_tiles, tail_tiles, source, w, x_stride, x_skip = read
    w_ring, ring, tail_ring, full, empty = stages
    expert, row, end, w_row = where
    stage, phase = state
    BY_ENGINE: gl.constexpr = x_tiles is not None
    BLOCKS: gl.constexpr = TOKENS // C.LEAST
    tokens = in_blocks(ring, C.STAGES * (C.BLOCK_M // C.LEAST), C.LEAST)
    if not BY_ENGINE:
        begin, offset = _rows(x, source, expert, row, end, x_stride, x_skip, TOKENS, LAYOUT)
        if TAIL > 0:
            tail_begin, tail_offset = _rows(x, source, expert, row + TOKENS, end, x_stride, x_skip, TAIL, LAYOUT)
    EXPECTED: gl.constexpr = ((0 if C.FP4 else C.BLOCK_N) + (TOKENS + TAIL if BY_ENGINE else 0)) * _ROW_BYTES
    for index in range(C.K // _BLOCK_K):
        k = index * _BLOCK_K
        mbarrier.wait(empty.index(stage), phase ^ 1)
        there = full.index(stage)
        if EXPECTED > 0:
            barrier()  # all warps are past their wait, before what could make its phase come round again
            mbarrier.expect(there, EXPECTED)
        if not C.FP4:
            _copy_tile(w, [w_row, k], there, w_ring.index(stage))
        if BY_ENGINE:
            for part in gl.static_range(BLOCKS):
                block = tokens.index(stage * (C.BLOCK_M // C.LEAST) + part)
                _copy_tile(x_tiles, [row + part * C.LEAST, k], there, block)
            if TAIL > 0:
                _copy_tile(tail_tiles, [row + TOKENS, k], there, tail_ring.index(stage))
        else:
            _copy(first_of(ring.index(stage), TOKENS), begin, offset, k, LAYOUT)
            if TAIL > 0:
                _copy(tail_ring.index(stage), tail_begin, tail_offset, k, LAYOUT)
            async_copy.commit_group()
            async_copy.wait_group(_LAG)
            _announce(full, _back(stage, _LAG, C.STAGES), index >= _LAG)
        stage, phase = advance(stage, phase, C.STAGES)
    if not BY_ENGINE:
        async_copy.wait_group(0)
        for earlier in gl.static_range(_LAG):
            _announce(full, _back(stage, _LAG - earlier, C.STAGES), True)
    return stage, phase


@gluon.constexpr_function
def arrivals(cut, by_engine):
    """At `full` for each stage: the copy engine's, and the announcement of the threads that copy."""
    return 1 if cut.FP4 or by_engine else 2


@gluon.jit
def fetch(x, x_tiles, tail_tiles, source, w, stages, items, num_items, x_stride, x_skip, C: gl.constexpr):
    """w: a descriptor of blocks [BLOCK_N, BLOCK_K]; FP4 weights aren't fetched here."""
    read = x, x_tiles, tail_tiles, source, w, x_stride, x_skip
    total = gl.load(num_items) * C.NUM_N
    state = gl.to_tensor(0), gl.to_tensor(0)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, row, end, column = position(items, turn(tile, total), C.NUM_N, C.BLOCK_M, C.GROUP_M, C.TAIL)
        where = expert, row, end, expert * C.N + column * C.BLOCK_N
        state = by_height(_fetch_tile, (read, stages, where), state, end - row, C)
