"""FlashInfer's fused cutlass MoE on Hopper (`flashinfer.fused_moe.cutlass_fused_moe`): MXFP4 weights, bf16 tokens.

One kernel call sorts, multiplies, activates, multiplies, weights and sums FlatTokens. Facts of that call, from
FlashInfer 0.7.2's own source (`csrc/fused_moe/cutlass_backend`), kept by the tests named after it:

- The first matrix is [up; gate]; rows and columns come in tiles of 128, each half padded on its own.
- Ids are global. The kernel computes experts [ep_rank * L, (ep_rank + 1) * L) and skips every other id, E included;
  rows with nothing local are written as zeros. MoE-TP isn't told to it: it would only drop the down bias on
  tp_rank > 0, and the slice of the weights already is this rank's. The bias is zeroed here instead.
- alpha, beta and limit are given all three, per expert, or not at all.
- `use_fused_finalize=False` sums the K results of a row in a fixed order.
- It must not be called with zero rows.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from eprt.config import Activation
from eprt.errors import ConfigError
from eprt.experts.base import PreparedExecutor, unsupported_format
from eprt.experts.layouts import TILE, pad_parts, stack_experts
from eprt.experts.permute import copy_columns, plain_hidden
from eprt.experts.sample_tokens import even_tokens, sample_ids
from eprt.experts.tuning import TuningCache, TuningCacheWarning, tuning_cache
from eprt.rounding import round_up
from eprt.timing import eager_microseconds
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import MX_BLOCK, ExpertWeights, Mxfp4

# FlashInfer multiplies a Humming residual scale by 2 ** 6 (docstring of `cutlass_fused_moe`, quant_scales).
HUMMING_COMPENSATION = 64.0
DEFAULT_TACTIC = -1


@dataclass(frozen=True)
class CutlassWeights:
    """What one call takes; H and I are padded to 128.

    Attributes:
        gate_up: u8 [L, 2I, H/2], [up; gate], interleaved.  down: u8 [L, H, I/2], interleaved.
        quant_scales: as `cutlass_fused_moe` documents them.
        gate_up_bias: bf16 [L, 2I] or None.  down_bias: bf16 [L, H] or None, zero on moe_tp_rank > 0.
        alpha, beta, limit: float32 [L], or all None for plain SiLU gating.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    quant_scales: list[torch.Tensor]
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    alpha: torch.Tensor | None
    beta: torch.Tensor | None
    limit: torch.Tensor | None


def tile_expert(weights: ExpertWeights, moe_tp_rank: int) -> dict[str, torch.Tensor]:
    """One expert (leading dimension 1) as the kernel reads it before interleaving: [up; gate], tiles of 128.

    Pure torch on any device; `eprt.experts.layouts.unpad_parts` undoes it.
    """
    gate_up, down = weights.gate_up, weights.down
    if not isinstance(gate_up, Mxfp4) or not isinstance(down, Mxfp4):
        raise ConfigError(f"cutlass_mxfp4 takes Mxfp4 weights, not {type(gate_up).__name__}")
    H, I = round_up(down.shape[1], TILE), round_up(down.shape[2], TILE)
    tiles = {
        "gate_up": pad_parts(gate_up.codes, 2, I, H // 2, reverse=True),
        "gate_up_scales": pad_parts(gate_up.scales, 2, I, H // MX_BLOCK, reverse=True),
        "down": pad_parts(down.codes, 1, H, I // 2),
        "down_scales": pad_parts(down.scales, 1, H, I // MX_BLOCK),
    }
    if weights.gate_up_bias is not None and weights.down_bias is not None:
        down_bias = weights.down_bias if moe_tp_rank == 0 else torch.zeros_like(weights.down_bias)
        tiles["gate_up_bias"] = pad_parts(weights.gate_up_bias, 2, I, reverse=True).to(torch.bfloat16)
        tiles["down_bias"] = pad_parts(down_bias, 1, H).to(torch.bfloat16)
    return tiles


def _interleave_bf16(tiles: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The library's own order of bytes for bf16 activations."""
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm as interleave_scales
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm as interleave_weights

    done = dict(tiles)
    for name in ("gate_up", "down"):
        done[name] = interleave_weights(tiles[name], "fp4")
        done[f"{name}_scales"] = interleave_scales(tiles[f"{name}_scales"], group_size=MX_BLOCK)
    return done


def _interleave_fp8(tiles: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same for FP8 activations: scales are folded into the codes, one residual scale an expert is left."""
    from flashinfer.fused_moe import preprocess_moe_weights_for_sm90_mixed_gemm_humming as fold

    done = dict(tiles)
    for name in ("gate_up", "down"):
        codes, scales, residual = fold(tiles[name], tiles[f"{name}_scales"])
        done |= {name: codes, f"{name}_scales": scales, f"{name}_residual": residual * HUMMING_COMPENSATION}
    return done


def swiglu_parameters(activation: Activation) -> tuple[float, float, float] | None:
    """(alpha, beta, limit) for the kernel, or None for plain SiLU gating."""
    if activation.plain:
        return None
    no_limit = torch.finfo(torch.float32).max
    return activation.alpha, activation.beta, no_limit if activation.limit is None else activation.limit


class CutlassMxfp4Executor(PreparedExecutor):
    """FlatTokens in bf16 or float32 (computed in bf16), or packed (decoded to bf16 first).

    `RuntimeConfig.low_precision_activations` switches to FP8 activations (MXFP4 x FP8, FlashInfer's Humming-style
    kernels); `deterministic` to the fixed order of sums.
    """

    def _prepare(self, weights: ExpertWeights) -> None:
        from flashinfer.fused_moe import cutlass_fused_moe

        config, L = self.config, self.shard.num_local_experts
        if config.num_experts % L or self.shard.first_expert % L:
            raise ConfigError(
                f"experts {self.shard.first_expert} to {self.shard.end_expert} of {config.num_experts}: cutlass_mxfp4 "
                "needs contiguous equal shares"
            )
        keywords = inspect.signature(cutlass_fused_moe).parameters
        self._fp8 = self.runtime.low_precision_activations
        if self._fp8 and "use_wfp4afp8_humming" not in keywords:
            raise ConfigError("this FlashInfer has no MXFP4 x FP8 kernels: upgrade, or low_precision_activations=False")
        self._takes_workspace = "workspace_buffer" in keywords
        self._hidden = round_up(config.hidden_size, TILE)
        interleave = _interleave_fp8 if self._fp8 else _interleave_bf16

        def prepare(index: int) -> dict[str, torch.Tensor]:
            one = weights.map(lambda tensor: tensor[index : index + 1].to(self.device))
            return interleave(tile_expert(one, self.shard.moe_tp_rank))

        self.weights = self._gather(stack_experts(L, prepare))
        self._intermediate = 2 * self.weights.down.shape[2]
        self._workspace_bytes: dict[tuple[int, int], int] = {}
        self._tactics: list[tuple[int, tuple[int, int]]] = []

    def _gather(self, stacks: dict[str, torch.Tensor]) -> CutlassWeights:
        scales = [stacks["gate_up_scales"].view(torch.int32), stacks["down_scales"].view(torch.int32)]
        if self._fp8:
            reserved = torch.ones((), dtype=torch.float32, device=self.device)
            scales = [scales[0], stacks["gate_up_residual"], reserved, scales[1], stacks["down_residual"]]
        parameters = swiglu_parameters(self.config.activation)
        alpha, beta, limit = (
            None
            if parameters is None
            else torch.full((self.shard.num_local_experts,), value, dtype=torch.float32, device=self.device)
            for value in parameters or (0.0, 0.0, 0.0)
        )
        biases = stacks.get("gate_up_bias"), stacks.get("down_bias")
        return CutlassWeights(stacks["gate_up"], stacks["down"], scales, *biases, alpha, beta, limit)

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        held = self.weights
        scales = {f"scale_{n}": scale for n, scale in enumerate(held.quant_scales) if scale.dim() > 0}
        biases = {"gate_up_bias": held.gate_up_bias, "down_bias": held.down_bias}
        return {
            "gate_up": held.gate_up,
            "down": held.down,
            **scales,
            **{name: bias for name, bias in biases.items() if bias is not None},
        }

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = self._padded(tokens)
        whole = self._hidden == self.config.hidden_size and out.dtype == torch.bfloat16
        direct = out if whole and out.is_contiguous() else None
        result = hidden.new_empty(hidden.shape) if direct is None else direct
        self._run(hidden, tokens.ids, tokens.weights, result, self._chosen(hidden.shape[0]))
        if direct is None:
            copy_columns(result, out)

    def _padded(self, tokens: FlatTokens) -> torch.Tensor:
        """bf16 [N, padded H]."""
        hidden = plain_hidden(tokens.hidden)
        if self._hidden == hidden.shape[1]:
            return hidden.to(torch.bfloat16).contiguous()
        padded = torch.empty(hidden.shape[0], self._hidden, dtype=torch.bfloat16, device=hidden.device)
        copy_columns(hidden.contiguous(), padded)
        return padded

    def _chosen(self, num_rows: int) -> tuple[int, int] | None:
        return next((found for rows, found in self._tactics if rows >= num_rows), None)

    def library_call(self, tokens: FlatTokens) -> Callable[[], None]:
        """FlashInfer's call alone, on padded tokens: what a benchmark compares the whole with."""
        hidden = self._padded(tokens)
        out, chosen = torch.empty_like(hidden), self._chosen(hidden.shape[0])
        return lambda: self._run(hidden, tokens.ids, tokens.weights, out, chosen)

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        raise unsupported_format("cutlass_mxfp4", "expert_major")

    def _run(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor,
        tactic: tuple[int, int] | None,
    ) -> None:
        """hidden and out: bf16 [N, padded H], N > 0."""
        options: dict[str, Any] = {}
        if self._takes_workspace:
            options["workspace_buffer"] = self._workspace(*ids.shape)
        if tactic is not None:
            options["profile_ids"] = list(tactic)
        self._library(hidden, ids.contiguous(), weights.contiguous(), output=out, **options)

    @cached_property
    def _library(self) -> Callable[..., object]:
        """`cutlass_fused_moe` with all that doesn't change from call to call."""
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.tllm_enums import ActivationType

        prepared, L = self.weights, self.shard.num_local_experts
        return partial(
            cutlass_fused_moe,
            fc1_expert_weights=prepared.gate_up,
            fc2_expert_weights=prepared.down,
            output_dtype=torch.bfloat16,
            quant_scales=prepared.quant_scales,
            fc1_expert_biases=prepared.gate_up_bias,
            fc2_expert_biases=prepared.down_bias,
            swiglu_alpha=prepared.alpha,
            swiglu_beta=prepared.beta,
            swiglu_limit=prepared.limit,
            ep_size=self.config.num_experts // L,
            ep_rank=self.shard.first_expert // L,
            use_w4_group_scaling=True,
            activation_type=ActivationType.Swiglu,
            use_fused_finalize=not self.runtime.deterministic,
            **({"use_wfp4afp8_humming": True} if self._fp8 else {}),
        )

    def _workspace(self, num_rows: int, slots: int) -> torch.Tensor:
        """Scratch from torch's caching allocator, given back after the call: layers that run one after another get
        the same memory, streams that overlap don't, and a captured graph keeps its own."""
        rows = 1 << (num_rows - 1).bit_length()
        found = self._workspace_bytes.get((rows, slots))
        if found is None:
            found = self._workspace_bytes[rows, slots] = self._workspace_size(rows, slots)
        return torch.empty(found, dtype=torch.uint8, device=self.device)

    def _workspace_size(self, rows: int, slots: int) -> int:
        from flashinfer.fused_moe import cutlass_fused_moe_workspace_size

        options: dict[str, Any] = {"use_wfp4afp8_humming": True} if self._fp8 else {}
        return cutlass_fused_moe_workspace_size(
            rows,
            self._hidden,
            self._intermediate,
            self.config.num_experts,
            slots,
            x_dtype=torch.bfloat16,
            weight_dtype=torch.uint8,
            ep_size=self.config.num_experts // self.shard.num_local_experts,
            ep_rank=self.shard.first_expert // self.shard.num_local_experts,
            use_w4_group_scaling=True,
            use_fused_finalize=not self.runtime.deterministic,
            device=self.device,
            **options,
        )

    def warmup(self, max_rows: int, slots: int | None = None) -> None:
        """Choose both GEMMs' tactics for 1, 4, 16, ... rows by timing whole calls; results are kept on disk.

        FlashInfer's own autotuner measures the same kernels but takes a minute and costs host time on every call.
        """
        import flashinfer

        name = torch.cuda.get_device_name(self.device)
        cache = tuning_cache("cutlass_mxfp4", flashinfer.__version__, name)
        sizes = [1 << power for power in range(0, max(max_rows - 1, 0).bit_length() + 2, 2)]
        slots = slots or self.config.top_k
        self._tactics = [(rows, self._tactic(rows, slots, cache)) for rows in sizes]
        # Results from disk launch nothing; and the copies around the kernel are compiled on their first use.
        for dtype in (torch.bfloat16, torch.float32):
            self(even_tokens(self.config, 1, slots, self.device, dtype))

    def _tactic(self, rows: int, slots: int, cache: TuningCache) -> tuple[int, int]:
        config, shard = self.config, self.shard
        problem = {
            "rows": rows,
            "experts": (config.num_experts, shard.num_local_experts, config.top_k),
            "slots": slots,
            "sizes": (self._hidden, self._intermediate),
            "variant": (config.bias, config.activation.limit is not None, self._fp8, self.runtime.deterministic),
        }
        found = cache.load(problem, lambda stored: self._possible(stored, slots))
        if found is None:
            found = self._tune(rows, slots)
            cache.store(problem, found)
        return found[0], found[1]

    def _possible(self, stored: Any, slots: int) -> bool:
        first, second = self._candidates(torch.zeros(1, self._hidden, dtype=torch.bfloat16, device=self.device), slots)
        return len(stored) == 2 and stored[0] in first and stored[1] in second

    def _tune(self, rows: int, slots: int) -> list[int]:
        hidden = torch.randn(rows, self._hidden, device=self.device).to(torch.bfloat16)
        num_experts, chosen = self.config.num_experts, min(slots, self.config.top_k)
        ids = sample_ids(rows, chosen, num_experts, self.device)
        ids = torch.nn.functional.pad(ids, (0, slots - chosen), value=num_experts)
        weights = torch.full(ids.shape, 1.0 / ids.shape[1], device=self.device)
        out = torch.empty_like(hidden)

        def microseconds(tactic: tuple[int, int]) -> float:
            try:
                return eager_microseconds(lambda: self._run(hidden, ids, weights, out, tactic))
            except RuntimeError:  # a tactic whose tile doesn't fit this shape refuses to launch
                return float("inf")

        first, second = DEFAULT_TACTIC, DEFAULT_TACTIC
        candidates = self._candidates(hidden, slots)
        first = min(candidates[0], key=lambda tactic: microseconds((tactic, second)))
        second = min(candidates[1], key=lambda tactic: microseconds((first, tactic)))
        return [first, second]

    def _candidates(self, hidden: torch.Tensor, slots: int) -> tuple[list[int], list[int]]:
        """Tactic numbers that FlashInfer itself would profile for the first and the second GEMM, default first."""
        from flashinfer.fused_moe.core import get_cutlass_fused_moe_module
        from flashinfer.tllm_enums import ActivationType

        L, prepared = self.shard.num_local_experts, self.weights
        try:
            runner = get_cutlass_fused_moe_module("90").MoERunner(
                x_dtype=torch.bfloat16,
                weight_dtype=torch.uint8,
                output_dtype=torch.bfloat16,
                top_k=slots,
                tp_size=1,
                tp_rank=0,
                ep_size=self.config.num_experts // L,
                ep_rank=self.shard.first_expert // L,
                cluster_size=1,
                cluster_rank=0,
                enable_alltoall=False,
                use_deepseek_fp8_block_scale=False,
                use_w4_group_scaling=True,
                use_mxfp8_act_scaling=False,
                min_latency_mode=False,
                enable_pdl=True,
                activation_type=ActivationType.Swiglu,
                use_packed_weights=False,
                use_fused_finalize=not self.runtime.deterministic,
                use_wfp4afp8_humming=self._fp8,
            )
            inputs = [hidden, prepared.gate_up, prepared.gate_up_bias, prepared.down, prepared.down_bias]
            found: list[list[int]] = []
            for gemm in (1, 2):
                runner.gemm_idx_for_tuning = gemm
                found.append([DEFAULT_TACTIC, *runner.get_valid_tactics(inputs, None)])
        except (AttributeError, TypeError) as error:
            warnings.warn(
                f"this FlashInfer doesn't list its tactics as 0.7.2 does ({error}); using its defaults",
                TuningCacheWarning,
                stacklevel=2,
            )
            return [DEFAULT_TACTIC], [DEFAULT_TACTIC]
        return found[0], found[1]
