"""The tile shapes of the grouped GEMM, chosen by number formats and rows per expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

# Weights x activations: plain bf16; E4M3 blocks times E4M3 groups; E4M3 times bf16; E4M3 by row times E4M3 by token;
# MXFP4, NVFP4 and INT4 times bf16; MXFP4 times E4M3 by token.
Pair = Literal["bf16", "w8a8", "w8a16", "c8a8", "w4a16", "nv4a16", "i4a16", "w4a8"]
FP8_PAIRS: tuple[Pair, ...] = ("w8a8", "w8a16", "c8a8", "w4a8")  # tokens are E4M3
TOKEN_SCALED: tuple[Pair, ...] = ("c8a8", "w4a8")  # those with one scale per token
FOUR_BIT_PAIRS: tuple[Pair, ...] = ("w4a16", "nv4a16", "i4a16", "w4a8")


@dataclass(frozen=True)
class Tile:
    """The tile shape and pipeline of one of the two GEMMs.

    Attributes:
        n, k: columns (both parts of a gated matrix) and depth of a block. FP8: k is 128 and n / parts divides 128, but
            by channel and for `warp_specialized`. 4 bits: both are multiples of 64, and n is a multiple of 16 per warp.
        stages: pipeline depth.  warps: per program.  ctas: programs per SM.
        swap: weights x tokens instead of tokens x weights; 4 bits always.
        halvings: how often an expert's last tile may be narrowed to half its height if its rows fit.
        flatten: one pipeline over all tiles of a program, where `tma` holds; not with halvings.
        tma: tokens come by TMA where they lie in consecutive rows (the second GEMM of FlatTokens).
        warp_specialized: the kernel of `eprt.experts.grouped.gemm_gluon`, for bf16, FP8 tokens and 4 bits on
            Hopper. bf16 and FP8 have two consumer warpgroups, n x m at most 128 x 256 or 256 x 128 (with block scales
            128 x 128, or 256 x 128 and a tail of 16), k 64 and 128. 4 bits have one per 64 of n (128 to 256), whose
            registers hold 64 x m results each; k is 64 or 128.
        fallback: the tile where the warp-specialized kernel doesn't fit; None: the same shape with three stages.
    """

    n: int
    k: int
    stages: int
    warps: int
    ctas: int
    swap: bool = False
    halvings: int = 0
    flatten: bool = False
    tma: bool = False
    warp_specialized: bool = False
    fallback: Tile | None = field(default=None, compare=False)

    @property
    def plain(self) -> Tile:
        """The tile of the plain kernel, for matrices and rows that the warp-specialized one doesn't take."""
        return self.fallback or replace(self, warp_specialized=False, stages=min(self.stages, 3))


@dataclass(frozen=True)
class Schedule:
    """The tiles of both GEMMs for a range of rows per expert.

    Attributes:
        m: rows per tile.
        tail: rows beyond m that an expert's last tile takes along (its residue): 0, 16 or 32. Another tile would read
            and decode all weights again for them. Needs `swap`; not with `flatten`.
        group: row tiles of an expert that share columns before the next columns come.
        launch_dependents: both GEMMs trigger programmatic dependent launch, so the next kernel is set up on every free
            SM. Only for kernels that take whole SMs: other kernels' programs would crowd on the first free ones.
    """

    m: int
    first: Tile
    second: Tile
    group: int = 8
    tail: int = 0
    launch_dependents: bool = False


@dataclass(frozen=True)
class FewTile:
    """The blocks of one of the two GEMMs of a few tokens (`eprt.experts.grouped.few_triton`).

    Attributes:
        n, k: weight rows and columns of a block; of 4 bits n is 64, k a multiple of it.
        stages: pipeline depth; 1 with 4 bits.
        ahead: blocks of 4-bit words that are on their way while one is multiplied.
        eager: of 4 bits, the first GEMM loads its first words before it knows whether an earlier entry's program
            multiplies the same weights, the second one its factors and biases before it needs them.
        halves: parts of K that a program multiplies at once, 4 warps each; 2 with 4 bits alone.
        splits: programs that share K; the second GEMM alone.
    """

    n: int
    k: int
    stages: int = 1
    halves: int = 1
    splits: int = 1
    ahead: int = 1
    eager: bool = False


