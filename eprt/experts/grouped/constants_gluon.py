# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
"""Makes what the host gives `gemm_gluon`: its compile-time constants, and TMA descriptors with their layouts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from eprt.experts.grouped.four_bit import UNIT, UNIT_WORDS
from eprt.experts.grouped.gemm_triton import GemmConstants
from eprt.experts.grouped.schedules import FOUR_BIT_PAIRS, FP8_PAIRS
from eprt.rounding import ceil_div, next_power_of_2
from eprt.weights import FP8_BLOCK

BLOCK_K = 64  # columns of bf16 per part: 128 bytes
# Registers per producer thread: it copies up to 64 tokens, or more than 64 (beside consumers that have none to spare),
# or issues TMA loads only.
_FEW_TOKENS, _MANY_TOKENS, _MANY_AT_LEAST, _TMA_ONLY = 32, 56, 40, 24
_LINE = 256  # words: as long as a block's side can be
# Of rows of a part's values.
SHARED, SHARED_8 = gl.constexpr(NVMMASharedLayout(128, 16, 2)), gl.constexpr(NVMMASharedLayout(128, 8, 2))
# Of words, as they lie in memory.
UNITS, SCALES = gl.constexpr(NVMMASharedLayout(0, 32, 3)), gl.constexpr(NVMMASharedLayout(0, 32, 2))


@dataclass(frozen=True)
class KernelConstants(GemmConstants):
    """The compile-time constants of the warp-specialized kernel, of any PAIR but "w8a16".

    BLOCK_N is 128, 192 or 256 of 4-bit weights, BLOCK_M 16 to 256 (128 if SCALED), TAIL 0, 16 or 32; BLOCK_K is 64, or
    128 of 4-bit weights and FP8.

    Attributes:
        FOUR_BIT: weights have 4 bits.  UNIT_ROWS: rows of units per TMA load.  FP8: tokens are E4M3, as are weights of
            8 bits and decoded ones.
        SCALED: each part is summed, scaled and then added (w8a8), PIECES times for 128 weight rows.
        COPIES: producer threads copy, beside TMA.
        CONSUMERS: warpgroups that share a tile.  ORDERED: two of them decode, and take turns at the tensor cores.
        PART_K, PARTS: columns of a part, and parts per stage.
        REGISTERS: per consumer thread, and per producer thread.
        NUM_N: tiles along N.  NUM_K: stages that a tile passes through.
        LEAST: tokens of the narrowest tile, and per TMA load.
    """

    FOUR_BIT: bool = field(init=False)
    FP8: bool = field(init=False)
    SCALED: bool = field(init=False)
    PIECES: int = field(init=False)
    COPIES: bool = field(init=False)
    UNIT_ROWS: int = field(init=False)
    CONSUMERS: int = field(init=False)
    ORDERED: bool = field(init=False)
    PART_K: int = field(init=False)
    PARTS: int = field(init=False)
    REGISTERS: tuple[int, int] = field(init=False)
    NUM_N: int = field(init=False)
    NUM_K: int = field(init=False)
    LEAST: int = field(init=False)

    def __post_init__(self) -> None:
        four_bit = self.PAIR in FOUR_BIT_PAIRS
        consumers = self.BLOCK_N // UNIT if four_bit else 2
        scaled = self.PAIR == "w8a8"
        pieces = self.BLOCK_N // FP8_BLOCK if scaled else 1
        many = _MANY_TOKENS if pieces == 1 else _MANY_AT_LEAST
        few = _FEW_TOKENS if self.BLOCK_M <= 64 or self.X_TMA else many
        producer = _TMA_ONLY if self.X_TMA and not scaled else few
        # Fields, as Triton's cache knows a kernel by what they print.
        for name, value in (
            ("FOUR_BIT", four_bit),
            ("FP8", self.PAIR in FP8_PAIRS),
            ("SCALED", scaled),
            ("PIECES", pieces),
            ("COPIES", scaled or not self.X_TMA),
            ("UNIT_ROWS", next_power_of_2(self.BLOCK_N // UNIT)),
            ("CONSUMERS", consumers),
            ("ORDERED", four_bit and consumers == 2),
            ("PART_K", block_columns(self.PAIR)),
            ("PARTS", self.BLOCK_K // block_columns(self.PAIR)),
            ("REGISTERS", (_consumer_registers(consumers, producer), producer)),
            ("NUM_N", ceil_div(self.N, self.BLOCK_N)),
            ("NUM_K", ceil_div(self.K, self.BLOCK_K)),
            ("LEAST", self.BLOCK_M >> self.HALVINGS),
        ):
            object.__setattr__(self, name, value)


def _consumer_registers(consumers: int, producer: int) -> int:
    """Returns the registers per consumer thread. A program starts with equal shares of 65,536 per thread, in eights;
    its warpgroups then redistribute them."""
    groups = consumers + 1
    all_of_them = 65536 // (groups * 128) // 8 * 8 * groups
    return (all_of_them - producer) // consumers // 8 * 8


def block_columns(pair: str) -> int:
    """Returns the columns of a part."""
    return 2 * BLOCK_K if pair in FP8_PAIRS else BLOCK_K


def row_blocks(rows: torch.Tensor, count: int) -> Any:
    """Returns a TMA descriptor of [.., K], in blocks of `count` rows and 128 bytes."""
    size = rows.element_size()
    layout = SHARED if size == 2 else SHARED_8
    return TensorDescriptor.from_tensor(rows, [count, BLOCK_K * 2 // size], layout.value)


def weight_blocks(units: torch.Tensor, blocks: int, rows: int, parts: int) -> Any:
    """Returns a TMA descriptor of weights int32 [L, rows of units * blocks, UNIT_WORDS]: `parts` units per row."""
    lines = UNIT_WORDS // _LINE
    words = units.view(-1, blocks * lines, _LINE)
    return TensorDescriptor.from_tensor(words, [rows, parts * lines, _LINE], UNITS.value)


def scale_blocks(units: torch.Tensor, blocks: int, rows: int, parts: int) -> Any:
    """Returns a TMA descriptor of their scales int32 [L, rows of units * blocks, words per unit]."""
    width = units.shape[-1]
    return TensorDescriptor.from_tensor(units.view(-1, blocks * width), [rows, width * parts], SCALES.value)


@gluon.constexpr_function
def product_layout(tokens: int, depth: int = 16) -> Any:
    """Returns the layout of one warpgroup's float32 accumulator: weight rows x tokens. `depth`: columns of K that one
    instruction takes, 32 bytes."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, depth])
