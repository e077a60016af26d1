# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
"""MXFP4, NVFP4 and INT4 weights, decoded to bf16 where the tensor cores take their left operand: in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from eprt.experts.grouped.four_bit import (
    C_FROM_A,
    MX_SCALE_BITS,
    NV_SCALE_BITS,
    NV_SCALE_ONES,
    PAIR_BITS,
    ROW_PAIRS,
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
_LESS = _TIMES.replace("mul", "sub")
_LESS_LOW = tl.constexpr(_LESS.format("l"))
_LESS_HIGH = tl.constexpr(_LESS.format("h"))
_SCALED = """{{.reg .b16 l, h; .reg .b32 d, e; mov.b32 {{l, h}}, $2; mov.b32 d, {{{0}, {0}}};
mov.b32 {{l, h}}, $3; mov.b32 e, {{{0}, {0}}}; fma.rn.bf16x2 $0, $1, d, e;}}"""
_SCALED_LOW = tl.constexpr(_SCALED.format("l"))
_SCALED_HIGH = tl.constexpr(_SCALED.format("h"))
_TIMES_IMMEDIATE = "{{.reg .b32 d; mov.b32 d, {0}; mul.bf16x2 $0, $1, d;}}"
# bf16 twice: 1 / 16, and -8 times 2 ** -133, the code of zero.
_TIMES_SIXTEENTH = tl.constexpr(_TIMES_IMMEDIATE.format(0x3D803D80))
_TIMES_LESS_EIGHT = tl.constexpr(_TIMES_IMMEDIATE.format(0x80088008))
_LOW_NIBBLES, _HIGH_NIBBLES = tl.constexpr(0x000F000F), tl.constexpr(0x00F000F0)
_UNIT = tl.constexpr(UNIT)
_UNIT_WORDS = tl.constexpr(UNIT_WORDS)
_ROW_PAIRS = tl.constexpr(ROW_PAIRS)
_PAIR_BITS = tl.constexpr(PAIR_BITS)
_MX_SCALE_BITS = tl.constexpr(MX_SCALE_BITS)
_NV_SCALE_BITS = tl.constexpr(NV_SCALE_BITS)
_NV_SCALE_ONES = tl.constexpr(NV_SCALE_ONES)
_SCALE_TURN = tl.constexpr(SCALE_TURN)
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
    # LLVM would make two instructions of it.
    return tl.inline_asm_elementwise(_SELECT, "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _times(pair, scales, HIGH: tl.constexpr):
    """Two bf16 in 32 bits times the bf16 in the low or high half of `scales`."""
    asm: tl.constexpr = _TIMES_HIGH if HIGH else _TIMES_LOW
    return tl.inline_asm_elementwise(asm, "=r,r,r", [pair, scales], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _less(pair, others, HIGH: tl.constexpr):
    """Two bf16 in 32 bits less the bf16 in the low or high half of `others`."""
    asm: tl.constexpr = _LESS_HIGH if HIGH else _LESS_LOW
    return tl.inline_asm_elementwise(asm, "=r,r,r", [pair, others], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _scaled(pair, scales, offsets, HIGH: tl.constexpr):
    """Two bf16 times a scale, plus an offset, rounded once: both in the low or high half."""
    asm: tl.constexpr = _SCALED_HIGH if HIGH else _SCALED_LOW
    return tl.inline_asm_elementwise(asm, "=r,r,r,r", [pair, scales, offsets], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _times_each(scales, ASM: tl.constexpr):
    """Both bf16 of `scales` times the one that ASM names."""
    return tl.inline_asm_elementwise(ASM, "=r,r", [scales], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _pairs(word, rest, scale, other, TURNS: tl.constexpr, HIGH: tl.constexpr):
    """bf16 [.., j, i, l] of A or B, `word`, and of C, `rest`: uint32. Scales of j = 0, and the `other`."""
    p00 = _times(_turned(word, TURNS[0]) & _PAIR_BITS, scale, HIGH)
    p01 = _times(_turned(word, TURNS[1]) & _PAIR_BITS, scale, HIGH)
    p10 = _times(_turned(word, TURNS[2]) & _PAIR_BITS, other, HIGH)
    p11 = _times(_turned(rest, TURNS[3]) & _PAIR_BITS, other, HIGH)
    return _in_order(p00, p01, p10, p11)


@triton.jit
def _int4_pairs(word, scale, sixteenth, other, ZEROS: tl.constexpr, HIGH: tl.constexpr):
    """The same of INT4's A or B. `other`: zero points, or minus eight times the scale."""
    rest = word >> 8
    a, b, c, d = word & _LOW_NIBBLES, word & _HIGH_NIBBLES, rest & _LOW_NIBBLES, rest & _HIGH_NIBBLES
    if ZEROS:
        low, high = other & _LOW_NIBBLES, other & _HIGH_NIBBLES
        p00, p01 = _times(_less(a, low, HIGH), scale, HIGH), _times(_less(b, high, HIGH), sixteenth, HIGH)
        p10, p11 = _times(_less(c, low, HIGH), scale, HIGH), _times(_less(d, high, HIGH), sixteenth, HIGH)
    else:
        p00, p01 = _scaled(a, scale, other, HIGH), _scaled(b, sixteenth, other, HIGH)
        p10, p11 = _scaled(c, scale, other, HIGH), _scaled(d, sixteenth, other, HIGH)
    return _in_order(p00, p01, p10, p11)


