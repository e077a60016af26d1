"""Schedules that humming's heuristics don't think of, and how one is found faster than another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from eprt.experts.permute import group_by_expert
from eprt.experts.sample_tokens import sample_ids
from eprt.rounding import round_up
from eprt.timing import device_microseconds

ANY_ROWS = 1 << 30
TRIALS = 5  # routings a schedule is timed on
SCHEDULES_VERSION = 2  # of the candidates below: results of another version are tuned again
LAZY_STEP = 4  # without warm-up one schedule serves 16 times as many rows: fewer to compile on the way


def _narrow(block: tuple[int, int, int], warp: tuple[int, int, int], stages: int, ctas: int) -> dict[str, Any]:
    """An `mma` schedule that splits neither K (no stream-K) nor producers from consumers."""
    return {
        "mma_type": "mma",
        "block_shape": list(block),
        "warp_shape": list(warp),
        "num_stages": stages,
        "num_ctas_per_sm": ctas,
        "use_stream_k": False,
        "use_warp_spec": False,
        "use_tma": False,
        "use_pdl": True,
    }


# Few rows an expert: the best of 193 schedules drawn from all that humming 0.1.19 accepts, timed on an H200 on both
# matrices of gpt-oss-120b (32 and 128 rows) and DeepSeek-V4-Flash (48 and 192 rows) at EP4. Tiles 64 columns wide,
# with four to six CTAs a multiprocessor, beat humming's own choice there by 9 to 17%.
SMALL_ROW_SCHEDULES: tuple[dict[str, Any], ...] = (
    _narrow((8, 64, 128), (8, 32, 64), stages=3, ctas=6),
    _narrow((8, 64, 128), (8, 64, 32), stages=4, ctas=6),
    _narrow((8, 64, 128), (8, 64, 32), stages=4, ctas=4),
    _narrow((8, 128, 128), (8, 64, 32), stages=5, ctas=2),
    _narrow((8, 64, 256), (8, 32, 128), stages=4, ctas=4),
)
MANY_ROWS = 16  # rows an expert from which those aren't tried


def neighbours(schedule: dict[str, Any], batch_invariant: bool) -> list[dict[str, Any]]:
    """Schedules one step from humming's choice: pipeline depth, CTAs a multiprocessor, cache hint, stream-K."""
    stages, ctas = schedule.get("num_stages", 2), schedule.get("num_ctas_per_sm", 1)
    changes: list[dict[str, Any]] = [
        {"num_stages": stages - 1},
        {"num_stages": stages + 1},
        {"num_ctas_per_sm": ctas + 1},
        {"num_ctas_per_sm": max(1, ctas - 1)},
        {"evict_weights_first": True},
    ]
    if not batch_invariant:
        changes.append({"use_stream_k": not schedule.get("use_stream_k", True)})
    return [{**schedule, **change} for change in changes]


def unique(schedules: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without repeats, in order."""
    return list({json.dumps(schedule, sort_keys=True): schedule for schedule in schedules}.values())


def row_bucket(rows: int, step: int = 1) -> int:
    """The smallest power of `2 ** step` that holds `rows`."""
    exponent = (max(rows, 1) - 1).bit_length()
    return 1 << round_up(exponent, step)


@dataclass(frozen=True)
class EvenRouting:
    """What a layer's experts are tuned for: tokens that choose K of E experts evenly.

    Attributes:
        max_rows: rows that all local experts together expect at most.
    """

    top_k: int
    num_experts: int
    max_rows: int

    @property
    def buckets(self) -> list[int]:
        """1, 2, 4, ... up to the power of two that holds `max_rows`."""
        return [1 << power for power in range(row_bucket(self.max_rows).bit_length())]

    def tokens(self, rows: int, num_local: int) -> int:
        """Tokens, of all ranks, that bring about so many rows."""
        return max(1, round(rows * self.num_experts / (self.top_k * num_local)))

    def sample_offsets(self, rows: int, num_local: int, device: torch.device) -> list[torch.Tensor]:
        """Offsets [L + 1] of a few such batches, so that they read different experts' weights."""
        tokens = self.tokens(rows, num_local)
        samples = [sample_ids(tokens, self.top_k, self.num_experts, device, seed) for seed in range(TRIALS)]
        return [group_by_expert(ids, 0, num_local).offsets for ids in samples]


class Trial:
    """Times schedules of one GEMM on routings that read different experts' weights, and compares their results.

    Args:
        launch: (kernel table, offsets) -> one launch, into `out`.
        layouts: offsets or counts of each routing.
        valid: which rows of `out` the first of them covers; what a kernel leaves in others doesn't matter.
    """

    def __init__(
        self,
        launch: Callable[[torch.Tensor, torch.Tensor], None],
        layouts: Sequence[torch.Tensor],
        out: torch.Tensor,
        valid: torch.Tensor,
    ) -> None:
        self._launch = launch
        self._layouts = layouts
        self._out = out
        self._valid = valid
        self._expected: torch.Tensor | None = None

    def microseconds(self, table: torch.Tensor) -> float:
        """Infinite for a schedule whose result isn't the first one's."""
        self._out.zero_()
        self._launch(table, self._layouts[0])
        found = self._out[self._valid].float()
        if self._expected is None:
            self._expected = found
        if not bool((found - self._expected).norm() <= 1e-2 * self._expected.norm()):
            return float("inf")
        return device_microseconds(*[partial(self._launch, table, layout) for layout in self._layouts], repeats=2)
