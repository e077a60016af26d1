"""Four-bit codes in int32 words, as GPTQ, AWQ and compressed-tensors pack them. Any device; words are little-endian."""

from __future__ import annotations

import torch

from eprt.quant.elements import pack_nibbles

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i, from the lowest, holds the output of this number


def codes_along_columns(words: torch.Tensor) -> torch.Tensor:
    """Brings int32 [..., rows, cols/8], column 8j first in the lowest nibble of word j, to u8 [..., rows, cols/2]."""
    return words.contiguous().view(torch.uint8)


def rows_of_words(words: torch.Tensor, order: tuple[int, ...] = IN_ORDER) -> torch.Tensor:
    """Unpacks int32 [..., rows/8, cols], eight rows a word, to u8 [..., rows, cols] of values 0 to 15."""
    rows: list[torch.Tensor] = [words] * 8
    for nibble, row in enumerate(order):
        rows[row] = ((words >> (4 * nibble)) & 15).to(torch.uint8)
    return torch.stack(rows, dim=-2).flatten(-3, -2)


def codes_along_rows(words: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """Brings int32 [..., rows/8, cols] to u8 [..., rows, cols/2], two neighbouring columns a byte."""
    return pack_nibbles(rows_of_words(words, order))
