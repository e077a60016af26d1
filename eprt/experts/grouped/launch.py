"""Launches the grouped GEMM. Imported only where its kernels run."""
# Triton's launchers aren't typed.
# pyright: basic, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from eprt.config import Activation
from eprt.experts.activation_triton import constants
from eprt.experts.grouped.four_bit import UNIT
from eprt.experts.grouped.gemm_triton import GemmConstants, grouped_gemm
from eprt.experts.grouped.quantize_triton import quantize_tiles
from eprt.experts.grouped.schedules import (
    FOUR_BIT_PAIRS,
    FP8_PAIRS,
    TOKEN_SCALED,
    Pair,
    Schedule,
    Tile,
    one_round,
)
from eprt.experts.grouped.weights import GroupedMatrix
from eprt.experts.sort_by_expert_triton import TileSchedule
from eprt.launching import INT32, CachedKernel, like, starts_aligned
from eprt.rounding import ceil_div, next_power_of_2, round_up
from eprt.support import Device
from eprt.weights import FP8_BLOCK

_CPU_PROGRAMS = 3  # the interpreter runs them one after another: a few, so that each takes several tiles
_OF_META = 132  # multiprocessors of a GPU that isn't here, an H100's; some kernels of few rows depend on it
# Triton versions the warp-specialized kernel was compiled with: Gluon is experimental, and changes.
_GLUON_TRITON = (3, 6), (3, 9)
_QUANTIZED_AT_ONCE = 8192  # values per program: 64 per thread
Weights = tuple[Any, Any]  # and their scales


@dataclass(frozen=True)
class Chip:
    """Says what kernels may use on a device.

    Attributes:
        multiprocessors: SMs, which is how many programs run at once if each takes a whole one.
        hopper: has TMA.
        warp_specialized: runs warp-specialized kernels (Hopper, with a known version of Triton).
    """

    multiprocessors: int
    hopper: bool
    warp_specialized: bool = False

    @classmethod
    def of(cls, device: torch.device) -> Chip:
        found = Device.of(device)
        if found.kind == "cpu":
            return cls(_CPU_PROGRAMS, False)
        known = _GLUON_TRITON[0] <= tuple(map(int, triton.__version__.split(".")[:2])) <= _GLUON_TRITON[1]
        count = _OF_META if device.type == "meta" else torch.cuda.get_device_properties(device).multi_processor_count
        return cls(count, found.sm >= 90, found.sm == 90 and known)


@dataclass(frozen=True)
class Rows:
    """The tokens that a GEMM reads.

    Attributes:
        data: [rows, K] or expert-major [L, M, K], last dimension contiguous; in w8a16 twice as wide.
        scale: [rows, ceil(K / 128)] float32 of E4M3 data, of TOKEN_SCALED pairs [rows, 1]; of expert-major data
            [L * M, ..].
        source: int32, the row of `data` for each scheduled row; None: the same row.
    """

    data: torch.Tensor
    scale: torch.Tensor | None = None
    source: torch.Tensor | None = None

    @property
    def consecutive(self) -> bool:
        """Tells whether each tile's rows follow each other, so that TMA can bring them."""
        return self.source is None and self.data.dim() == 2


