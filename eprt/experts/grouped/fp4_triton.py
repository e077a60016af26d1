# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false
"""MXFP4 and NVFP4 weights, decoded to bf16 where the tensor cores take their left operand: in registers."""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from eprt.experts.grouped.fp4 import (
    C_FROM_A,
    MX_SCALE_BITS,
    MX_UNIT_SCALES,
    NV_SCALE_BITS,
    NV_SCALE_ONES,
    NV_UNIT_SCALES,
    PAIR_BITS,
    SCALE_TURN,
    TURNS_A,
    TURNS_B,
    UNIT,
    UNIT_WORDS,
)

_TIMES = "{{.reg .b16 l, h; .reg .b32 d; mov.b32 {{l, h}}, $2; mov.b32 d, {{{0}, {0}}}; mul.bf16x2 $0, $1, d;}}"
_SELECT = tl.constexpr(f"lop3.b32 $0, $1, $2, {C_FROM_A}, 0xE4;")  # bits of the third choose between the others
_TIMES_LOW = tl.constexpr(_TIMES.format("l"))
_TIMES_HIGH = tl.constexpr(_TIMES.format("h"))
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # PTX is for GPUs only
_UNIT = tl.constexpr(UNIT)
_UNIT_WORDS = tl.constexpr(UNIT_WORDS)
_MX_UNIT_SCALES = tl.constexpr(MX_UNIT_SCALES)
_NV_UNIT_SCALES = tl.constexpr(NV_UNIT_SCALES)
_PAIR_BITS = tl.constexpr(PAIR_BITS)
_MX_SCALE_BITS = tl.constexpr(MX_SCALE_BITS)
_NV_SCALE_BITS = tl.constexpr(NV_SCALE_BITS)
_NV_SCALE_ONES = tl.constexpr(NV_SCALE_ONES)
_SCALE_TURN = tl.constexpr(SCALE_TURN)
_C_FROM_A = tl.constexpr(C_FROM_A)
_TURNS_A = tl.constexpr(TURNS_A)
_TURNS_B = tl.constexpr(TURNS_B)


@triton.jit
def _turned(word, TURN: tl.constexpr):
    """`word` uint32 turned left."""
    if TURN > 0:
        word = (word << TURN) | (word >> (32 - TURN))
    return word