@dataclass(frozen=True)
class FewTokens:
    """The blocks of both GEMMs for up to `tokens` tokens, at most 16 (8 if one has two halves)."""

    tokens: int
    first: FewTile
    second: FewTile


ANY = 1 << 30
BF16_WS = Tile(256, 64, 4, 8, 1, swap=True, halvings=1, tma=True, warp_specialized=True)
BF16_128 = Schedule(128, BF16_WS, BF16_WS, tail=32)
BF16_64 = replace(
    BF16_WS, n=128, stages=8, halvings=2, fallback=Tile(64, 128, 3, 4, 2, swap=True, halvings=2, tma=True)
)
# 256 weight rows share tokens where four consumers' registers hold the results of 64 tokens; of 128 tokens three's do.
# A tail costs registers; it saves time where many experts have a few rows beyond a multiple of m.
MXFP4_WS = Tile(256, 128, 5, 8, 1, swap=True, halvings=1, tma=True, warp_specialized=True)
FOUR_BIT_16 = Tile(128, 128, 4, 4, 4, swap=True)
FOUR_BIT_NARROW = Tile(64, 256, 3, 4, 4, swap=True, tma=True)
MXFP4_LOW = replace(MXFP4_WS, stages=8, halvings=0, fallback=Tile(128, 128, 4, 4, 4, True, tma=True))
MXFP4_32 = replace(MXFP4_WS, stages=6, fallback=Tile(128, 64, 5, 4, 4, True, halvings=1))
MXFP4_64 = replace(MXFP4_WS, fallback=Tile(128, 64, 4, 4, 3, True, halvings=2, tma=True))
MXFP4_128 = replace(MXFP4_WS, n=192, stages=3, fallback=Tile(128, 64, 3, 8, 1, True, halvings=1))
MXFP4_256 = replace(MXFP4_WS, n=128, k=64, halvings=2)
FP8_WS = replace(BF16_WS, k=128, fallback=Tile(128, 128, 3, 8, 1, True, halvings=1))
FP8_128_WIDE = replace(FP8_WS, halvings=2)  # with block scales; a tail of at most 16
FP8_LOW = replace(FP8_WS, n=128, stages=7, halvings=2, fallback=Tile(128, 128, 4, 4, 2, swap=True))
FP8_32 = replace(FP8_LOW, stages=10, halvings=1, fallback=Tile(128, 128, 4, 4, 2, swap=True))
FP8_16 = replace(FP8_LOW, stages=9, halvings=0, fallback=Tile(128, 128, 5, 4, 2, swap=True))
# Those of the tables' second GEMMs.
FP8_DOWN_32 = replace(FP8_32, fallback=Tile(128, 128, 3, 4, 3, swap=True))
FP8_DOWN_16 = replace(FP8_16, fallback=Tile(128, 128, 3, 4, 4, swap=True))
FP8_64 = Schedule(64, FP8_LOW, FP8_LOW)
FP8_128 = Schedule(128, FP8_128_WIDE, FP8_128_WIDE)
# Tiles of second GEMMs.
DOWN_32 = replace(MXFP4_32, fallback=Tile(128, 128, 4, 4, 3, True, tma=True))
DOWN_128 = replace(MXFP4_128, fallback=Tile(128, 64, 3, 4, 2, True, halvings=1, tma=True))
# (largest rows per expert under even routing, schedule): of 20 to 40 candidates on an H200 (benchmarks/tune_grouped.py)
# those with the smallest geometric mean of the times under even routing, Zipf's 0.6 and 1.1 (of 128 experts the hottest
# gets 8 and 16 times the mean), for Qwen3-30B-A3B, Mixtral, gpt-oss, DeepSeek-V3, GLM-4.5-Air and Kimi-K2. Times in
# comments are of that H200, three of them under these three routings.
HOPPER: dict[Pair, tuple[tuple[float, Schedule], ...]] = {
    "bf16": (
        (10, Schedule(16, Tile(64, 128, 3, 4, 3, swap=True), Tile(64, 128, 3, 4, 3, True, flatten=True, tma=True))),
        # On an H200 Qwen3-30B-A3B (EP 1) takes 289.3 us at 256 tokens, by plain kernels 302.3; under Zipf's 0.6 and 1.1
        # 289.7 and 290.2, by tiles of 32 rows 294.6 and 302.6.
        (40, Schedule(64, BF16_64, BF16_64)),
        # For 64 rows of Mixtral (EP 2) 392 us under Zipf's 0.6, by the next one 429; for 96 rows 441 and 435.
        (88, Schedule(64, Tile(128, 64, 3, 4, 3, True, halvings=1), Tile(128, 64, 4, 4, 2, flatten=True, tma=True))),
        # For 256 rows of Qwen3-30B-A3B (EP 2) 300, 318 and 324 us; by tiles of 256 rows 289, 348 and 350.
        (ANY, BF16_128),
    ),
    "w8a8": (
        (5.5, Schedule(16, FP8_16, FP8_DOWN_16)),
        (11, Schedule(32, FP8_32, FP8_DOWN_32)),
        # A tail of 16 rows costs 1 to 4%, and saves as much where most experts have little more than 64 or 128 rows.
        (24, FP8_64),
        # For 40 rows of DeepSeek-V3 (EP 4) 756, 787 and 854 us; by the one before 741, 816 and 957.
        (112, FP8_128),
        # 961, 1650, 3018, 6006 us at 4096, 8192, 16,384, 32,768 tokens of DeepSeek-V3 (EP 4); 988, 1726, 3193, 6323 by
        # tiles half as wide, with tails of 32.
        (ANY, Schedule(128, FP8_128_WIDE, FP8_128_WIDE, tail=16)),
    ),
    # With as many stages as leave room for tokens of twice the width; not searched.
    "w8a16": (
        (12, Schedule(16, Tile(128, 128, 5, 4, 2, swap=True), Tile(128, 128, 3, 4, 3, swap=True))),
        (24, Schedule(32, Tile(128, 128, 4, 4, 2, swap=True), Tile(128, 128, 4, 4, 2, swap=True))),
        (ANY, Schedule(64, Tile(128, 128, 3, 4, 2), Tile(128, 128, 3, 4, 2))),
    ),
    "w4a16": (
        # On an H200 gpt-oss-120b (EP 4) takes 43.9, 52.2 and 66.8 us at 8, 12 and 16 tokens, 45.4, 55.6 and 72.9 by a
        # first tile of 128 x 256. A last round of programs in tiles half as wide changes 1% at most.
        (0.4, Schedule(16, FOUR_BIT_NARROW, FOUR_BIT_NARROW)),
        (2, Schedule(16, FOUR_BIT_16, FOUR_BIT_NARROW)),
        (5.5, Schedule(16, FOUR_BIT_16, MXFP4_LOW, launch_dependents=True)),
        # For 8 rows of gpt-oss-20b 139, 138 and 144 us; by the one before 137, 148 and 158. For 16 rows 144, 162 and
        # 166; with a tail of 16 150, 154 and 172.
        (21, Schedule(32, MXFP4_32, DOWN_32, launch_dependents=True)),
        # For 32 rows 175, 183 and 195 us; with a tail of 16 182, 183 and 203.
        (52, Schedule(64, MXFP4_64, MXFP4_64, launch_dependents=True)),
        (90, Schedule(64, MXFP4_64, MXFP4_64, tail=16, launch_dependents=True)),
        # For 256, 512 and 1024 rows under Zipf's 0.6 641, 1182 and 2287 us, by the next 763, 1273 and 2374; for 2048
        # 4825 and 4604.
        (1500, Schedule(128, MXFP4_128, DOWN_128, tail=32, launch_dependents=True)),
        (ANY, Schedule(256, MXFP4_256, MXFP4_256, tail=32, launch_dependents=True)),
    ),
}
# The same but for twice as many scales; not searched below 5 rows.
HOPPER["nv4a16"] = ((0.5, HOPPER["w4a16"][0][1]), *HOPPER["w4a16"][1:])
# On an H200 Kimi-K2 (EP 8) takes 40.1, 48.3, 63.4 and 86.3 us at 3, 4, 8 and 12 tokens by the first, 48.6, 55.7, 72.3
# and 93.7 by the second; Qwen3-30B-A3B (EP 1) 31.2, 36.9 and 53.3 at 3, 4 and 8 for 29.5, 32.3 and 51.4.
INT4_DEEP = 2049  # columns of the first matrix from which on the first serves at all
HOPPER["i4a16"] = (
    (0.3, Schedule(16, FOUR_BIT_NARROW, FOUR_BIT_NARROW)),
    (2, Schedule(16, FOUR_BIT_16, replace(FOUR_BIT_16, stages=3, tma=True))),
    *HOPPER["w4a16"][2:],
)
HOPPER["c8a8"] = (
    (0.4, Schedule(16, FP8_16.plain, FP8_DOWN_16)),  # GLM-4.5-Air (EP 4) takes 50.8 us at 4 tokens for 53.7
    (10, HOPPER["w8a8"][0][1]),
    (56, FP8_64),
    # For 112 rows of GLM-4.5-Air 213, 216 and 215 us, by the next one 226, 224 and 225; for 256 rows of DeepSeek-V3 (EP
    # 4) 1642, 1750 and 2017, by the next 1553, 1679 and 2003.
    (112, FP8_128),
    (ANY, Schedule(128, FP8_WS, FP8_WS, tail=32)),
)
# Of MXFP4 with E4M3 tokens.
W4A8_16 = replace(MXFP4_WS, halvings=0, stages=8, fallback=Tile(128, 128, 4, 4, 4, True, tma=True))
W4A8_32 = replace(MXFP4_WS, stages=8, fallback=Tile(128, 128, 4, 4, 3, True, halvings=1))
W4A8_64 = replace(MXFP4_WS, stages=6, fallback=Tile(128, 64, 4, 4, 2, True, halvings=1, tma=True))
W4A8_128 = replace(MXFP4_WS, n=192, stages=5, fallback=Tile(128, 64, 3, 8, 1, True, halvings=1))
HOPPER["w4a8"] = (
    (5.5, Schedule(16, W4A8_16, W4A8_16, launch_dependents=True)),
    (22, Schedule(32, W4A8_32, W4A8_32, launch_dependents=True)),
    (52, Schedule(64, W4A8_64, W4A8_64, launch_dependents=True)),
    (76, Schedule(64, W4A8_64, W4A8_64, tail=16, launch_dependents=True)),
    # From some 200 rows on 256 tokens are slower for the first GEMM, faster for the second: 554 us at 8192 tokens of
    # gpt-oss-120b (EP 4) for 523, 1853 at 32,768 for 1855, on an H100.
    (ANY, Schedule(128, W4A8_128, W4A8_128, tail=32, launch_dependents=True)),
)


