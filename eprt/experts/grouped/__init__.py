"""Triton's grouped GEMMs of our own: bf16, FP8, MXFP4, NVFP4 and INT4 weights, with nothing to install beside torch.

One small kernel sorts the top-k entries by expert and writes the tile schedule (`sort_by_expert_triton`). The first
GEMM gathers the rows it needs and ends in the activation. The second writes one row per top-k entry, and a last pass
weights and sums them. The GEMMs are persistent kernels that read the schedule on the device: the host reads nothing, a
call can be captured in a CUDA graph, and its cost follows the rows that came. ExpertMajorTokens (the masked layout) get
a schedule of their own and are read where they lie. On Hopper a few tokens of bf16 or 4-bit experts aren't sorted at
all (`few_triton`), unless they are to be FP8.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from eprt.config import WeightFormat
from eprt.experts.base import PreparedExecutor
from eprt.experts.grouped.schedules import (
    FEW,
    FEW_INVARIANT,
    FP8_PAIRS,
    INVARIANT_ROWS,
    ONE_ORDER,
    Pair,
    Schedule,
    choose,
    limits,
)
from eprt.experts.grouped.weights import GroupedMatrix
from eprt.experts.permute import plain_hidden
from eprt.support import Device
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, aligned
from eprt.weights import ExpertWeights

if TYPE_CHECKING:
    from eprt.experts.grouped.few import FewExperts
    from eprt.experts.grouped.launch import Gemm, Rows
    from eprt.experts.grouped.schedules import FewTokens
    from eprt.experts.sort_by_expert_triton import TileSchedule


PAIRS: dict[WeightFormat, Pair] = {
    "fp8_block": "w8a16",
    "fp8_tensor": "w8a16",
    "fp8_channel": "w8a16",
    "mxfp4": "w4a16",
    "nvfp4": "nv4a16",
    "int4": "i4a16",
}
# Where activations may be FP8.
FP8_TOKENS: dict[WeightFormat, Pair] = {
    "fp8_block": "w8a8",
    "fp8_tensor": "c8a8",
    "fp8_channel": "c8a8",
    "mxfp4": "w4a8",
}


class TritonGroupedExecutor(PreparedExecutor):
    """Computes with float32 accumulation, bf16 between the matrices; float32 and packed tokens become bf16 first.

    FP8 weights meet activations of two E4M3 numbers each, as exact as bf16. `RuntimeConfig.low_precision_activations`
    makes it one, with a scale for 128 values, as DeepSeek-V3 was trained; tokens that come packed so are then taken as
    they are. Beside weights with a scale per channel or tensor a token has one scale, as beside MXFP4, which is then
    decoded to E4M3 (`mxfp4_e4m3`): 4.3% of error instead of 0.3%. Sums don't depend on timing.
    """

    strided = True

    def _prepare(self, weights: ExpertWeights) -> None:
        config, device = self.config, self.device
        form, known = config.weight_format, FP8_TOKENS if self.runtime.low_precision_activations else PAIRS
        self._pair: Pair = known.get(form, PAIRS.get(form, "bf16"))
        prepare = partial(GroupedMatrix.prepare, device=device, e4m3=self._pair == "w4a8")
        self._first = prepare(weights.gate_up, weights.gate_up_bias, config.activation.parts)
        self._second = prepare(weights.down, weights.down_bias, 1)
        self._hopper = Device.of(device).sm >= 90

    @cached_property
    def _gemms(self) -> tuple[Gemm, Gemm]:
        from eprt.experts.grouped.launch import Chip, Gemm

        activation, chip = self.config.activation, Chip.of(self.device)
        return Gemm(self._first, activation, self._pair, chip), Gemm(self._second, None, self._pair, chip)

    @cached_property
    def _few_experts(self) -> FewExperts:
        from eprt.experts.grouped.few import FewExperts

        return FewExperts(self._gemms, self.shard)

    def _few(self, num_tokens: int) -> FewTokens | None:
        """For so few tokens that nothing has to be sorted; None: they aren't few. Sums are then of another order, but
        under `batch_invariant`."""
        return next((few for few in self._few_tiles if num_tokens <= few.tokens), None)

    @property
    def _few_tiles(self) -> tuple[FewTokens, ...]:
        known = FEW_INVARIANT if self.runtime.batch_invariant else FEW
        return known.get(self._pair, ()) if self._hopper else ()

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        matrices = {"gate_up": self._first, "down": self._second}
        return {
            f"{n}.{part}": tensor for n, matrix in matrices.items() for part, tensor in matrix.slot_tensors().items()
        }

    def _schedule(self, num_tokens: int) -> Schedule:
        """For the rows an expert gets if so many tokens of all ranks are routed evenly."""
        rows = num_tokens * self.config.top_k / self.shard.num_experts
        if self.runtime.batch_invariant and not (self._hopper and self._pair in ONE_ORDER):
            rows = INVARIANT_ROWS
        return choose(self._pair, rows, self.config.hidden_size, hopper=self._hopper)

    def _own_scales(self, hidden: Payload) -> torch.Tensor | None:
        """Returns the scales of tokens that come in the first GEMM's FP8, else None."""
        return hidden.scale if self._pair == "w8a8" and hidden.format == "fp8_block" else None

    def _rows(self, hidden: Payload, work: TileSchedule | None) -> Rows:
        """Tokens in the first GEMM's number format: the scheduled ones; None: all, in rows of whole 16 bytes."""
        from eprt.experts.grouped.launch import Rows, quantize_rows

        if (scales := self._own_scales(hidden)) is not None:
            return Rows(aligned(hidden.data), scales.reshape(-1, scales.shape[-1]).contiguous())
        plain = plain_hidden(hidden)
        if self._pair in FP8_PAIRS:
            return quantize_rows(plain, work, self._gemms[0])
        plain = plain.to(torch.bfloat16)
        return Rows(aligned(plain) if work is None else plain)

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        from eprt.experts.grouped.launch import both
        from eprt.experts.permute_triton import weighted_unpermute
        from eprt.experts.sort_by_expert_triton import RowTiles, sort_and_schedule

        N, K = tokens.ids.shape
        if few := self._few(N):
            self._few_tokens(few, tokens, out)
            return
        schedule = self._schedule(N)
        first, L = self.shard.first_expert, self.shard.num_local_experts
        rows = self._rows(tokens.hidden, None)
        beside = self._pair in FP8_PAIRS and self._own_scales(tokens.hidden) is None
        tiles = RowTiles(schedule.m, schedule.tail, schedule.second.warp_specialized)
        place, source, work = sort_and_schedule(tokens.ids, first, L, tiles, beside=beside)
        result = torch.empty((N * K, out.shape[1]), dtype=torch.bfloat16, device=out.device)
        both(self._gemms, replace(rows, source=source), work, schedule, (N * K,), result)
        weighted_unpermute(result, place, tokens.weights, out, tokens.every_row_read)

    def _few_tokens(self, few: FewTokens, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = plain_hidden(tokens.hidden).to(torch.bfloat16)
        dense = out.is_contiguous() and out.data_ptr() % 16 == 0
        whole = out if dense else out.clone(memory_format=torch.contiguous_format)
        ids, weights = tokens.ids.contiguous(), tokens.weights.contiguous()
        self._few_experts(few, hidden, ids, weights, whole, tokens.every_row_read, self.runtime.batch_invariant)
        if not dense:
            out.copy_(whole)

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        from eprt.experts.grouped.launch import both
        from eprt.experts.sort_by_expert_triton import RowTiles, schedule_expert_major

        L, M = out.shape[:2]
        schedule = self._schedule(tokens.allowed_tokens)
        tiles = RowTiles(schedule.m, schedule.tail, schedule.second.warp_specialized)
        work = schedule_expert_major(tokens.counts, M, tiles)
        both(self._gemms, self._rows(tokens.hidden, work), work, schedule, (L, M), out)

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Compiles every schedule that up to `max_rows` rows can need, many at once. Nothing is tuned."""
        from eprt.compile_ahead import compile_ahead

        self._compile(compile_ahead, max_rows, top_k)

    def start_compiling(self, max_rows: int, top_k: int | None = None) -> None:
        from eprt.compile_ahead import start_compiling

        self._compile(start_compiling, max_rows, top_k)

    def _compile(self, how: Callable[..., None], max_rows: int, top_k: int | None) -> None:
        E, shard = self.shard.num_experts, self.shard
        attempt = partial(self._try_all, max_rows, top_k)
        how(attempt, self.device, begin=shard.first_expert / E, share=shard.num_local_experts / E)

    def _try_all(self, max_rows: int, top_k: int | None) -> None:
        """Makes every kind of call of up to `max_rows` rows."""
        from eprt.experts.sort_by_expert_triton import AT_ONCE, SMALL_IDS

        K, form = self.config.top_k, self.runtime.token_format
        # One number of tokens for each schedule and each way of sorting: the last that it serves, as far as that can
        # come.
        starts = limits(self._pair, hopper=self._hopper)
        counts = {int(limit * self.shard.num_experts) // K for limit in starts} | {max_rows}
        counts |= {few.tokens for few in self._few_tiles} | {ids // (top_k or K) for ids in (*AT_ONCE, SMALL_IDS)}
        # Tiles of a few rows also go by the number of tiles.
        counts |= {1, 2, 3, 4} | {1 << power for power in range(3, (16 * self.shard.num_experts // K).bit_length())}
        for rows in sorted({min(max(count, 1), max_rows) for count in counts}):
            if form in (None, "flat"):
                self._try_flat(rows, top_k or K, self.shard.num_experts)  # nothing is computed
                if self.runtime.payload == "fp8_block":
                    self._try_flat(rows, top_k or K, self.shard.num_experts, "fp8_block")
            if form in (None, "expert_major"):
                self._try_expert_major(rows, valid=0)
