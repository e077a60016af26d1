"""MXFP4 matrices in the order in which threads decode them to E4M3, for tokens of E4M3 (W4A8).

Units are those of `four_bit`: 64 x 64 weights, 128 threads with 16 bytes each. The left operand of a wgmma of E4M3 is
64 x 32 (PTX ISA, "wgmma register fragment for matrix A"). Thread (w, g, t) of warp w has rows 16 w + 8 h + g and
columns 32 q + 16 j + 4 t + l, l from 0 to 3. A word holds the eight codes of one q and h. Nibble 4 j + l has a code's
magnitude in its lower three bits: four nibbles are the selector of a `prmt`, which takes four bytes from a table of
eight. Signs fill what the nibbles leave: that of j = 0 lies at bit 8 l + 7, where E4M3 has it, that of j = 1 four bits
lower.

A group's table holds the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6 as E4M3. They are exact where 0.5 has an exponent
field from 1 to 12. So groups reach over REACH octaves below the largest of their row that has a weight but zero, whose
0.5 has field 12, and sums of the row are multiplied by a power of two. Weights of a group further below are rounded to
what a group at the lower end can hold: by at most 2 ** -(REACH + 2) of the largest group's scale.
"""

from __future__ import annotations

from itertools import product

import torch

from eprt.experts.grouped.four_bit import UNIT, padded, table_on, words_of
from eprt.weights import MX_BLOCK

REACH = 11
COLUMNS = 128  # columns are padded to whole 128 bytes of a token
_FACTOR_BIAS = 127 + 6  # of E8M0, and of what field 12 makes of a group's values: 2 ** 6 times as much
# What a code's magnitude becomes in a group of 2 ** n times the scale, to nearest and ties to even.
_LOWERED = (
    (0, 1, 2, 3, 4, 5, 6, 7),
    (0, 0, 1, 2, 2, 3, 4, 5),
    (0, 0, 0, 1, 1, 2, 2, 3),
    (0, 0, 0, 0, 0, 1, 1, 2),
    (0, 0, 0, 0, 0, 0, 0, 1),
    (0, 0, 0, 0, 0, 0, 0, 0),
)


def e4m3_factor(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns what sums of a row are multiplied by, float32 [rows], for the arguments of `pack_mxfp4_e4m3`."""
    exponent = _largest(codes, scales).to(torch.float64) - _FACTOR_BIAS
    return torch.where((scales == 255).any(-1), torch.nan, torch.exp2(exponent).to(torch.float32))


def pack_mxfp4_e4m3(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Packs one expert's rows; its columns are padded to COLUMNS.

    Args:
        codes: u8 [rows, cols / 2], low nibble first.  scales: u8 E8M0 [rows, cols / 32].

    Returns:
        words int32 [units, UNIT_WORDS], and of scales int32 [units, UNIT / 2].
    """
    below = (_largest(codes, scales)[:, None] - scales.to(torch.int64)).clamp_(min=0)
    lowered = (below - REACH).clamp_(0, len(_LOWERED) - 1)
    blocks = codes.unflatten(1, (-1, MX_BLOCK // 2))
    found = table_on(codes.device, _lowered_bytes).view(-1)[lowered[:, :, None] << 8 | blocks]
    codes = padded(found.flatten(1).to(torch.uint8), COLUMNS // 2)
    # `words_of` has pairs of columns i beyond threads t, here they are within one.
    turned = codes.view(codes.shape[0], -1, 4, 2).transpose(2, 3).reshape(codes.shape)
    fields = padded(((REACH - below).clamp_(min=0) << 3).to(torch.uint8), COLUMNS // MX_BLOCK)
    # rows: unit, w, h, g; columns: unit, q
    shape = fields.shape[0] // UNIT, 4, 2, 8, fields.shape[1] // 2, 2
    of = fields.view(shape).permute(0, 4, 1, 3, 5, 2).reshape(-1, UNIT // 2, 4)
    return words_of(turned, _code_bits), of.view(torch.int32).flatten(1)


def _largest(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns each row's largest scale among groups that have a weight but zero, int64 [rows]; 0 if none has."""
    there = ((codes & 0x77) != 0).unflatten(1, (-1, MX_BLOCK // 2)).any(-1)
    return (scales.to(torch.int64) * there).amax(-1)


def _lowered_bytes() -> list[list[int]]:
    """Returns `_LOWERED` of two codes in a byte, signs kept: [6][256]."""
    codes = [[code & 8 | row[code & 7] for code in range(16)] for row in _LOWERED]
    return [[row[byte & 15] | row[byte >> 4] << 4 for byte in range(256)] for row in codes]


def _code_bits() -> list[list[int]]:
    """Returns the table of `words_of`: for (h, j, upper pair of l), and two codes in a byte, their bits in the words of
    h = 0 and, the upper half, h = 1."""
    table: list[list[int]] = []
    for h, j, upper in product(range(2), range(2), range(2)):
        code, sign = 32 * h + 16 * j + 8 * upper, 32 * h + 16 * upper + 7 - 4 * j
        places = [code, code + 1, code + 2, sign, code + 4, code + 5, code + 6, sign + 8]
        table.append([sum(1 << place for at, place in enumerate(places) if byte >> at & 1) for byte in range(256)])
    return table