# Tiles that fit the shared memory of every card from Ampere on, 99 KiB. Not measured on one.
AMPERE: tuple[tuple[float, Schedule], ...] = (
    (24, Schedule(16, Tile(64, 64, 4, 4, 2), Tile(64, 64, 4, 4, 2))),
    (ANY, Schedule(64, Tile(128, 32, 4, 4, 1, halvings=1), Tile(128, 32, 4, 4, 1, halvings=1))),
)

# Where all tiles of 16 rows fit on a Hopper GPU at once, the plain kernel is the faster one, as it fits an SM more than
# once: an H200 takes 40.8 us for 44.6 at 4 tokens of MiniMax-M2 (TP 4), 17.6 for 19.4 at 1 token of Qwen3-30B-A3B. But
# the deeper pipeline is, if an SM gets at most one tile and sums are at least this long: DeepSeek-V3 (TP 8) takes 25.3
# us for 29.7 at 1 token, Llama-4-Scout (by channel) 43.1 for 59.3.
DEEP: dict[Pair, int] = {"w8a8": 3072, "c8a8": 6144}


def one_round(tile: Tile, pair: Pair, tiles: int, cols: int, multiprocessors: int) -> Tile:
    """Returns the tile that is the faster one for `tiles` tiles of 16 rows and sums of `cols` columns."""
    if pair not in DEEP or tiles > multiprocessors * tile.plain.ctas:
        return tile
    return tile if tiles <= multiprocessors and cols >= DEEP[pair] else tile.plain


