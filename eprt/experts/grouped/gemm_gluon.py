# ruff: noqa: ANN001, ANN201  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""A warp-specialized grouped GEMM of bf16, 4-bit and FP8 weights for Hopper, for experts with more than a few rows.

It computes what `gemm_triton.grouped_gemm` computes, bit by bit, always as weights x tokens. It is a persistent kernel
with a dynamic tile scheduler and one program per SM. Producer warps load weights and tokens into a multistage pipeline
in shared memory (`pipeline_gluon`). Two to four consumer warpgroups each multiply a part of the tile's weight rows
(`consumer_gluon`): while one decodes or waits, the others go on.

Triton's interpreter doesn't run Gluon. Tests on a GPU hold this kernel to the other one. On a CPU a stand-in for the
part of Gluon used here runs its lines and checks every access to shared memory against the barriers that order it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from eprt.experts.grouped.constants_gluon import SCALES, SHARED, SHARED_8, UNITS
from eprt.experts.grouped.consumer_gluon import consume
from eprt.experts.grouped.pipeline_gluon import (
    TILE_INFO,
    Pipeline,
    arrivals,
    barrier,
    produce,
    producer_warps,
)
from eprt.experts.sort_by_expert_triton import pdl_wait


@gluon.jit
def grouped_gemm_warp_specialized(
    x, x_tiles, tail_tiles, source, x_scale, w, w_scale, w_factor, bias, out, entries, num_entries, tile_counter,
    x_stride, x_skip, out_stride, out_skip, C: gl.constexpr,
):  # fmt: skip
    """Takes the arguments of `gemm_triton.grouped_gemm` under the same names, and these:

    x_tiles, tail_tiles: TMA descriptors of x [rows, K], in blocks [C.LEAST, C.PART_K] and [C.TAIL, C.PART_K], or None.
    w, w_scale: TMA descriptors of one stage's weights and scales (`constants_gluon.weight_blocks`, `scale_blocks`); of
        bf16 and FP8, of blocks [C.BLOCK_N, C.PART_K]; scales are then a pointer, or None.
    tile_counter: int32 [1], counts the tiles that programs claim beyond their first. Zero before and after.
    C: `constants_gluon.KernelConstants`.
    """
    STAGES: gl.constexpr = C.STAGES
    DTYPE: gl.constexpr = x.dtype.element_ty
    ROWS: gl.constexpr = SHARED_8 if C.FP8 else SHARED
    x_buffer = gl.allocate_shared_memory(DTYPE, [STAGES * C.PARTS, C.BLOCK_M, C.PART_K], ROWS)
    scale_buffer, tail_buffer = x_buffer, x_buffer
    if C.FOUR_BIT:
        units: gl.constexpr = w.block_shape
        scales: gl.constexpr = w_scale.block_shape
        w_buffer = gl.allocate_shared_memory(gl.int32, [STAGES, units[0], units[1], units[2]], UNITS)
        scale_buffer = gl.allocate_shared_memory(gl.int32, [STAGES, scales[0], scales[1]], SCALES)
    else:
        w_buffer = gl.allocate_shared_memory(DTYPE, [STAGES, C.BLOCK_N, C.PART_K], ROWS)
    if C.TAIL > 0:
        tail_buffer = gl.allocate_shared_memory(DTYPE, [STAGES * C.PARTS, C.TAIL, C.PART_K], ROWS)
    x_scales, tail_scales = x_buffer, x_buffer
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    if C.SCALED:
        scale_buffer = gl.allocate_shared_memory(gl.float32, [STAGES, 2 if C.GATED else C.PIECES], LINE)
        x_scales = gl.allocate_shared_memory(gl.float32, [STAGES, C.BLOCK_M], LINE)
        if C.TAIL > 0:
            tail_scales = gl.allocate_shared_memory(gl.float32, [STAGES, C.TAIL], LINE)
    # Epilogue staging buffers, one per consumer warpgroup. They use the shared memory that the pipeline leaves free.
    height: gl.constexpr = C.BLOCK_N // C.CONSUMERS // C.PIECES
    columns: gl.constexpr = height // 2 if C.GATED else height
    width: gl.constexpr = out.dtype.element_ty.primitive_bitwidth
    tokens: gl.constexpr = (32768 if C.FOUR_BIT or C.SCALED else 65536) // (columns * width)
    STAGING: gl.constexpr = gl.NVMMASharedLayout(64 if columns * width == 512 else 128, width, 2)
    staging = gl.allocate_shared_memory(out.dtype.element_ty, [C.CONSUMERS, tokens, columns], STAGING)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=arrivals(C))
        mbarrier.init(empty.index(stage), count=C.CONSUMERS)
    order = empty
    if C.ORDERED:
        order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for which in gl.static_range(2):
            mbarrier.init(order.index(which), count=1)
    tile_info = gl.allocate_shared_memory(gl.int32, [STAGES * TILE_INFO, 1], LINE)
    fence_async_shared()
    pdl_wait(C.LAUNCH_DEPENDENTS)
    barrier()
    stages = Pipeline(w_buffer, scale_buffer, x_buffer, tail_buffer, x_scales, tail_scales, full, empty, tile_info)
    target = source, x_scale, w_factor, bias, out, out_stride, out_skip
    read = x, x_tiles, tail_tiles, source, x_scale, w, w_scale, x_stride, x_skip
    tiles = entries, num_entries, tile_counter
    own = target, staging, stages, order
    PRODUCERS: gl.constexpr = producer_warps(C)
    if C.CONSUMERS == 2:
        gl.warp_specialize(
            [(consume, (own, 0, C)), (consume, (own, 1, C)), (produce, (read, stages, tiles, C))],
            [4, PRODUCERS],
            [C.REGISTERS[0], C.REGISTERS[1]],
        )
    elif C.CONSUMERS == 3:
        gl.warp_specialize(
            [
                (consume, (own, 0, C)),
                (consume, (own, 1, C)),
                (consume, (own, 2, C)),
                (produce, (read, stages, tiles, C)),
            ],
            [4, 4, PRODUCERS],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (own, 0, C)),
                (consume, (own, 1, C)),
                (consume, (own, 2, C)),
                (consume, (own, 3, C)),
                (produce, (read, stages, tiles, C)),
            ],
            [4, 4, 4, PRODUCERS],
            [C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[0], C.REGISTERS[1]],
        )
