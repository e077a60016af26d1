# ruff: noqa: ANN001, ANN201, ANN202  (kernel arguments have no Python types)
# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportOperatorIssue=false, reportGeneralTypeIssues=false
"""Triton kernels that sort top-k entries by expert and write a grouped GEMM's tile schedule. Imported only for CUDA.

Every program sorts some blocks of entries of `ids` [N, K]. It needs each expert's count over all entries and over those
before its own. Up to SMALL_IDS entries it counts the ids itself, which then lie in L2; above, `_count_by_expert` has
counted for every program. Within a block, an entry's rank is the number of earlier entries with the same expert, so the
sort is stable.

Each kernel triggers programmatic dependent launch (PDL) for its successor, the first GEMM included: the grids are
small, so that an early launch does not starve them. With few entries the sort can run at the same time as the kernel
before it (BESIDE), which has waited for the ids, and writes nothing that the sort reads: it waits for that kernel last,
on behalf of the GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from eprt.launching import CachedKernel
from eprt.rounding import ceil_div, next_power_of_2

SMALL_IDS = 4096  # up to here counting again in every program is cheaper than another launch
BLOCK, SMALL_BLOCK = 128, 32  # entries per block, above SMALL_IDS and up to it: ranking one compares all its pairs
AT_ONCE = 256, 1024, 2048  # ids that every program counts at a time: as many as there are, if one holds them
MOST_PROGRAMS = 128  # each reads the counts of all programs
_CELLS = 16384  # counts read at a time
ENTRY = 4  # int32 per scheduler entry: expert, its first row, the row after its last, its first entry's index

_ENTRY = tl.constexpr(ENTRY)


@dataclass(frozen=True)
class RowTiles:
    """How each expert's rows are divided into row tiles.

    Attributes:
        m: rows per tile.
        tail: rows beyond m that an expert's last tile takes along (its residue); 0: none.
        high_first: experts with more rows than the mean come first, so that the persistent kernel's last tiles are the
            short ones.
    """

    m: int
    tail: int = 0
    high_first: bool = False


@dataclass(frozen=True)
class TileSchedule:
    """The row tiles of a grouped GEMM, on the device, in the order in which its persistent programs take them.

    Attributes:
        entries: int32 [bound, ENTRY].  num_entries: int32 [1], how many of them are valid.
        tile_counter: int32 [1], the dynamic scheduler's atomic counter (`gemm_gluon`); zero between GEMMs.
    """

    entries: torch.Tensor
    num_entries: torch.Tensor
    tile_counter: torch.Tensor
    tiles: RowTiles

    @classmethod
    def empty(cls, bound: int, tiles: RowTiles, device: torch.device) -> TileSchedule:
        memory = torch.empty(bound * ENTRY + 2, dtype=torch.int32, device=device)
        return cls(*memory.split((bound * ENTRY, 1, 1)), tiles)

    @property
    def bound(self) -> int:
        """The largest possible number of entries."""
        return self.entries.numel() // ENTRY


@triton.jit
def pdl_wait(LAUNCH_DEPENDENTS: tl.constexpr):
    """Waits for the previous kernel of a programmatic dependent launch (PDL); comes before a kernel's first access to
    memory. LAUNCH_DEPENDENTS: the next kernel may be set up from now on, on free SMs."""
    gdc_wait()
    if LAUNCH_DEPENDENTS:
        gdc_launch_dependents()


@triton.jit
def _experts_of(ids_ptr, s, num_ids, first, L):
    """Returns the entries' local experts, L where there is none. It reads past L1, as a kernel may do so before it
    waits."""
    own = tl.load(ids_ptr + s, mask=s < num_ids, other=first - 1, cache_modifier=".cg") - first
    return tl.where((own >= 0) & (own < L), own, L)


@triton.jit
def _counts(own, L, L_PAD: tl.constexpr):
    """Returns how often each local expert is among `own`."""
    return tl.histogram(own, L_PAD, mask=own < L)  # without a bin for L: L_PAD would be twice as large


@triton.jit
def _ranked(ids_ptr, start, num_ids, first, L, BLOCK_S: tl.constexpr):
    """Returns, for the block of entries from `start` on, their experts and their ranks within the block."""
    s = start + tl.arange(0, BLOCK_S)
    own = _experts_of(ids_ptr, s, num_ids, first, L)
    same = tl.zeros([BLOCK_S, 32], dtype=tl.int32)
    for begin in tl.static_range(0, BLOCK_S, 32):
        t = start + begin + tl.arange(0, 32)
        other = _experts_of(ids_ptr, t, num_ids, first, L)
        same += ((other[None, :] == own[:, None]) & (t[None, :] < s[:, None])).to(tl.int32)
    return own, tl.sum(same, axis=1)


@triton.jit
def tiles_of(rows, BLOCK_M: tl.constexpr, TAIL: tl.constexpr):
    """Returns how many tiles an expert's rows take, at least one."""
    return tl.maximum((rows - TAIL + BLOCK_M - 1) // BLOCK_M, 1)


@triton.jit
def _write_entries(
    entries_ptr, num_entries_ptr, expert, begin, rows,
    BLOCK_M: tl.constexpr, TAIL: tl.constexpr, HIGH_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes the schedule of experts with `rows` rows from `begin` on; the programs share the work."""
    tiles = tl.where(rows > 0, tiles_of(rows, BLOCK_M, TAIL), 0)
    first = tl.cumsum(tiles, axis=0) - tiles
    if HIGH_FIRST:
        high = tl.where(rows * tl.sum((rows > 0).to(tl.int32), axis=0) > tl.sum(rows, axis=0), tiles, 0)
        before = tl.cumsum(high, axis=0) - high
        first = tl.where(high > 0, before, tl.sum(high, axis=0) + first - before)
    for tile in range(tl.program_id(0), tl.max(tiles, axis=0), tl.num_programs(0)):
        entry = entries_ptr + (first + tile) * _ENTRY
        there = tile < tiles
        tl.store(entry, expert, mask=there)
        tl.store(entry + 1, begin, mask=there)
        tl.store(entry + 2, begin + rows, mask=there)
        tl.store(entry + 3, first, mask=there)
    if tl.program_id(0) == 0:
        tl.store(num_entries_ptr, tl.sum(tiles, axis=0))
        tl.store(num_entries_ptr + 1, 0)  # tile_counter


_SIZES = ["num_ids", "first", "L", "blocks"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["ids_ptr"])
def _count_by_expert(
    ids_ptr, counts_ptr, num_ids, first, L, blocks, L_PAD: tl.constexpr, BLOCK_S: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes, per program, each expert's count over its `blocks` blocks of entries."""
    if PDL:
        pdl_wait(True)
    start = tl.program_id(0) * blocks * BLOCK_S
    found = tl.zeros([L_PAD], dtype=tl.int32)
    for block in range(blocks):
        own = _experts_of(ids_ptr, start + block * BLOCK_S + tl.arange(0, BLOCK_S), num_ids, first, L)
        found += _counts(own, L, L_PAD)
    tl.store(counts_ptr + tl.program_id(0) * L_PAD + tl.arange(0, L_PAD), found)


@triton.jit
def _all_and_earlier(counts_ptr, L_PAD: tl.constexpr, CHUNK: tl.constexpr):
    """Returns each expert's count [L_PAD] over all programs' entries, and over those of earlier programs."""
    expert = tl.arange(0, L_PAD)
    total = tl.zeros([L_PAD], dtype=tl.int32)
    earlier = tl.zeros([L_PAD], dtype=tl.int32)
    for start in range(0, tl.num_programs(0), CHUNK):
        p = start + tl.arange(0, CHUNK)[:, None]
        part = tl.load(counts_ptr + p * L_PAD + expert[None, :], mask=p < tl.num_programs(0), other=0)
        total += tl.sum(part, axis=0)
        earlier += tl.sum(tl.where(p < tl.program_id(0), part, 0), axis=0)
    return total, earlier


@triton.jit
def _count_all_and_earlier(ids_ptr, num_ids, first, L, L_PAD: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr):
    """Returns the same as `_all_and_earlier` by counting the ids themselves."""
    total = tl.zeros([L_PAD], dtype=tl.int32)
    earlier = tl.zeros([L_PAD], dtype=tl.int32)
    for start in range(0, num_ids, CHUNK):
        s = start + tl.arange(0, CHUNK)
        other = _experts_of(ids_ptr, s, num_ids, first, L)
        total += _counts(other, L, L_PAD)
        earlier += _counts(tl.where(s < tl.program_id(0) * BLOCK_S, other, L), L, L_PAD)
    return total, earlier


@triton.jit
def _put(place_ptr, source_ptr, base, own, rank, start, num_ids, L, K: tl.constexpr):
    """Writes the sorted rows of a block's entries, expert e's from base[e] on."""
    s = start + tl.arange(0, own.shape[0])
    local = own < L
    place = tl.gather(base, tl.where(local, own, 0), 0) + rank
    tl.store(place_ptr + s, tl.where(local, place, -1), mask=s < num_ids)
    if source_ptr is not None:
        tl.store(source_ptr + place, s // K, mask=local)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=["ids_ptr"])
def _sort_by_expert(
    ids_ptr, counts_ptr, place_ptr, source_ptr, offsets_ptr, entries_ptr, num_entries_ptr, num_ids, first, L, blocks,
    K: tl.constexpr, L_PAD: tl.constexpr, BLOCK_S: tl.constexpr, CHUNK: tl.constexpr, BLOCK_M: tl.constexpr,
    TAIL: tl.constexpr, HIGH_FIRST: tl.constexpr, BESIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Writes each entry's sorted row, the offsets, and (unless None) the source rows and the tile schedule.

    counts_ptr: the output of `_count_by_expert`; None: each program sorts one block. `_count_by_expert` launches this
    kernel only after the ids were written, so they may be read before the wait for its counts.
    """
    if PDL and BESIDE:
        gdc_launch_dependents()
    elif PDL and counts_ptr is None:
        pdl_wait(True)
    start = tl.program_id(0) * blocks * BLOCK_S
    own, rank = _ranked(ids_ptr, start, num_ids, first, L, BLOCK_S)
    if counts_ptr is None:
        total, earlier = _count_all_and_earlier(ids_ptr, num_ids, first, L, L_PAD, BLOCK_S, CHUNK)
    else:
        if PDL:
            pdl_wait(True)
        total, earlier = _all_and_earlier(counts_ptr, L_PAD, CHUNK)
    expert = tl.arange(0, L_PAD)
    begin = tl.cumsum(total, axis=0) - total
    base = begin + earlier
    _put(place_ptr, source_ptr, base, own, rank, start, num_ids, L, K)
    if counts_ptr is not None:
        for block in range(1, blocks):
            base += _counts(own, L, L_PAD)
            own, rank = _ranked(ids_ptr, start + block * BLOCK_S, num_ids, first, L, BLOCK_S)
            _put(place_ptr, source_ptr, base, own, rank, start + block * BLOCK_S, num_ids, L, K)
    if entries_ptr is not None:
        _write_entries(entries_ptr, num_entries_ptr, expert, begin, total, BLOCK_M, TAIL, HIGH_FIRST)
    if tl.program_id(0) == 0:
        tl.store(offsets_ptr + expert, begin.to(tl.int64), mask=expert < L)
        tl.store(offsets_ptr + L, tl.sum(total, axis=0).to(tl.int64))
    if PDL and BESIDE:
        gdc_wait()


@triton.jit(do_not_specialize=["M", "L"], do_not_specialize_on_alignment=["counts_ptr"])
def _schedule_expert_major(
    counts_ptr, entries_ptr, num_entries_ptr, M, L, L_PAD: tl.constexpr, BLOCK_M: tl.constexpr, TAIL: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
):  # fmt: skip
    """Writes the schedule of L experts' blocks of M rows, of which `counts` are valid."""
    expert = tl.arange(0, L_PAD)
    rows = tl.load(counts_ptr + expert, mask=expert < L, other=0)
    _write_entries(entries_ptr, num_entries_ptr, expert, expert * M, rows, BLOCK_M, TAIL, HIGH_FIRST)


def sort_and_schedule(
    ids: torch.Tensor, first: int, L: int, tiles: RowTiles, *, beside: bool = False
) -> tuple[torch.Tensor, torch.Tensor, TileSchedule]:
    """Sorts as `sort_by_expert` does, and writes the tile schedule of a grouped GEMM over the sorted rows.

    Args:
        beside: the kernel launched last triggers PDL once it has waited, and doesn't write ids: run at the same time.

    Returns:
        place, source [N * K] int32 (the token n of each sorted row), and the schedule.
    """
    num_ids = ids.numel()
    source = torch.empty(num_ids, dtype=torch.int32, device=ids.device)
    work = TileSchedule.empty(min(L, num_ids) + num_ids // tiles.m, tiles, ids.device)
    _, place = sort_by_expert(ids, first, L, source, work, beside=beside)
    return place, source, work


def sort_by_expert(
    ids: torch.Tensor, first: int, L: int, source: torch.Tensor | None = None, work: TileSchedule | None = None, *,
    beside: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Sorts top-k entries by local expert, stably; those of non-local experts are left out.

    Args:
        ids: [N, K] int32, global.
        source, work: of `sort_and_schedule`, to be written too.  beside: see there.

    Returns:
        offsets [L + 1] int64, and place [N, K] int32: an entry's sorted row, -1 where its expert isn't local.
    """
    offsets = torch.empty(L + 1, dtype=torch.int64, device=ids.device)
    place = torch.empty_like(ids, memory_format=torch.contiguous_format)
    beside = beside and ids.numel() <= SMALL_IDS and ids.is_contiguous()  # else another kernel comes between
    (N, K), ids = ids.shape, ids.contiguous()
    num_ids, l_pad = N * K, max(16, next_power_of_2(L))
    counts, block_s, blocks = None, SMALL_BLOCK, 1
    chunk = next((count for count in AT_ONCE if num_ids <= count), AT_ONCE[-1])
    programs, counted = max(1, ceil_div(num_ids, block_s)), num_ids > SMALL_IDS
    if counted:
        block_s, chunk, blocks = BLOCK, max(1, _CELLS // l_pad), ceil_div(num_ids, BLOCK * MOST_PROGRAMS)
        programs = ceil_div(num_ids, blocks * block_s)
        counts = torch.empty((programs, l_pad), dtype=torch.int32, device=ids.device)
        _prepared_count(ids.device, l_pad, block_s)((programs, 1, 1), ids, counts, num_ids, first, L, blocks)
    entries, count, tiles = (None, None, RowTiles(1)) if work is None else (work.entries, work.num_entries, work.tiles)
    kernel = _prepared_place(ids.device, K, l_pad, block_s, chunk, tiles, counted, source is not None, beside)
    kernel((programs, 1, 1), ids, counts, place, source, offsets, entries, count, num_ids, first, L, blocks)
    return offsets, place


def schedule_expert_major(counts: torch.Tensor, M: int, tiles: RowTiles) -> TileSchedule:
    """Returns the tile schedule of the masked layout: L experts' blocks of M rows, of which counts [L] int32 are
    valid."""
    L = counts.shape[0]
    work = TileSchedule.empty(L * ceil_div(M, tiles.m), tiles, counts.device)
    kernel = _prepared_schedule(counts.device, max(16, next_power_of_2(L)), tiles)
    kernel((1, 1, 1), counts.contiguous(), work.entries, work.num_entries, M, L)
    return work


@cache
def _prepared_count(device: torch.device, l_pad: int, block_s: int) -> CachedKernel:
    arguments = torch.int32, torch.int32, 2, 2, 2, 2
    return CachedKernel(_count_by_expert, device, arguments, {"L_PAD": l_pad, "BLOCK_S": block_s}, pdl=True)


@cache
def _prepared_place(
    device: torch.device, K: int, l_pad: int, block_s: int, chunk: int, tiles: RowTiles, counted: bool, lists: bool,
    beside: bool,
) -> CachedKernel:  # fmt: skip
    """Compiles `_sort_by_expert`. counted: counts come from `_count_by_expert`, `chunk` of programs at a time
    instead of ids.  lists: it also writes a schedule."""
    counts, listed = torch.int32 if counted else None, torch.int32 if lists else None
    arguments = torch.int32, counts, torch.int32, listed, torch.int64, listed, listed, 2, 2, 2, 2
    sizes = {"K": K, "L_PAD": l_pad, "BLOCK_S": block_s, "CHUNK": chunk, **_constants(tiles), "BESIDE": beside}
    return CachedKernel(_sort_by_expert, device, arguments, sizes, pdl=True, num_warps=8)


@cache
def _prepared_schedule(device: torch.device, l_pad: int, tiles: RowTiles) -> CachedKernel:
    arguments = torch.int32, torch.int32, torch.int32, 2, 2
    return CachedKernel(_schedule_expert_major, device, arguments, {"L_PAD": l_pad, **_constants(tiles)})


def _constants(tiles: RowTiles) -> dict[str, Any]:
    return {"BLOCK_M": tiles.m, "TAIL": tiles.tail, "HIGH_FIRST": tiles.high_first}
