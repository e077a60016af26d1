# ruff: noqa: ANN001, ANN201  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The grouped GEMM where an expert has a hundred rows or more, on Hopper: warps with roles.

What `gemm_triton.grouped_gemm` computes, bit by bit, with weights x tokens alone. There all warps of a program fetch,
decode, multiply and wait together. Here a program is alone on its multiprocessor and has three warpgroups: two multiply
half of a tile's weight rows each (`multiply_gluon`), a third brings them what they share, into a ring of stages in
shared memory (`ring_gluon`). While a product of 4-bit weights is under way, a multiplier decodes the weights of the
next, and between its products those of the other go on.

Gluon's kernels can't be interpreted: tests on a GPU hold this one to the other.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from eprt.experts.grouped.multiply_gluon import multiply
from eprt.experts.grouped.ring_gluon import BLOCK_K, SHARED, arrivals, barrier, fetch

_BLOCK_K = gl.constexpr(BLOCK_K)


@gluon.jit
def grouped_gemm_by_roles(
    x, x_tiles, tail_tiles, source, w, w_scale, w_factor, bias, out, items, num_items,
    x_stride, x_skip, out_stride, out_skip, C: gl.constexpr,
):  # fmt: skip
    """Arguments as those of `gemm_triton.grouped_gemm` under the same names. One program a multiprocessor.

    x_tiles, tail_tiles: x [rows, K] as descriptors of blocks [C.LEAST, BLOCK_K] and [C.TAIL, BLOCK_K], or None.
    w: words of 4-bit weights, or a descriptor of blocks [C.BLOCK_N, BLOCK_K].
    C: `ring_gluon.Cut`.
    """
    STAGES: gl.constexpr = C.STAGES
    ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C.BLOCK_M, _BLOCK_K], SHARED)
    w_ring, tail_ring = ring, ring
    if not C.FP4:
        w_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C.BLOCK_N, _BLOCK_K], SHARED)
    if C.TAIL > 0:
        tail_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C.TAIL, _BLOCK_K], SHARED)
    # Of each multiplier, for results on their way out: what the rings of the tables' tiles leave.
    columns: gl.constexpr = C.BLOCK_N // 4 if C.GATED else C.BLOCK_N // 2
    width: gl.constexpr = out.dtype.element_ty.primitive_bitwidth
    tokens: gl.constexpr = (32768 if C.FP4 else 65536) // (columns * width)
    DESK: gl.constexpr = gl.NVMMASharedLayout(64 if columns * width == 512 else 128, width, 2)
    desks = gl.allocate_shared_memory(out.dtype.element_ty, [2, tokens, columns], DESK)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=arrivals(C, x_tiles is not None))
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    barrier()
    stages = w_ring, ring, tail_ring, full, empty
    gl.warp_specialize(
        [
            (multiply, (w, w_scale, w_factor, bias, out, desks, stages, items, num_items, out_stride, out_skip, 0, C)),
            (multiply, (w, w_scale, w_factor, bias, out, desks, stages, items, num_items, out_stride, out_skip, 1, C)),
            (fetch, (x, x_tiles, tail_tiles, source, w, stages, items, num_items, x_stride, x_skip, C)),
        ],
        [4, 4],
        [C.REGISTERS[0], C.REGISTERS[1]],
    )