# As many tokens as these kernels are the faster ones for, of 40 candidates on an H100: us of all experts at 1, 2, 4 and
# 8 tokens, 8 routings that take turns, weights from memory. gpt-oss-20b, MXFP4: 25.4, 42.0, 76.5, - for 35.0, 52.6,
# 87.0, 114 by tile schedules, at least 17.5, 30.7, 58.7, 92 by the bytes that are read. On an H200, by two halves of
# K in both GEMMs, 24.6, 43.7, 71.8, 109 for 33.2, 51.5, 75.0, 94.5; Qwen3-30B-A3B, bf16: 23.9, 40.7, 70.8, 118.6, at 16
# tokens 182.9 for 27.7, 44.8, 75.6, 121.2, 186.2. FP8 takes half as long again by them.
# Slower: deeper pipelines at one token, also in shared memory, as code that isn't in a cache costs more than latency;
# bringing the second matrix to L2 while the first one is multiplied.
FEW: dict[Pair, tuple[FewTokens, ...]] = {
    "bf16": (FewTokens(16, FewTile(64, 128, 3), FewTile(64, 128, 3)),),
    "w4a16": (
        FewTokens(1, FewTile(64, 128, halves=2, eager=True), FewTile(64, 128, halves=2, splits=2, eager=True)),
        FewTokens(2, FewTile(64, 128), FewTile(64, 128, halves=2)),
        FewTokens(4, FewTile(64, 128, ahead=2), FewTile(64, 128, ahead=2)),
    ),
    # On an H200 DeepSeek-V3 (EP 4) takes 37.4 and 48.4 us at 1 and 2 tokens, 39.2 and 53.4 by tile schedules. At 4
    # tokens these are slower: 75.8 for 72.0.
    "nv4a16": (FewTokens(2, FewTile(64, 128, halves=2), FewTile(64, 128, ahead=3)),),
    # Qwen3-30B-A3B (EP 1) 13.8 and 17.6 for 19.0 and 24.2, Kimi-K2 (EP 8) 23.1 and 38.9 for 24.2 and 42.6; at 4 tokens
    # 31.3 for 38.7, and 61.5 for 51.6.
    "i4a16": (FewTokens(2, FewTile(64, 128, halves=2), FewTile(64, 128, ahead=3)),),
}

