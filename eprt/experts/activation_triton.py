# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Activations in Triton: for the end of a GEMM, and over valid expert-major rows. Imported only where kernels run."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from eprt.config import Activation
from eprt.launching import CachedKernel
from eprt.rounding import ceil_div, next_power_of_2

BLOCK = 1024  # columns a program activates at a time
CTAS = 2048  # that share all experts' rows

# 1 / (1 + 2^(-x / ln 2)) by the instructions for it, each off by 2 units in the last place of float32 at most.
_SIGMOID = tl.constexpr("""{
    .reg .f32 t;
    mul.f32 t, $1, 0fBFB8AA3B;
    ex2.approx.ftz.f32 t, t;
    add.f32 t, t, 0f3F800000;
    rcp.approx.ftz.f32 $0, t;
}""")


@triton.jit
def _sigmoid(x):
    """Half the instructions of `tl.sigmoid`, which cares for denormals: at the end of a GEMM they aren't free."""
    return tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def activated(
    gate, up, GATED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, CUBIC: tl.constexpr,
):  # fmt: skip
    """`eprt.config.Activation` in float32 by its `numbers`."""
    if not GATED:
        positive = tl.maximum(gate, 0.0)
        return positive * positive
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    inner = gate
    if CUBIC > 0:
        inner = gate + CUBIC * gate * gate * gate
    return gate * _sigmoid(ALPHA * inner) * (up + BETA)


def constants(activation: Activation | None) -> dict[str, bool | float]:
    """Returns the constants of `activated`; None computes nothing."""
    gated, numbers = (False, Activation().numbers) if activation is None else (activation.gated, activation.numbers)
    return {"GATED": gated, **dict(zip(("ALPHA", "BETA", "LIMIT", "CUBIC"), numbers, strict=True))}


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["counts"])
def _activate_rows(
    wide, narrow, counts, M, I: tl.constexpr, BLOCK: tl.constexpr,
    GATED: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, CUBIC: tl.constexpr,
):  # fmt: skip
    """Grid: experts x programs that share an expert's rows x blocks of columns."""
    expert = tl.program_id(0).to(tl.int64)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    for row in range(tl.program_id(1), tl.load(counts + expert), tl.num_programs(1)):
        read = wide + (expert * M + row) * (2 * I if GATED else I) + column
        gate = tl.load(read, mask=column < I).to(tl.float32)
        up = gate
        if GATED:
            up = tl.load(read + I, mask=column < I).to(tl.float32)
        value = activated(gate, up, GATED, ALPHA, BETA, LIMIT, CUBIC)
        tl.store(narrow + (expert * M + row) * I + column, value.to(narrow.dtype.element_ty), mask=column < I)


def activate_rows(activation: Activation, wide: torch.Tensor, counts: torch.Tensor, narrow: torch.Tensor) -> None:
    """Activates rows below counts [L] of wide [L, M, parts * I] into narrow [L, M, I], in float32; all contiguous."""
    L, M, I = narrow.shape
    block = min(BLOCK, next_power_of_2(I))
    columns = ceil_div(I, block)
    grid = L, min(M, max(1, CTAS // (L * columns))), columns
    _prepared(wide.device, wide.dtype, narrow.dtype, I, block, activation)(grid, wide, narrow, counts, M)


@cache
def _prepared(
    device: torch.device, source: torch.dtype, target: torch.dtype, I: int, block: int, activation: Activation
) -> CachedKernel:
    return CachedKernel(
        _activate_rows,
        device,
        (source, target, torch.int32, 2),
        {"I": I, "BLOCK": block, **constants(activation)},
    )
