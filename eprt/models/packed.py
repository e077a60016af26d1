"""Brings packed INT4 tensors of a file, and scales of other packers, to canonical fields; each checks its values."""

from __future__ import annotations

from collections.abc import Callable

import torch

from eprt.errors import CheckpointError
from eprt.models.scales import positive_scale
from eprt.quant.packing import AWQ_ORDER, codes_along_columns, codes_along_rows, rows_of_words
from eprt.weights import INT4_ZERO

Accept = Callable[[torch.Tensor, str], torch.Tensor]


def codes_of_words(words: torch.Tensor, where: str) -> torch.Tensor:
    """Returns codes of int32 [rows, cols/8]."""
    return codes_along_columns(words)


def codes_of_rows(words: torch.Tensor, where: str) -> torch.Tensor:
    """Returns codes of AWQ's int32 [rows/8, cols]."""
    return codes_along_rows(words, AWQ_ORDER)


def zeros_of_rows(words: torch.Tensor, where: str, order: tuple[int, ...], offset: int) -> torch.Tensor:
    """Returns zero points u8 [rows, groups] of int32 [rows/8, groups]. Raises CheckpointError for one above 15."""
    zeros = rows_of_words(words, order) + offset
    if (zeros > 15).any():
        raise CheckpointError(
            f"{where}: {int((zeros > 15).sum())} zero points of 16 (stored as 15, one less): expected 0 to 15; is its "
            "checkpoint_format gptq_v2?"
        )
    return zeros


def symmetric_zeros(read: Accept, words: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless all zero points of a symmetric GPTQ matrix are 8."""
    zeros = read(words.mT, where)
    if (zeros != INT4_ZERO).any():
        bad = zeros[zeros != INT4_ZERO]
        raise CheckpointError(
            f"{where}: {bad.numel()} of {zeros.numel()} zero points such as {int(bad[0])}: expected {INT4_ZERO}, the "
            "config says sym; set it to false, or set the right checkpoint_format"
        )


def int4_scale(scale: torch.Tensor, where: str) -> torch.Tensor:
    """Returns scales as they are, float16 ones as float32, which holds each exactly. Raises CheckpointError."""
    positive_scale(scale, where, largest=15.0)
    return scale.float() if scale.dtype == torch.float16 else scale


def as_float32(check: Accept) -> Accept:
    """Returns `check` of scales brought to float32, which holds bf16 and float16 ones exactly."""
    return lambda scale, where: check(scale.float(), where)


def reciprocal(check: Accept) -> Accept:
    """Returns `check` of one divided by the stored number, which compressed-tensors divides by."""
    return lambda scale, where: check(1 / positive_scale(scale, where), where)


def unused_scale(scale: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError for an input scale that isn't one; tokens aren't quantised by it."""
    positive_scale(scale, where)


def of_this_shape(values: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless a `weight_shape` is the matrix's."""
    if tuple(values.tolist()) != size:
        raise CheckpointError(f"{where} says {values.tolist()}: expected {list(size)}, as config.json does")


def columns_in_order(group: int, index: torch.Tensor, where: str, size: tuple[int, int]) -> None:
    """Raises CheckpointError unless a `g_idx` says that column c belongs to group c // `group`."""
    cols = size[1]
    expected = torch.arange(cols, dtype=torch.int32) // (group or cols)
    if not torch.equal(index, expected):
        place = int((index != expected).nonzero()[0])
        raise CheckpointError(
            f"{where}: column {place} is of group {int(index[place])}, expected {int(expected[place])}, as the config "
            "says that columns are in order; if they are in activation order, set desc_act, or actorder group"
        )