# Of bf16, for a second matrix of at most SHORT columns: Qwen3-235B-A22B (TP 8) takes 102 us at 16 tokens for 119.
SHORT, SHORT_TILE = 384, FewTile(128, 64, 3)
# As many programs as an H200 holds at once, and as many columns as each has at least: of 4 bits more programs share K
# where there are too few. Mixtral's INT4 takes 66.2 us at 1 token for 111.1, Llama-4-Scout's 31.0 for 57.9.
ENOUGH_PROGRAMS, LEAST_COLUMNS = 430, 2048


def second_few(tile: FewTile, pair: Pair, programs: float, cols: int) -> FewTile:
    """Returns the blocks of a second matrix of `cols` columns, of which there are `programs` to multiply."""
    if pair == "bf16":
        return SHORT_TILE if cols <= SHORT else tile
    splits = min(round(ENOUGH_PROGRAMS / programs), cols // LEAST_COLUMNS)
    return replace(tile, splits=max(splits, tile.splits))


# The same under `batch_invariant`: an output is one sum along K, as in every tile schedule, whatever its tiles. On an
# H100 gpt-oss-20b takes 31.8 and 82.6 us at 1 and 4 tokens that way, for 34.9 and 88.3 by tile schedules.
FEW_INVARIANT: dict[Pair, tuple[FewTokens, ...]] = {
    "bf16": FEW["bf16"],
    "w4a16": (FewTokens(4, FewTile(64, 256), FewTile(64, 256)),),
}
# Of these an H100 gave the same bits in every schedule. Of the others, and before Hopper, nobody has compared them: the
# schedule for so many rows serves all sizes under `batch_invariant`.
ONE_ORDER: tuple[Pair, ...] = ("bf16", "w8a16", "w4a16", "i4a16")
INVARIANT_ROWS = 24.0


def choose(pair: Pair, rows: float, cols: int, *, hopper: bool) -> Schedule:
    """Returns the schedule for `rows` rows per expert of `cols` columns."""
    known = HOPPER[pair] if hopper else AMPERE
    if hopper and pair == "i4a16" and cols < INT4_DEEP:
        known = known[1:]
    return next((schedule for limit, schedule in known if rows <= limit), known[-1][1])


def limits(pair: Pair, *, hopper: bool) -> list[float]:
    """Returns the rows per expert up to which each schedule but the last serves."""
    return [limit for limit, _ in (HOPPER[pair] if hopper else AMPERE)[:-1]]