class Gemm:
    """The grouped GEMM with one of the two expert matrices, ready to be launched.

    Args:
        activation: the first matrix's epilogue; None for the second.
    """

    def __init__(self, matrix: GroupedMatrix, activation: Activation | None, pair: Pair, chip: Chip) -> None:
        self.matrix = matrix
        self.pair: Pair = pair
        self._chip = chip
        self._weights = matrix.data.flatten(0, 1)
        self._blocks: dict[tuple[int, int, bool], Weights] = {}
        self._prepared: dict[Any, CachedKernel] = {}
        self._constants: dict[str, Any] = {
            "N": matrix.rows,
            "K": matrix.cols,
            "W_STRIDE": self._weights.shape[1],
            "W_ROWS": self._weights.shape[0],
            "PAIR": pair,
            "UNIT_SCALES": 0 if matrix.scale is None or pair not in FOUR_BIT_PAIRS else matrix.scale.shape[-1],
            "ZEROS": matrix.zeros,
            "FIRST": activation is not None,
            **constants(activation),
            "W_TMA": chip.hopper and pair not in FOUR_BIT_PAIRS,
        }

    @property
    def width(self) -> int:
        """The number of columns that it writes."""
        return self.matrix.rows // self.matrix.parts

    def __call__(self, rows: Rows, work: TileSchedule, schedule: Schedule, tile: Tile, out: torch.Tensor) -> None:
        """Writes [rows, width], or the expert-major form of it, for the scheduled rows only."""
        data = rows.data
        if tile.warp_specialized and not self._fits_warp_specialized(rows, out):
            tile = tile.plain
        elif tile.warp_specialized and schedule.m == 16 and data.dim() == 2:  # of slabs, bounds say little
            tiles = (work.bound - work.bound // (schedule.m + 1)) * ceil_div(self.matrix.rows, tile.n)
            tile = one_round(tile, self.pair, tiles, self.matrix.cols, self._chip.multiprocessors)
        x_tma = rows.consecutive and (tile.warp_specialized or (tile.tma and self._chip.hopper))
        strides = *_strides(data), *_strides(out)
        weights = self.weight_blocks(tile.n, tile.k, tile.warp_specialized)
        arguments = (*self._arguments(rows, weights, work, schedule, tile, x_tma, out), *strides)
        grid = min(self._chip.multiprocessors * tile.ctas, work.bound * ceil_div(self.matrix.rows, tile.n)), 1, 1
        if not starts_aligned(data, out, data if rows.scale is None else rows.scale):
            known = self._known(GemmConstants, schedule, tile, x_tma)
            grouped_gemm[grid](*arguments, C=known, PDL=False, **self._options(tile))
            return
        cut = schedule.m, schedule.tail, schedule.group, schedule.launch_dependents, tile, x_tma
        key = (*cut, data.dtype, out.dtype, rows.source is None, *map(like, strides))
        kernel = self._prepared.get(key)
        if kernel is None:
            kernel = self._prepared[key] = self._compile(arguments, schedule, tile, x_tma)
        kernel(grid, *arguments)

    def _arguments(
        self, rows: Rows, weights: Weights, work: TileSchedule, schedule: Schedule, tile: Tile, x_tma: bool,
        out: torch.Tensor,
    ) -> tuple[Any, ...]:  # fmt: skip
        """Returns the arguments of the tile's kernel, but for strides."""
        data = rows.data
        common = *weights, self.matrix.factor, self.matrix.bias, out, work.entries, work.num_entries
        if not tile.warp_specialized:
            tokens = TensorDescriptor.from_tensor(data, [schedule.m, tile.k]) if x_tma else None
            return data, tokens, rows.source, rows.scale, *common
        from eprt.experts.grouped.constants_gluon import row_blocks

        tokens = row_blocks(data, schedule.m >> tile.halvings) if x_tma else None
        tail = row_blocks(data, schedule.tail) if x_tma and schedule.tail else None
        return data, tokens, tail, rows.source, rows.scale, *common, work.tile_counter

    def _compile(self, arguments: tuple[Any, ...], schedule: Schedule, tile: Tile, x_tma: bool) -> CachedKernel:
        kernel, kind, options = grouped_gemm, GemmConstants, self._options(tile)
        if tile.warp_specialized:
            from eprt.experts.grouped.constants_gluon import KernelConstants
            from eprt.experts.grouped.gemm_gluon import grouped_gemm_warp_specialized

            kernel, kind, options = grouped_gemm_warp_specialized, KernelConstants, {"num_warps": 4}
        known = {"C": self._known(kind, schedule, tile, x_tma)}
        return CachedKernel(kernel, self._weights.device, _kinds(arguments), known, pdl=True, **options)

    def _known(self, kind: type[GemmConstants], schedule: Schedule, tile: Tile, x_tma: bool) -> GemmConstants:
        """Returns the kernel's compile-time constants."""
        return kind(
            **self._constants,
            BLOCK_M=schedule.m,
            BLOCK_N=tile.n,
            BLOCK_K=tile.k,
            STAGES=tile.stages,
            GROUP_M=schedule.group,
            TAIL=schedule.tail,
            SWAP=tile.swap,
            HALVINGS=tile.halvings,
            FLATTEN=tile.flatten and x_tma,
            X_TMA=x_tma,
            LAUNCH_DEPENDENTS=schedule.launch_dependents,
        )

    def _options(self, tile: Tile) -> dict[str, Any]:
        """Returns Triton's launch options. With 4 bits also a register limit: the most per thread with which
        `tile.ctas` programs fit an SM's 65,536. ptxas alone takes up to 255 for some sizes, and gains nothing."""
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        if self.pair in FOUR_BIT_PAIRS:
            options["maxnreg"] = min(255, 65536 // (tile.ctas * tile.warps * 32) // 8 * 8)
        return options

    @cached_property
    def _whole_parts(self) -> bool:
        """Tells whether the columns are whole parts of the warp-specialized kernel's. Nothing is masked within a part
        where the producer's threads copy; TMA reads zeros past the last column."""
        from eprt.experts.grouped.constants_gluon import block_columns

        return self.matrix.cols % block_columns(self.pair) == 0

    def _fits_warp_specialized(self, rows: Rows, out: torch.Tensor) -> bool:
        """Tells whether the warp-specialized kernel takes these rows: it copies 16 bytes at a time, and offsets have 32
        bits."""
        data = rows.data
        copied = _strides(data)[0] % 16 == 0 and starts_aligned(data, out, data if rows.scale is None else rows.scale)
        fits = self._chip.warp_specialized and copied and data.numel() < INT32
        return fits and (rows.consecutive or self._whole_parts)

    def weight_blocks(self, n: int, k: int, warp_specialized: bool = False) -> Weights:
        """Returns the weights and their scales as a kernel reads them, pointers or TMA descriptors of blocks [n, k]."""
        block = n, k, warp_specialized
        if block not in self._blocks:
            self._blocks[block] = self._make_blocks(*block)
        return self._blocks[block]

    def _make_blocks(self, n: int, k: int, warp_specialized: bool) -> Weights:
        matrix = self.matrix
        if not warp_specialized:
            if not self._constants["W_TMA"]:
                return self._weights, matrix.scale
            return TensorDescriptor.from_tensor(self._weights[:, : matrix.cols], [n, k]), matrix.scale
        from eprt.experts.grouped.constants_gluon import BLOCK_K, row_blocks, scale_blocks, weight_blocks

        if self.pair not in FOUR_BIT_PAIRS:
            return row_blocks(self._weights[:, : matrix.cols], n), matrix.scale
        cut = ceil_div(matrix.cols, BLOCK_K), next_power_of_2(n // UNIT), k // BLOCK_K
        return weight_blocks(matrix.data, *cut), scale_blocks(matrix.scale, *cut)


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns what a kernel is specialized for: tensors by their dtype, integers by their class (`like`)."""
    return tuple(a.dtype if isinstance(a, torch.Tensor) else like(a) if isinstance(a, int) else a for a in arguments)


def quantize_rows(data: torch.Tensor, work: TileSchedule | None, gemm: Gemm) -> Rows:
    """Quantizes the scheduled rows (None: all rows) to E4M3 for `gemm`, with a scale per 128 values or, of
    TOKEN_SCALED pairs, per row; others stay garbage."""
    K, cols, split = data.shape[-1], round_up(gemm.matrix.cols, 16), gemm.pair == "w8a16"
    group = next_power_of_2(cols) if gemm.pair in TOKEN_SCALED else FP8_BLOCK
    height, tail = (work.tiles.m, work.tiles.tail) if work else (16, 0)
    at_once = min(height, max(1, _QUANTIZED_AT_ONCE // group))
    height = height if work else at_once
    known = {"K": K, "WIDTH": cols, "GROUP": group, "ROWS": at_once, "BLOCK_M": height, "TAIL": tail, "SPLIT": split}
    groups, width = ceil_div(K, group), cols * (2 if split else 1)
    codes = torch.empty((*data.shape[:-1], width), dtype=torch.float8_e4m3fn, device=data.device)
    scale = torch.empty((*data.shape[:-1], groups), dtype=torch.float32, device=data.device)
    pieces = groups * ceil_div(height + tail, at_once)
    tiles = (work.bound if work else ceil_div(data.shape[0], height)) * pieces
    entries, count = (None, None) if work is None else (work.entries, work.num_entries)
    numbers = *_strides(data), width
    grid = min(gemm._chip.multiprocessors * 64, tiles), 1, 1
    if starts_aligned(data):
        kernel = _prepared_quantize(data.device, data.dtype, work is not None, *map(like, numbers), **known)
        kernel(grid, data, codes, scale, entries, count, data.shape[0], *numbers)
    else:
        quantize_tiles[grid](data, codes, scale, entries, count, data.shape[0], *numbers, **known, PDL=False)
    return Rows(codes, scale.view(-1, groups))


@cache
def _prepared_quantize(
    device: torch.device, dtype: torch.dtype, listed: bool, stride: int, skip: int, width: int, **known: int
) -> CachedKernel:
    """Compiles the kernel for strides like these. `listed`: it reads a tile schedule."""
    entries = torch.int32 if listed else None
    arguments = dtype, torch.float8_e4m3fn, torch.float32, entries, entries, 2, stride, skip, width
    return CachedKernel(quantize_tiles, device, arguments, known, pdl=True)


def both(
    gemms: tuple[Gemm, Gemm], rows: Rows, work: TileSchedule, schedule: Schedule, count: tuple[int, ...],
    out: torch.Tensor,
) -> None:  # fmt: skip
    """Runs both GEMMs into `out`, with an intermediate of `count` rows ([L, M] of them if expert-major)."""
    first, second = gemms
    # Rows of whole 16 bytes, whatever the intermediate size.
    stride = round_up(first.width, 16)
    between = torch.empty((*count, stride), dtype=torch.bfloat16, device=out.device)[..., : second.matrix.cols]
    first(rows, work, schedule, schedule.first, between)
    middle = Rows(between)
    if second.pair in FP8_PAIRS:
        middle = quantize_rows(between, work, second)
    second(middle, work, schedule, schedule.second, out)


def _strides(rows: torch.Tensor) -> tuple[int, int]:
    """Returns the elements between rows, and how many more lie between two experts' blocks than their rows take."""
    if rows.dim() == 2:
        return rows.stride(0), 0
    return rows.stride(1), rows.stride(0) - rows.shape[1] * rows.stride(1)
