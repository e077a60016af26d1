"""Launches the experts of a few tokens (`few_triton`). Imported only where its kernels run."""
# Triton's launchers aren't typed.
# pyright: basic, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch

from eprt.experts.grouped.few_triton import FewConstants, few_gemm, few_sum
from eprt.experts.grouped.launch import Gemm, _kinds
from eprt.experts.grouped.schedules import FewTile, FewTokens, second_few
from eprt.experts.permute_triton import weighted_unpermute
from eprt.launching import CachedKernel, like
from eprt.placement import ExpertShard
from eprt.rounding import ceil_div, next_power_of_2, round_up
from eprt.tokens import aligned

SUM_COLUMNS = 512  # of a program


class FewExperts:
    """Both GEMMs and the sum, ready to be launched for a few FlatTokens."""

    def __init__(self, gemms: tuple[Gemm, Gemm], shard: ExpertShard) -> None:
        self._gemms = gemms
        self._local = shard.first_expert, shard.num_local_experts
        self._share = shard.num_local_experts / shard.num_experts
        self._seconds: dict[tuple[FewTokens, int], FewTile] = {}
        self._prepared: dict[Any, CachedKernel] = {}

    def __call__(
        self, few: FewTokens, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
        every_row: bool, rounded: bool,
    ) -> None:  # fmt: skip
        """Writes [N, H] as the executor does.

        Args:
            hidden: bf16 [N, H], N at most `few.tokens`.  ids, weights: [N, K], contiguous.
            out: contiguous, begins at a multiple of 16 bytes.
            rounded: entries' results become bf16 before they are added up, as with many tokens.
        """
        (first, second), (N, K), device = self._gemms, ids.shape, out.device
        between = torch.empty((N * K, round_up(first.width, 16)), dtype=torch.bfloat16, device=device)
        self._multiply(first, few.first, few.tokens, aligned(hidden), ids, weights, between)
        if rounded:
            rows = torch.empty((N * K, second.width), dtype=torch.bfloat16, device=device)
            places = torch.empty((N, K), dtype=torch.int32, device=device)
            self._multiply(second, few.second, few.tokens, between, ids, None, rows, places)
            weighted_unpermute(rows, places, weights, out, every_row)
            return
        tile = self._seconds.get((few, N * K)) or self._second(few, N * K)
        rows = torch.empty((tile.splits, N * K, second.width), dtype=torch.float32, device=device)
        self._multiply(second, tile, few.tokens, between, ids, weights, rows[0])
        block = min(SUM_COLUMNS, next_power_of_2(second.width))
        kernel = self._sum(K, second.width, tile.splits, block, out.dtype, every_row, device)
        kernel((N, ceil_div(second.width, block), 1), rows, ids, out, N * K, *self._local)

    def _second(self, few: FewTokens, entries: int) -> FewTile:
        gemm, tile = self._gemms[1], few.second
        programs = entries * self._share * ceil_div(gemm.matrix.rows, tile.n)
        tile = self._seconds[few, entries] = second_few(tile, gemm.pair, programs, gemm.matrix.cols)
        return tile

    def _multiply(
        self, gemm: Gemm, tile: FewTile, tokens: int, x: torch.Tensor, ids: torch.Tensor,
        weights: torch.Tensor | None, out: torch.Tensor, places: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        (N, K), matrix = ids.shape, gemm.matrix
        tiles = gemm.weight_blocks(tile.n, tile.k)[0] if gemm._constants["W_TMA"] else None
        arguments = (
            x, gemm._weights, tiles, matrix.scale, matrix.factor, matrix.bias, ids, weights,
            places, out, N, *self._local, x.stride(0), out.stride(0),
        )  # fmt: skip
        key = gemm, tile, tokens, K, places is None, like(x.stride(0)), like(out.stride(0))
        kernel = self._prepared.get(key)
        if kernel is None:
            # Of bf16 at least as many ids as threads: with fewer the kernel takes 186 us for 153 at 16 tokens of
            # LFM2-8B-A1B (top 4), for reasons that its machine code doesn't show.
            k_pad = max(next_power_of_2(K), 8 if gemm.pair == "bf16" else 1)
            sizes = {"TOKENS": 16 // tile.halves, "TOP_K": K, "K_PAD": k_pad, "BLOCK_N": tile.n}
            sizes |= {"BLOCK_K": tile.k, "STAGES": tile.stages, "AHEAD": tile.ahead, "EAGER": tile.eager}
            sizes |= {"HALVES": tile.halves, "SPLITS": tile.splits}
            known = {"C": FewConstants(**gemm._constants, **sizes)}
            options = {"num_warps": 4 * tile.halves, "num_stages": tile.stages}
            if tile.halves == 2:
                options["maxnreg"] = 80  # so three programs fit an SM
            kernel = CachedKernel(few_gemm, x.device, _kinds(arguments), known, pdl=True, **options)
            self._prepared[key] = kernel
        kernel((ceil_div(matrix.rows, tile.n), N * K, tile.splits), *arguments)

    def _sum(
        self, K: int, H: int, splits: int, block: int, dtype: torch.dtype, every_row: bool, device: torch.device
    ) -> CachedKernel:
        key = K, splits, dtype, every_row
        if key not in self._prepared:
            arguments = torch.float32, torch.int32, dtype, 2, 2, 2
            sizes = {"H": H, "TOP_K": K, "K_PAD": next_power_of_2(K), "SPLITS": splits, "BLOCK_H": block}
            known = {**sizes, "EVERY_ROW": every_row}
            self._prepared[key] = CachedKernel(few_sum, device, arguments, known, pdl=True)
        return self._prepared[key]