@triton.jit
def _in_order(p00, p01, p10, p11):
    """bf16 [.., j, i, l] of pairs named by j and i."""
    pairs = tl.join(tl.join(p00, p10), tl.join(p01, p11))
    return tl.join((pairs & 0xFFFF).to(tl.uint16), (pairs >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def pairs_of(a, b, scale, sixteenth, other, PAIR: tl.constexpr, ZEROS: tl.constexpr):
    """bf16 [.., j, i, l, h] of words A and B and of `pair_scales`."""
    if PAIR == "i4a16":
        upper = _int4_pairs(a, scale, sixteenth, other, ZEROS, False)
        lower = _int4_pairs(b, scale, sixteenth, other, ZEROS, True)
    else:
        c = rest_of(a, b)
        upper, lower = _pairs(a, c, scale, other, _TURNS_A, False), _pairs(b, c, scale, other, _TURNS_B, True)
    return tl.join(upper, lower)


@triton.jit
def pair_scales(scales, WORDS: tl.constexpr, PAIR: tl.constexpr, ZEROS: tl.constexpr):
    """(scale, sixteenth, other) of each q, [.., q], of a row's words [.., WORDS], or [..] of one word.

    FP4: scales for j = 0 and, `other`, for j = 1. INT4: the scale, a sixteenth of it, and zero points or minus eight
    times the scale.
    """
    if PAIR == "i4a16":
        scale, sixteenth, other = _int4_scales(scales, WORDS, ZEROS)
    elif PAIR == "nv4a16":
        scale = scales & _NV_SCALE_BITS | _NV_SCALE_ONES
        sixteenth, other = scale, _turned(scales, _SCALE_TURN) & _NV_SCALE_BITS | _NV_SCALE_ONES
    else:
        scale = tl.join(scales & _MX_SCALE_BITS, _turned(scales, _SCALE_TURN) & _MX_SCALE_BITS)
        sixteenth, other = scale, scale
    return scale, sixteenth, other


@triton.jit
def _int4_scales(scales, WORDS: tl.constexpr, ZEROS: tl.constexpr):
    if ZEROS:
        if WORDS == 4:
            scales = tl.reshape(scales, scales.shape[:-1] + [2, 2])  # noqa: RUF005  (Triton unpacks no lists)
        scale, other = tl.split(scales)
    else:
        scale, other = scales, _times_each(scales, _TIMES_LESS_EIGHT)
    sixteenth = _times_each(scale, _TIMES_SIXTEENTH)
    OF_ALL_COLUMNS: tl.constexpr = 2 if ZEROS else 1
    if WORDS == OF_ALL_COLUMNS:
        scale, sixteenth, other = tl.join(scale, scale), tl.join(sixteenth, sixteenth), tl.join(other, other)
    return scale, sixteenth, other


@triton.jit
def _every_t(scales):
    """[.., w, g, words or q] for all threads of a row: [.., w, g, t, words or q]."""
    shape: tl.constexpr = scales.shape
    return tl.broadcast_to(tl.expand_dims(scales, 4), (shape[0], shape[1], shape[2], shape[3], 4, shape[4]))


@triton.jit
def four_bit_values(words, scales, BN: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """bf16 [64 * BN, 64 * BK] of units: uint32 words [BK, BN, UNIT_WORDS], scales [BK, BN, words of a unit's]."""
    a, b = tl.split(tl.reshape(words, (BK, BN, 4, 8, 4, 2, 2)))  # w, g, t, q
    PAIR: tl.constexpr = C.PAIR
    ZEROS: tl.constexpr = C.ZEROS
    PER_ROW: tl.constexpr = C.UNIT_SCALES // _ROW_PAIRS
    if PER_ROW > 1:
        own = _every_t(tl.reshape(scales, (BK, BN, 4, 8, PER_ROW)))
        scale, sixteenth, other = pair_scales(own, PER_ROW, PAIR, ZEROS)
    else:
        scale, sixteenth, other = pair_scales(tl.reshape(scales, (BK, BN, 4, 8)), PER_ROW, PAIR, ZEROS)
        scale, sixteenth, other = _every_t(scale), _every_t(sixteenth), _every_t(other)
    both = pairs_of(a, b, scale, sixteenth, other, PAIR, ZEROS)
    # [unit, unit, w, g, t, q, j, i, l, h] to rows (unit, w, h, g) and columns (unit, q, j, i, t, l)
    return tl.reshape(tl.permute(both, (1, 2, 9, 3, 0, 5, 6, 7, 4, 8)), (BN * _UNIT, BK * _UNIT))


@triton.jit
def four_bit_expert(w, w_scale, expert, C: tl.constexpr):
    """Where an expert's words begin, and its scales'."""
    units = expert.to(tl.int64) * ((C.N + _UNIT - 1) // _UNIT * ((C.K + _UNIT - 1) // _UNIT))
    return w + units * _UNIT_WORDS, w_scale + units * C.UNIT_SCALES


@triton.jit
def four_bit_block(w, w_scale, column, start, C: tl.constexpr):
    """Weights [C.BLOCK_N, C.BLOCK_K] of one expert from `column` and `start` on. What lies past its rows and columns is
    finite: other weights, or the room after the last."""
    BN: tl.constexpr = C.BLOCK_N // _UNIT
    BK: tl.constexpr = C.BLOCK_K // _UNIT
    cols: tl.constexpr = (C.K + _UNIT - 1) // _UNIT
    n = column // _UNIT + tl.arange(0, BN)[None, :, None]
    k = start // _UNIT + tl.arange(0, BK)[:, None, None]
    unit = n * cols + k
    words = tl.load(w + unit * _UNIT_WORDS + tl.arange(0, _UNIT_WORDS)[None, None, :])
    scales = tl.load(w_scale + unit * C.UNIT_SCALES + tl.arange(0, C.UNIT_SCALES)[None, None, :])
    return four_bit_values(words.to(tl.uint32, bitcast=True), scales.to(tl.uint32, bitcast=True), BN, BK, C)


@triton.jit
def settled(total):
    """The same float32 values, once the tensor cores have written them: what they read from registers until then may be
    written again. Without it Triton 3.6 lets the next block's values overwrite those still being read."""
    return tl.inline_asm_elementwise("", "=f,0", [total], tl.float32, is_pure=False, pack=1)