@triton.jit
def rest_of(a, b):
    """Word C."""
    if _INTERPRETED:
        return ((a ^ b) & _C_FROM_A) ^ b
    # LLVM would make two instructions of it.
    return tl.inline_asm_elementwise(_SELECT, "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _times(pair, scales, HIGH: tl.constexpr):
    """Two bf16 in 32 bits times the bf16 in the low or high half of `scales`; their few bits need no rounding."""
    if _INTERPRETED:
        scale = ((scales if HIGH else scales << 16) & 0xFFFF0000).to(tl.float32, bitcast=True)
        low = ((pair << 16).to(tl.float32, bitcast=True) * scale).to(tl.uint32, bitcast=True)
        high = ((pair & 0xFFFF0000).to(tl.float32, bitcast=True) * scale).to(tl.uint32, bitcast=True)
        return (low >> 16) | (high & 0xFFFF0000)
    asm: tl.constexpr = _TIMES_HIGH if HIGH else _TIMES_LOW
    return tl.inline_asm_elementwise(asm, "=r,r,r", [pair, scales], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _pairs(word, rest, scale, other, TURNS: tl.constexpr, HIGH: tl.constexpr):
    """bf16 [.., j, i, l] of A or B, `word`, and of C, `rest`: uint32. Scales of j = 0, and the `other`."""
    p00 = _times(_turned(word, TURNS[0]) & _PAIR_BITS, scale, HIGH)
    p01 = _times(_turned(word, TURNS[1]) & _PAIR_BITS, scale, HIGH)
    p10 = _times(_turned(word, TURNS[2]) & _PAIR_BITS, other, HIGH)
    p11 = _times(_turned(rest, TURNS[3]) & _PAIR_BITS, other, HIGH)
    pairs = tl.join(tl.join(p00, p10), tl.join(p01, p11))
    return tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def pairs_of(a, b, c, scale, other):
    """bf16 [.., j, i, l, h] of words A, B and C."""
    return tl.join(_pairs(a, c, scale, other, _TURNS_A, False), _pairs(b, c, scale, other, _TURNS_B, True))


@triton.jit
def pair_scales(scales, NV: tl.constexpr):
    """Scales for j = 0 and for j = 1, [.., q], of a row's words: [..] of MXFP4, [.., q] of NVFP4."""
    if NV:
        scale = scales & _NV_SCALE_BITS | _NV_SCALE_ONES
        other = _turned(scales, _SCALE_TURN) & _NV_SCALE_BITS | _NV_SCALE_ONES
    else:
        scale = tl.join(scales & _MX_SCALE_BITS, _turned(scales, _SCALE_TURN) & _MX_SCALE_BITS)
        other = scale
    return scale, other


@triton.jit
def _every_t(scales):
    """[.., w, g, q] for all threads of a row: [.., w, g, t, q]."""
    shape: tl.constexpr = scales.shape
    return tl.broadcast_to(tl.expand_dims(scales, 4), (shape[0], shape[1], shape[2], shape[3], 4, shape[4]))


@triton.jit
def _values(words, scales, BN: tl.constexpr, BK: tl.constexpr, NV: tl.constexpr):
    """bf16 [64 * BN, 64 * BK] of units: uint32 words [BK, BN, UNIT_WORDS], scales [BK, BN, words of a unit's]."""
    a, b = tl.split(tl.reshape(words, (BK, BN, 4, 8, 4, 2, 2)))  # w, g, t, q
    if NV:
        scale, other = pair_scales(_every_t(tl.reshape(scales, (BK, BN, 4, 8, 2))), NV)
    else:
        scale, other = pair_scales(tl.reshape(scales, (BK, BN, 4, 8)), NV)
        scale, other = _every_t(scale), _every_t(other)
    both = pairs_of(a, b, rest_of(a, b), scale, other)
    # [unit, unit, w, g, t, q, j, i, l, h] to rows (unit, w, h, g) and columns (unit, q, j, i, t, l)
    return tl.reshape(tl.permute(both, (1, 2, 9, 3, 0, 5, 6, 7, 4, 8)), (BN * _UNIT, BK * _UNIT))


@triton.jit
def fp4_expert(w, w_scale, expert, N: tl.constexpr, K: tl.constexpr, NV: tl.constexpr):
    """Where an expert's words begin, and its scales'."""
    UNIT_SCALES: tl.constexpr = _NV_UNIT_SCALES if NV else _MX_UNIT_SCALES
    units = expert.to(tl.int64) * ((N + _UNIT - 1) // _UNIT * ((K + _UNIT - 1) // _UNIT))
    return w + units * _UNIT_WORDS, w_scale + units * UNIT_SCALES


@triton.jit
def fp4_block(
    w, w_scale, column, start, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NV: tl.constexpr
):
    """Weights [BLOCK_N, BLOCK_K] of one expert, MXFP4 or NVFP4, from `column` and `start` on. What lies past its rows
    and columns is finite: other weights, or the room after the last."""
    BN: tl.constexpr = BLOCK_N // _UNIT
    BK: tl.constexpr = BLOCK_K // _UNIT
    cols: tl.constexpr = (K + _UNIT - 1) // _UNIT
    n = column // _UNIT + tl.arange(0, BN)[None, :, None]
    k = start // _UNIT + tl.arange(0, BK)[:, None, None]
    unit = n * cols + k
    words = tl.load(w + unit * _UNIT_WORDS + tl.arange(0, _UNIT_WORDS)[None, None, :])
    UNIT_SCALES: tl.constexpr = _NV_UNIT_SCALES if NV else _MX_UNIT_SCALES
    scales = tl.load(w_scale + unit * UNIT_SCALES + tl.arange(0, UNIT_SCALES)[None, None, :])
    return _values(words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True), BN, BK, NV)


@triton.jit
def settled(total):
    """The same float32 values, once the tensor cores have written them: what they read from registers until then may be
    written again. Without it Triton 3.6 lets the next block's values overwrite those still being read."""
    if not _INTERPRETED:
        total = tl.inline_asm_elementwise("", "=f,0", [total], tl.float32, is_pure=False, pack=1)
    return total
