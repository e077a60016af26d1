# ruff: noqa: ANN001, ANN201  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The grouped GEMM of bf16 and 4-bit weights on Hopper where an expert has some rows: warps with roles.

What `gemm_triton.grouped_gemm` computes, bit by bit, with weights x tokens alone. There all warps of a program fetch,
decode, multiply and wait together. Here a program is alone on its multiprocessor: two to four of its warpgroups
multiply a part of a tile's weight rows each (`consumer_gluon`), further warps bring them weights and tokens, into a
ring of stages in shared memory (`pipeline_gluon`). While one multiplier decodes or waits, the others go on.

Triton interprets none of this: tests on a GPU hold this kernel to the other one, and on a CPU a stand-in for as much of
Gluon as is used here runs its lines, and holds what roles do in shared memory to the barriers between them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from eprt.experts.grouped.consumer_gluon import multiply
from eprt.experts.grouped.pipeline_gluon import (
    BLOCK_K,
    COPYING_WARPS,
    SCALES,
    SHARED,
    UNITS,
    WHERE,
    arrivals,
    barrier,
    fetch,
)
from eprt.experts.sort_by_expert_triton import pdl_wait

_BLOCK_K = gl.constexpr(BLOCK_K)
_COPYING_WARPS = gl.constexpr(COPYING_WARPS)


@gluon.jit
def grouped_gemm_warp_specialized(
    x, x_tiles, tail_tiles, source, w, w_scale, w_factor, bias, out, entries, num_entries, taken,
    x_stride, x_skip, out_stride, out_skip, C: gl.constexpr,
):  # fmt: skip
    """Arguments as those of `gemm_triton.grouped_gemm` under the same names. One program a multiprocessor.

    x_tiles, tail_tiles: x [rows, K] as descriptors of blocks [C.LEAST, BLOCK_K] and [C.TAIL, BLOCK_K], or None.
    w, w_scale: descriptors of what a stage has of them (`pipeline_gluon.words_of`, `scales_of`), or of blocks
        [C.BLOCK_N, BLOCK_K] and None.
    taken: int32 [1], zero, which it is again afterwards: tiles that programs took beyond their first.
    C: `pipeline_gluon.Cut`.
    """
    STAGES: gl.constexpr = C.STAGES
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * C.PARTS, C.BLOCK_M, _BLOCK_K], SHARED)
    scale_ring, tail_ring = ring, ring
    if C.FP4:
        units: gl.constexpr = w.block_shape
        scales: gl.constexpr = w_scale.block_shape
        w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, units[0], units[1], units[2]], UNITS)
        scale_ring = gl.allocate_shared_memory(gl.int32, [STAGES, scales[0], scales[1]], SCALES)
    else:
        w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C.BLOCK_N, _BLOCK_K], SHARED)
    if C.TAIL > 0:
        tail_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * C.PARTS, C.TAIL, _BLOCK_K], SHARED)
    # Of each multiplier, for results on their way out: what the rings of the tables' tiles leave.
    height: gl.constexpr = C.BLOCK_N // C.MULTIPLIERS
    columns: gl.constexpr = height // 2 if C.GATED else height
    width: gl.constexpr = out.dtype.element_ty.primitive_bitwidth
    tokens: gl.constexpr = (32768 if C.FP4 else 65536) // (columns * width)
    DESK: gl.constexpr = gl.NVMMASharedLayout(64 if columns * width == 512 else 128, width, 2)
    desks = gl.allocate_shared_memory(out.dtype.element_ty, [C.MULTIPLIERS, tokens, columns], DESK)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=arrivals(C))
        mbarrier.init(empty.index(stage), count=C.MULTIPLIERS)
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for which in gl.static_range(2):
        mbarrier.init(turns.index(which), count=1)
    told = gl.allocate_shared_memory(gl.int32, [STAGES * WHERE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    fence_async_shared()
    pdl_wait(C.LAUNCH_DEPENDENTS)
    barrier()
    stages = w_ring, scale_ring, ring, tail_ring, full, empty, told
    target = w_factor, bias, out, out_stride, out_skip
    read = x, x_tiles, tail_tiles, source, w, w_scale, x_stride, x_skip
    tiles = entries, num_entries, taken
    own = target, desks, stages, turns
    FETCHING: gl.constexpr = 1 if C.X_TMA else _COPYING_WARPS
    if C.MULTIPLIERS == 2:
        gl.warp_specialize(
            [(multiply, (own, 0, C)), (multiply, (own, 1, C)), (fetch, (read, stages, tiles, C))],
            [4, FETCHING],
            [C.REGISTERS[0], C.REGISTERS[1]],
        )
    elif C.MULTIPLIERS == 3:
        gl.warp_specialize(
            [
                (multiply, (own, 0, C)),
                (multiply, (own, 1, C)),
                (multiply, (own, 2, C)),
                (fetch, (read, stages, tiles, C)),
            ],
            [4, 4, FETCHING],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (own, 0, C)),
                (multiply, (own, 1, C)),
                (multiply, (own, 2, C)),
                (multiply, (own, 3, C)),
                (fetch, (read, stages, tiles, C)),
            ],
            [4, 4, 4, FETCHING],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )
