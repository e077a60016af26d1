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
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn.functional import pad

from eprt.config import Activation
from eprt.errors import ConfigError
from eprt.experts.base import PreparedExecutor
from eprt.experts.padding import TILE, pad_parts, stack_experts
from eprt.experts.permute import plain_hidden
from eprt.rounding import round_up
from eprt.tokens import FlatTokens
from eprt.weights import MX_BLOCK, ExpertWeights, Mxfp4

# FlashInfer multiplies a Humming residual scale by 2 ** 6 (docstring of `cutlass_fused_moe`, quant_scales).
HUMMING_COMPENSATION = 64.0


def tile_expert(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """Returns one expert (leading dimension 1) as the kernel reads it before interleaving: [up; gate], tiles of 128."""
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
    if (bias := weights.gate_up_bias) is not None:
        down_bias = bias.new_zeros((1, H)) if weights.down_bias is None else weights.down_bias
        tiles["gate_up_bias"] = pad_parts(bias, 2, I, reverse=True).to(torch.bfloat16)
        tiles["down_bias"] = pad_parts(down_bias, 1, H).to(torch.bfloat16)
    return tiles


def _interleaved(tiles: dict[str, torch.Tensor], fp8: bool) -> dict[str, torch.Tensor]:
    """Puts bytes in the library's own order. For FP8 activations scales are folded into the codes, one residual scale
    per expert is left."""
    from flashinfer import fused_moe

    done = dict(tiles)
    for name, scale in (("gate_up", "gate_up_scales"), ("down", "down_scales")):
        if fp8:
            fold = fused_moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming
            done[name], done[scale], residual = fold(tiles[name], tiles[scale])
            done[f"{name}_residual"] = residual * HUMMING_COMPENSATION
        else:
            done[name] = fused_moe.interleave_moe_weights_for_sm90_mixed_gemm(tiles[name], "fp4")
            done[scale] = fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(tiles[scale], group_size=MX_BLOCK)
    return done


def swiglu_parameters(activation: Activation) -> dict[str, float]:
    """Returns the kernel's keywords alpha, beta and limit; none for plain SiLU gating."""
    if activation.plain:
        return {}
    limit = torch.finfo(torch.float32).max if activation.limit is None else activation.limit
    return {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta, "swiglu_limit": limit}


class CutlassMxfp4Executor(PreparedExecutor):
    """Takes FlatTokens in bf16 or float32 (computed in bf16), or packed (decoded to bf16 first).

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

        def prepare(index: int) -> dict[str, torch.Tensor]:
            one = weights.map(lambda tensor: tensor[index : index + 1].to(self.device))
            return _interleaved(tile_expert(one), self._fp8)

        self._stacks = stack_experts(L, prepare)
        self._workspace_bytes: dict[tuple[int, int], int] = {}
        self._most_rows = 1

    def slot_tensors(self) -> dict[str, torch.Tensor]:
        return self._stacks

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        hidden = self._padded(tokens)
        direct = out.shape == hidden.shape and out.dtype == hidden.dtype and out.is_contiguous()
        result = out if direct else torch.empty_like(hidden)
        self._run(hidden, tokens.ids, tokens.weights, result)
        if not direct:
            out.copy_(result[:, : out.shape[1]])

    def _padded(self, tokens: FlatTokens) -> torch.Tensor:
        """Returns tokens as bf16 [N, padded H]."""
        hidden = plain_hidden(tokens.hidden).to(torch.bfloat16)
        missing = self._hidden - hidden.shape[1]
        return (pad(hidden, (0, missing)) if missing else hidden).contiguous()

    def library_call(self, tokens: FlatTokens) -> Callable[[], None]:
        """Returns FlashInfer's call alone, on padded tokens: what a benchmark compares the whole with."""
        hidden = self._padded(tokens)
        out = torch.empty_like(hidden)
        return lambda: self._run(hidden, tokens.ids, tokens.weights, out)

    def _run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        """Calls the library. hidden and out: bf16 [N, padded H], N > 0."""
        options: dict[str, Any] = {"tune_max_num_tokens": self._most_rows}
        if self._takes_workspace:
            options["workspace_buffer"] = self._workspace(*ids.shape)
        self._library(hidden, ids.contiguous(), weights.contiguous(), output=out, **options)

    @cached_property
    def _library(self) -> Callable[..., object]:
        """`cutlass_fused_moe` with all that doesn't change from call to call."""
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.tllm_enums import ActivationType

        L, device = self.shard.num_local_experts, self.device
        swiglu = swiglu_parameters(self.config.activation)
        return partial(
            cutlass_fused_moe,
            fc1_expert_weights=self._stacks["gate_up"],
            fc2_expert_weights=self._stacks["down"],
            output_dtype=torch.bfloat16,
            quant_scales=self._quant_scales(),
            fc1_expert_biases=self._stacks.get("gate_up_bias"),
            fc2_expert_biases=self._stacks.get("down_bias"),
            activation_type=ActivationType.Swiglu,
            **{n: torch.full((L,), v, dtype=torch.float32, device=device) for n, v in swiglu.items()},
            **self._variant(),
        )

    def _quant_scales(self) -> list[torch.Tensor]:
        """Returns the scales in the order that `cutlass_fused_moe` documents."""
        stacks = self._stacks
        scales = [stacks["gate_up_scales"].view(torch.int32), stacks["down_scales"].view(torch.int32)]
        if not self._fp8:
            return scales
        reserved = torch.ones((), dtype=torch.float32, device=self.device)
        return [scales[0], stacks["gate_up_residual"], reserved, scales[1], stacks["down_residual"]]

    def _variant(self) -> dict[str, Any]:
        """Returns the keywords that the call and the size of its workspace have in common."""
        L = self.shard.num_local_experts
        return {
            "ep_size": self.config.num_experts // L,
            "ep_rank": self.shard.first_expert // L,
            "use_w4_group_scaling": True,
            "use_fused_finalize": not self.runtime.deterministic,
        } | ({"use_wfp4afp8_humming": True} if self._fp8 else {})

    def _workspace(self, num_rows: int, top_k: int) -> torch.Tensor:
        """Scratch from torch's caching allocator, given back after the call: layers that run one after another get
        the same memory, streams that overlap don't, and a captured graph keeps its own."""
        rows = 1 << (num_rows - 1).bit_length()
        found = self._workspace_bytes.get((rows, top_k))
        if found is None:
            from flashinfer.fused_moe import cutlass_fused_moe_workspace_size

            found = self._workspace_bytes[rows, top_k] = cutlass_fused_moe_workspace_size(
                rows,
                self._hidden,
                2 * self._stacks["down"].shape[2],
                self.config.num_experts,
                top_k,
                x_dtype=torch.bfloat16,
                weight_dtype=torch.uint8,
                device=self.device,
                **self._variant(),
            )
        return torch.empty(found, dtype=torch.uint8, device=self.device)

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        """Lets FlashInfer time its tactics for its ladder of batch sizes up to `max_rows`; it takes about a minute."""
        from flashinfer.autotuner import autotune

        self._most_rows = 1 << max(max_rows - 1, 0).bit_length()
        with autotune(True):
            self(self._even_tokens(max_rows, top_k))
