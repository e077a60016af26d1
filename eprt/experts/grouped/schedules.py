"""Tiles of the grouped GEMM, by what is multiplied and how many rows an expert gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Weights x activations: plain bf16; E4M3 blocks times E4M3 groups; E4M3 blocks times bf16.
Pair = Literal["bf16", "w8a8", "w8a16"]


@dataclass(frozen=True)
class Tile:
    """How one of the two GEMMs is cut.

    Attributes:
        n, k: columns (both parts of a gated matrix) and depth of a block; n / parts divides 128, and k is 128, where
            there are scales.
        stages: blocks in flight.  warps: of a program.  ctas: programs on a multiprocessor.
    """

    n: int
    k: int
    stages: int
    warps: int
    ctas: int


@dataclass(frozen=True)
class Schedule:
    """Both GEMMs for about so many rows an expert.

    Attributes:
        m: rows of a tile.
        swap: weights x tokens instead of tokens x weights.
        tail: an expert's last tile in half the height where that is enough.
        first, second: the two GEMMs.
        group: row tiles of an expert that share columns before the next columns come.
        tokens_by_tma: the second GEMM's rows by the copy engine.
    """

    m: int
    swap: bool
    tail: bool
    first: Tile
    second: Tile
    group: int = 8
    tokens_by_tma: bool = False


ANY = 1 << 30
_FEW = Schedule(16, True, False, Tile(64, 128, 4, 4, 2), Tile(64, 128, 4, 4, 2))
_SOME = Schedule(64, True, False, Tile(128, 64, 4, 4, 2), Tile(128, 64, 4, 4, 2))
_MANY = Schedule(128, False, True, Tile(128, 64, 3, 4, 2), Tile(128, 64, 3, 4, 2))
_FP8_FEW = Schedule(16, True, False, Tile(128, 128, 4, 4, 2), Tile(128, 128, 4, 4, 2))
_FP8_SOME = Schedule(64, False, False, Tile(128, 128, 4, 4, 2), Tile(128, 128, 4, 4, 2))
_FP8_MANY = Schedule(128, False, True, Tile(128, 128, 4, 8, 1), Tile(128, 128, 4, 8, 1))
# Up to so many rows an expert, as even routing would bring.
HOPPER: dict[Pair, tuple[tuple[int, Schedule], ...]] = {
    "bf16": ((12, _FEW), (48, _SOME), (ANY, _MANY)),
    "w8a8": ((12, _FP8_FEW), (48, _FP8_SOME), (ANY, _FP8_MANY)),
    "w8a16": ((12, _FP8_FEW), (48, _FP8_SOME), (ANY, _FP8_MANY)),
}


def choose(pair: Pair, rows: float) -> Schedule:
    """For so many rows an expert."""
    return next(schedule for limit, schedule in HOPPER[pair] if rows <= limit)


def limits(pair: Pair) -> list[int]:
    """Rows an expert at which another schedule begins."""
    return [limit for limit, _ in HOPPER[pair][:-1]]
