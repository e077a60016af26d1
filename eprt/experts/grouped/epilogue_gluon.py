# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false, reportReturnType=false
"""The epilogue of `gemm_gluon`: row factors, bias and activation, and stores through a staging buffer in shared memory.

target: (source, x_scale, w_factor, bias, out, out_stride, out_skip) of `grouped_gemm_warp_specialized`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from eprt.experts.activation_triton import activated
from eprt.experts.grouped.gemm_triton import halves
from eprt.experts.grouped.pipeline_gluon import barrier, first_of


@gluon.jit
def finish(total, staging, target, expert, row, end, first, C: gl.constexpr):
    """Stores weight rows from `first` on of the tokens from `row` on, as many at a time as `staging` holds."""
    rows: gl.constexpr = total.shape[0]
    tokens: gl.constexpr = total.shape[1]
    if tokens > staging.shape[0]:
        # A thread has some of both.
        low, high = gl.split(gl.permute(gl.reshape(total, (rows, 2, tokens // 2)), (0, 2, 1)))
        finish(low, staging, target, expert, row, end, first, C)
        finish(high, staging, target, expert, row + tokens // 2, end, first, C)
    else:
        _finish_part(total, first_of(staging, tokens), target, expert, row, end, first, C)


@gluon.jit
def _finish_part(total, staging, target, expert, row, end, first, C: gl.constexpr):
    """Stores as many tokens as `staging` holds, through it."""
    parts: gl.constexpr = 2 if C.GATED else 1
    value = _results(total, target, expert, row, end, first, C, True)
    staging.permute((1, 0)).store(value.to(target[4].dtype.element_ty))
    _store(staging, target, expert, row, end, first // parts, C)


@gluon.jit
def finish_tokens(total, staging, target, expert, row, end, first, C: gl.constexpr):
    """Stores the tile's weight rows of 64 tokens from `row` on, as many columns at a time as `staging` [64, columns]
    holds."""
    parts: gl.constexpr = 2 if C.GATED else 1
    value = _results(total, target, expert, row, end, first, C, False).to(target[4].dtype.element_ty)
    _store_columns(value, staging, target, expert, row, end, first // parts, C)


@gluon.jit
def _store_columns(value, staging, target, expert, row, end, n, C: gl.constexpr):
    columns: gl.constexpr = value.shape[1]
    if columns > staging.shape[1]:
        # A thread has some of both.
        low, high = gl.split(gl.permute(gl.reshape(value, (value.shape[0], 2, columns // 2)), (0, 2, 1)))
        _store_columns(low, staging, target, expert, row, end, n, C)
        _store_columns(high, staging, target, expert, row, end, n + columns // 2, C)
    else:
        staging.store(value)
        _store(staging, target, expert, row, end, n, C)


@gluon.jit
def _results(total, target, expert, row, end, first, C: gl.constexpr, SWAP: gl.constexpr):
    """Returns `total` after row factors, bias and activation: [weight rows, tokens], or [tokens, weight rows] without
    SWAP."""
    parts: gl.constexpr = 2 if C.GATED else 1
    width: gl.constexpr = C.N // parts
    source, x_scale, w_factor, bias, _, _, _ = target
    if C.FP8 and not C.SCALED:
        m = row + gl.arange(0, total.shape[1], gl.SliceLayout(0, total.type.layout))
        read = m if source is None else gl.load(source + m, mask=m < end, other=0)
        total *= gl.load(x_scale + read, mask=m < end, other=0.0)[None, :]
    if C.GATED:
        gate, up = halves(total, SWAP)
    else:
        gate, up = total, total
    n = first // parts + gl.arange(0, gate.shape[1 - SWAP], gl.SliceLayout(SWAP, gate.type.layout))
    there = n < width
    if w_factor is not None:
        factor = w_factor + expert * C.N + n
        gate *= gl.expand_dims(gl.load(factor, mask=there, other=0.0), SWAP)
        if C.GATED:
            up *= gl.expand_dims(gl.load(factor + width, mask=there, other=0.0), SWAP)
    if bias is not None:
        own = bias + expert * C.N + n
        gate += gl.expand_dims(gl.load(own, mask=there, other=0.0), SWAP)
        if C.GATED:
            up += gl.expand_dims(gl.load(own + width, mask=there, other=0.0), SWAP)
    if C.FIRST:
        gate = activated(gate, up, C.GATED, C.ALPHA, C.BETA, C.LIMIT, C.CUBIC)
    return gate


@gluon.jit
def _store(staging, target, expert, row, end, first, C: gl.constexpr):
    """Copies `staging` [tokens, columns] to the results from token `row` and column `first` on, 16 bytes per thread."""
    columns: gl.constexpr = staging.shape[1]
    _, _, _, _, out, out_stride, out_skip = target
    barrier()
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])
    value = staging.load(STORE)
    n = first + gl.arange(0, columns, gl.SliceLayout(0, STORE))
    m = row + gl.arange(0, value.shape[0], gl.SliceLayout(1, STORE))
    begin = m.to(gl.int64) * out_stride + expert.to(gl.int64) * out_skip
    there = (m < end)[:, None] & (n < (C.N // 2 if C.GATED else C.N))[None, :]
    # The weighted sum reads the results next: they stay in L2, which weights, read once, would fill.
    KEPT: gl.constexpr = "" if C.FIRST else "evict_last"
    gl.store(out + (begin[:, None] + n[None, :]), value, mask=there, eviction_policy=KEPT)
