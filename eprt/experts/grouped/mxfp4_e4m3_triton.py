# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""MXFP4 weights of `mxfp4_e4m3`, decoded to E4M3 where the tensor cores take their left operand: in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from eprt.experts.grouped.four_bit import ROW_PAIRS, UNIT, UNIT_WORDS

_PERMUTE = tl.constexpr("prmt.b32 $0, $1, $2, $3;")
# E4M3 of 0, 0.5, 1 and 1.5, and of 2, 3, 4 and 6, where 0.5 has exponent field 1; and what one field more adds, over 8.
_LOW, _HIGH = tl.constexpr(0x14100800), tl.constexpr(0x24201C18)
_LOW_STEP, _HIGH_STEP = tl.constexpr(0x01010100), tl.constexpr(0x01010101)
_UNIT, _UNIT_WORDS, _ROW_PAIRS = tl.constexpr(UNIT), tl.constexpr(UNIT_WORDS), tl.constexpr(ROW_PAIRS)
_MAGNITUDES, _SIGNS = tl.constexpr(0x77777777), tl.constexpr(0x80808080)


@triton.jit
def _selected(low, high, selector):
    """Four bytes of the eight in `low` and `high`, by the lower four nibbles of `selector`, which are below 8."""
    return tl.inline_asm_elementwise(_PERMUTE, "=r,r,r,r", [low, high, selector], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _quads(word, field):
    """uint32 [.., j]: four E4M3 each, of a word's codes. `field`: of its group, in the units of E4M3's bits."""
    low, high = _LOW + field * _LOW_STEP, _HIGH + field * _HIGH_STEP
    magnitudes = word & _MAGNITUDES
    first = _selected(low, high, magnitudes) | (word & _SIGNS)
    second = _selected(low, high, magnitudes >> 16) | ((word << 4) & _SIGNS)
    return tl.join(first, second)


@triton.jit
def row_fields(fields):
    """Returns the fields of h = 0 and of h = 1, [.., q], from the words of two rows' fields [..]."""
    return tl.join(fields & 0xFF, (fields >> 16) & 0xFF), tl.join((fields >> 8) & 0xFF, fields >> 24)


@triton.jit
def e4m3_words(a, b, upper, lower):
    """uint32 [.., q, j, h], four E4M3 each, of the words of h = 0 and h = 1, uint32 [.., q], and of `row_fields`."""
    return tl.join(_quads(a, upper), _quads(b, lower))


@triton.jit
def e4m3_of(words):
    """E4M3 [.., l upper, l lower] of words of four."""
    pairs = tl.join(words & 0xFFFF, words >> 16)
    return tl.join(pairs & 0xFF, pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)


@triton.jit
def e4m3_block(w, fields, column, start, C: tl.constexpr):
    """E4M3 weights [C.BLOCK_N, C.BLOCK_K] of one expert from `column` and `start` on, as `four_bit_block` says."""
    BN: tl.constexpr = C.BLOCK_N // _UNIT
    BK: tl.constexpr = C.BLOCK_K // _UNIT
    n = column // _UNIT + tl.arange(0, BN)[None, :, None]
    k = start // _UNIT + tl.arange(0, BK)[:, None, None]
    unit = n * (C.K // _UNIT) + k
    words = tl.load(w + unit * _UNIT_WORDS + tl.arange(0, _UNIT_WORDS)[None, None, :]).to(tl.uint32, bitcast=True)
    own = tl.load(fields + unit * _ROW_PAIRS + tl.arange(0, _ROW_PAIRS)[None, None, :]).to(tl.uint32, bitcast=True)
    a, b = tl.split(tl.reshape(words, (BK, BN, 4, 8, 4, 2, 2)))  # w, g, t, q
    upper, lower = row_fields(tl.broadcast_to(tl.reshape(own, (BK, BN, 4, 8, 1)), (BK, BN, 4, 8, 4)))
    values = e4m3_of(e4m3_words(a, b, upper, lower))
    # [unit, unit, w, g, t, q, j, h, l, l] to rows (unit, w, h, g) and columns (unit, q, j, t, l)
    values = tl.permute(values, (1, 2, 7, 3, 0, 5, 6, 4, 8, 9))
    return tl.reshape(values, (BN * _UNIT, BK * _UNIT))
