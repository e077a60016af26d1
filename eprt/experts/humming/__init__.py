"""humming's JIT grouped GEMMs around a fused activation: MXFP4, NVFP4 and FP8 weights on SM80 and later.

FlatTokens: rows are copied into expert order (`eprt.experts.permute`), go through both GEMMs, and are weighted and
summed back. ExpertMajorTokens go in as they are (`grouped_masked`). Nothing is read by the host and every
buffer's size follows from the tokens' shape, so a call can be captured in a CUDA graph and replayed with other counts.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from eprt.config import TokenFormat
from eprt.expert_major import ExpertOrder
from eprt.experts.base import PreparedExecutor
from eprt.experts.humming.gemm import FP8_INPUT_SCHEMAS, GemmShape, GemmType, GroupedGemm
from eprt.experts.humming.rows import RowKernel, RowLayout
from eprt.experts.permute import group_by_expert, group_rows, plain_hidden, weighted_unpermute
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import ExpertWeights

# What a dispatcher's format asks of the GEMMs; None: either may come.
_GEMM_TYPES: dict[TokenFormat | None, tuple[GemmType, ...]] = {
    "flat": ("grouped_contiguous",),
    "expert_major": ("grouped_masked",),
    None: ("grouped_contiguous", "grouped_masked"),
}


class HummingExecutor(PreparedExecutor):
    """Computes in bf16 with float32 accumulation; float32 and packed tokens are converted first.

    `RuntimeConfig.low_precision_activations` quantises activations to FP8 for MXFP4 (a scale per token) and FP8 weights
    (a scale per 128 values); NVFP4 weights keep bf16 activations, for which alone humming has Hopper kernels.
    `deterministic` and `batch_invariant` ask for batch-invariant schedules.

    Calls on several streams may overlap; two graphs captured on the same stream must not replay at the same time.
    """

    def _prepare(self, weights: ExpertWeights) -> None:
        config, shard = self.config, self.shard
        H, parts = config.hidden_size, config.activation.parts
        width = shard.slice_intermediate(config.intermediate_size)
        I = width.stop - width.start
        self._fp8 = self.runtime.low_precision_activations and config.weight_format in FP8_INPUT_SCHEMAS
        ordered = self.runtime.deterministic or self.runtime.batch_invariant
        make = partial(GroupedGemm, device=self.device, fp8_inputs=self._fp8, batch_invariant=ordered)
        shape = GemmShape(parts, I, H, hidden_side="cols")
        like = self.pattern if isinstance(self.pattern, HummingExecutor) else None
        per_row = None if like is None else like._gate_up.channel_scale
        self._gate_up = make(weights.gate_up, weights.gate_up_bias, shape, channel_scale=per_row)
        self._down = make(weights.down, weights.down_bias, GemmShape(1, H, I, hidden_side="rows"))
        self._row_kernels: dict[tuple[str, bool, int], RowKernel] = {}

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        matrices = {"gate_up": self._gate_up, "down": self._down}
        return {f"{name}.{part}": tensor for name, gemm in matrices.items() for part, tensor in gemm.tensors.items()}

    def _expected_rows(self, num_tokens: int) -> int:
        """Returns how many rows `num_tokens` tokens bring to the local experts if routing is even."""
        config, L = self.config, self.shard.num_local_experts
        return max(1, num_tokens * config.top_k * L // config.num_experts)

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        scale, order, rows = self._sorted_inputs(tokens)
        expected = self._expected_rows(tokens.num_rows)
        result = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        self._experts(rows, scale, order.offsets, "grouped_contiguous", expected, result)
        weighted_unpermute(result, order, tokens.weights, out, every_row=tokens.every_row_read)

    def _sorted_inputs(self, tokens: FlatTokens) -> tuple[torch.Tensor | None, ExpertOrder, torch.Tensor]:
        """Returns (scale or None, order, rows [N * K, H]) in the first GEMM's number format."""
        hidden, first, L = plain_hidden(tokens.hidden), self.shard.first_expert, self.shard.num_local_experts
        if not self._fp8:
            rows, order = group_rows(hidden, tokens.ids, first, L, torch.bfloat16)
            return None, order, rows
        order = group_by_expert(tokens.ids, first, L)
        plain = hidden.to(torch.bfloat16).contiguous()
        rows, scale = self._rows("scatter", scatter_width=tokens.ids.shape[1])(
            plain, tokens.ids.numel(), scatter_idx=order.place
        )
        return scale, order, rows

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        L, M = out.shape[:2]
        rows = plain_hidden(tokens.hidden).to(torch.bfloat16).reshape(L * M, -1)
        scale = None
        if self._fp8:
            rows, scale = self._rows("grouped_mask")(rows, L * M, expert_tokens=tokens.counts)
        direct = out.dtype == torch.bfloat16
        result = out.view(L * M, -1) if direct else out.new_empty((L * M, out.shape[2]), dtype=torch.bfloat16)
        expected = self._expected_rows(tokens.allowed_tokens)
        self._experts(rows, scale, tokens.counts, "grouped_masked", expected, result)
        if not direct:
            out.copy_(result.view(out.shape))

    def _experts(
        self,
        rows: torch.Tensor,
        scale: torch.Tensor | None,
        layout: torch.Tensor,
        gemm_type: GemmType,
        expected: int,
        out: torch.Tensor,
    ) -> None:
        """Runs both GEMMs and the activation between them on grouped rows."""
        if cold := [gemm for gemm in (self._gate_up, self._down) if gemm.table(gemm_type, expected) is None]:
            self.require_cold("compiling humming's GEMMs")
            _at_once([partial(gemm.compile, gemm_type, expected) for gemm in cold])
        wide = torch.empty(rows.shape[0], self._gate_up.out_features, dtype=torch.bfloat16, device=rows.device)
        self._gate_up(rows, layout, gemm_type, expected, wide, scale)
        if gemm_type == "grouped_masked" and not self._fp8:
            # humming's own kernel visits every row of every expert: 119 of 256 us where one token a rank came.
            from eprt.experts import activation_triton

            activation, L = self.config.activation, len(layout)
            active = wide.new_empty((L, wide.shape[0] // L, wide.shape[1] // activation.parts))
            activation_triton.activate_rows(activation, wide.view(L, -1, wide.shape[1]), layout, active)
            narrow, narrow_scale = active.flatten(0, 1), None
        elif gemm_type == "grouped_masked":
            activate = self._rows("grouped_mask", activation=True)
            narrow, narrow_scale = activate(wide, wide.shape[0], expert_tokens=layout)
        else:
            activate = self._rows("normal", activation=True)
            narrow, narrow_scale = activate(wide, wide.shape[0], num_valid_tokens=layout[-1:])
        self._down(narrow, layout, gemm_type, expected, out, narrow_scale)

    def _rows(self, layout: RowLayout, *, activation: bool = False, scatter_width: int = 1) -> RowKernel:
        """Returns the elementwise kernel in front of a GEMM, compiled on first use (in `warmup`, if it was called)."""
        found = self._row_kernels.get((layout, activation, scatter_width))
        if found is None:
            self.require_cold("compiling humming's kernels around the GEMMs")
            gemm = self._down if activation else self._gate_up
            found = self._row_kernels[layout, activation, scatter_width] = RowKernel(
                gemm.config,
                gemm.in_features,
                self.device,
                layout,
                self.config.activation if activation else None,
                scatter_width,
            )
        return found

    def library_call(self, tokens: FlatTokens) -> Callable[[], None]:
        """Returns a call of both GEMMs and the activation alone, on rows already sorted, for benchmarks."""
        scale, order, rows = self._sorted_inputs(tokens)
        out = torch.empty(rows.shape, dtype=torch.bfloat16, device=rows.device)
        expected = self._expected_rows(tokens.num_rows)
        return lambda: self._experts(rows, scale, order.offsets, "grouped_contiguous", expected, out)

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Compiles all kernels for up to `max_rows` rows of FlatTokens, or of `max_rows` rows per expert.

        The first time takes tens of seconds per shape; humming keeps compiled kernels on disk.
        """
        gemm_types, expected = _GEMM_TYPES[self.runtime.token_format], self._expected_rows(max_rows)
        gemms = self._gate_up, self._down
        _at_once([partial(gemm.warmup, gemm_type, expected) for gemm in gemms for gemm_type in gemm_types])
        if "grouped_contiguous" in gemm_types:
            for rows in {1, max_rows}:
                self._try_flat(rows, top_k or self.config.top_k, self.shard.first_expert)
        if "grouped_masked" in gemm_types:
            self._try_expert_major(1, valid=1)


def _at_once(jobs: list[Callable[[], None]]) -> None:
    """Runs compilations in threads: humming starts its compilers as processes of their own."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()
