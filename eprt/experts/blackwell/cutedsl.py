"""NVFP4 experts on Blackwell through FlashInfer's CuteDSL kernels.

Two kernel families, each with a weight layout of its own:

- `MaskedExperts`: two `grouped_gemm_nt_masked` around the activation, one slab a local expert; takes
  `ExpertMajorTokens` as DeepEP's low-latency kernels leave them.
- `ContiguousExperts`: `CuteDslMoEWrapper`, which sorts rows by expert, gathers, and fuses activation, quantisation,
  routing weights and the sum over K; takes `FlatTokens`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from eprt.activation import activated
from eprt.config import Activation, TokenFormat
from eprt.errors import ConfigError, InputError
from eprt.experts.adapters import merge_repeats
from eprt.experts.base import PreparedExecutor, anytime
from eprt.experts.blackwell.scales import GATED_ROWS, Nvfp4Factors, nvfp4_matrix, nvfp4_stack
from eprt.experts.blackwell.swizzle import mma_scale_view, swizzle_scales, widen
from eprt.experts.sample_tokens import even_tokens
from eprt.placement import ExpertShard
from eprt.quant import decode_payload
from eprt.rounding import round_up
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload
from eprt.weights import NVFP4_BLOCK, ExpertWeights

ROWS = 128  # both GEMMs need a number of output rows that is a multiple of this (FlashInfer 0.7.2)


@dataclass(frozen=True)
class CuteDslKernels:
    """The entry points used, so that a test can put its own in their place. `load` takes FlashInfer's."""

    fp4_quantize: Callable[..., Any]
    scaled_fp4_grouped_quantize: Callable[..., Any]
    silu_and_mul_scaled_nvfp4_experts_quantize: Callable[..., Any]
    grouped_gemm_nt_masked: Callable[..., Any]
    moe_wrapper: Callable[..., Any]
    autotune: Callable[..., AbstractContextManager[Any]]
    relu2: int
    swiglu: int

    @classmethod
    def load(cls) -> CuteDslKernels:
        import flashinfer
        from flashinfer.autotuner import autotune
        from flashinfer.cute_dsl import grouped_gemm_nt_masked
        from flashinfer.fused_moe import ActivationType, CuteDslMoEWrapper

        return cls(
            fp4_quantize=flashinfer.fp4_quantize,
            scaled_fp4_grouped_quantize=flashinfer.scaled_fp4_grouped_quantize,
            silu_and_mul_scaled_nvfp4_experts_quantize=flashinfer.silu_and_mul_scaled_nvfp4_experts_quantize,
            grouped_gemm_nt_masked=grouped_gemm_nt_masked,
            moe_wrapper=CuteDslMoEWrapper,
            autotune=autotune,
            relu2=int(ActivationType.Relu2),
            swiglu=int(ActivationType.Swiglu),
        )


def padded_size(weights: ExpertWeights, parts: int) -> tuple[int, int]:
    """Returns (H, I) as the kernels see them, rounded up. Padded weights are zero, padded outputs are cut off."""
    _, hidden, intermediate = weights.down.shape
    return round_up(hidden, ROWS), round_up(intermediate, GATED_ROWS if parts == 2 else ROWS)


class MaskedExperts:
    """Runs the masked kernels: quantise, GEMM, activation, quantise, GEMM. Rows at and past the counts are never read.

    The second GEMM and the combine run one after the other. The GEMM could signal finished tiles while it leaves
    multiprocessors free (`dst_signals`, `sm_count`), but DeepEP 1.2.1's `low_latency_combine` has no argument that
    would wait for them; tests/upstream/test_deepep.py fails as soon as one appears.

    The library compiles a GEMM for each height of a slab. Lower slabs than one it has are raised to that height, which
    costs memory but, as rows past the counts are skipped, no arithmetic; higher ones are compiled, or refused behind a
    warm World.

    The kernels read weights with L last (memory [L, rows, cols]), rows [gate; up].

    Raises:
        ConfigError: a checkpoint without input scales.
    """

    def __init__(
        self,
        kernels: CuteDslKernels,
        weights: ExpertWeights,
        activation: Activation,
        device: torch.device,
        require_cold: Callable[[str], None] = anytime,
    ) -> None:
        gate_up, down = nvfp4_matrix(weights.gate_up), nvfp4_matrix(weights.down)
        factors = Nvfp4Factors.from_matrices(gate_up, down, device)
        if factors.input is None or factors.intermediate is None:
            raise ConfigError(
                "cutedsl_nvfp4 quantises expert-major tokens and needs the checkpoint's input_scale, which is missing: "
                "use a dispatcher that emits flat tokens (computed with bf16 activations)"
            )
        self._require_cold = require_cold
        self._heights: set[int] = set()  # of slabs, that GEMMs are compiled for
        self._kernels = kernels
        self._activation = activation
        H, I = padded_size(weights, activation.parts)
        first = nvfp4_stack(gate_up, activation.parts, I, H, device)
        second = nvfp4_stack(down, 1, H, I, device)
        # Codes u8 [rows, cols/2, L], scales 6-D (32, 4, row tiles, 4, column tiles, L).
        self._first, self._second = (
            (stack["codes"].permute(1, 2, 0), mma_scale_view(stack["scales"])) for stack in (first, second)
        )
        self._fused = activation.gated and activation.plain
        self._ratio = factors.ratio
        self._gate, self._calibrated_gate = factors.gate, factors.gate * factors.input
        self._down = factors.down * factors.intermediate
        self._multiplier = (1.0 / factors.input).expand_as(factors.gate).contiguous()  # one an expert, for the kernel
        # The fused SwiGLU sees up / ratio, so its product needs `ratio` more to be the codes that were calibrated.
        self._quantiser = (self._ratio if self._fused else 1.0) / factors.intermediate

    def __call__(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        counts = tokens.counts
        L, M, H = out.shape
        height = self._height(M)
        x, x_scales, factor = self._quantised(tokens, height)
        middle = out.new_empty((L, height, self._first[0].shape[0]))
        self._gemm((x, x_scales), self._first, middle, counts, factor)
        h, h_scales = self._activate(middle, counts)
        padded = self._second[0].shape[0]
        whole = out if (height, padded) == (M, H) else out.new_empty((L, height, padded))
        self._gemm((h, h_scales), self._second, whole, counts, self._down)
        if whole is not out:
            out.copy_(whole[:, :M, :H])

    def warmup(self, rows: int, H: int, num_local: int, device: torch.device) -> None:
        """Compiles for slabs of up to `rows` rows."""
        slab = torch.zeros((num_local, rows, H), dtype=torch.bfloat16, device=device)
        counts = torch.zeros(num_local, dtype=torch.int32, device=device)
        self(ExpertMajorTokens(Payload.plain(slab), counts), torch.empty_like(slab))

    def _height(self, rows: int) -> int:
        """Returns the lowest compiled height that holds slabs of `rows` rows; compiles for `rows` if none does."""
        enough = [height for height in self._heights if height >= rows]
        if enough:
            return min(enough)
        self._require_cold(f"compiling cutedsl_nvfp4's GEMMs for slabs of {rows} rows")
        self._heights.add(rows)
        return rows

    def _quantised(self, tokens: ExpertMajorTokens, height: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns codes u8 [height, H/2, L], 6-D scales, and the first GEMM's factor [L]."""
        hidden, width = tokens.hidden, 2 * self._first[0].shape[1]
        if hidden.format == "nvfp4" and hidden.scale is not None and hidden.global_scale is not None:
            codes = widen(hidden.data, width // 2, height).contiguous()
            scales = widen(hidden.scale, width // NVFP4_BLOCK, height)
            return codes.permute(1, 2, 0), mma_scale_view(swizzle_scales(scales)), self._gate * hidden.global_scale
        x = widen(_bf16(hidden), width, height).contiguous()
        quantise = self._kernels.scaled_fp4_grouped_quantize
        # nvfp4_4over6=None: don't let environment variables choose another recipe.
        codes, scales = quantise(x, tokens.counts, self._multiplier, nvfp4_4over6=None)
        return codes, scales, self._calibrated_gate

    def _activate(self, middle: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Activates and quantises bf16 [L, M, parts * I] to [L, M, I], as the second GEMM takes it."""
        if self._fused:
            fused = self._kernels.silu_and_mul_scaled_nvfp4_experts_quantize
            return fused(middle, counts, self._quantiser, nvfp4_4over6=None)
        h = _activation(self._activation, middle, self._ratio)
        return self._kernels.scaled_fp4_grouped_quantize(h, counts, self._quantiser, nvfp4_4over6=None)

    def _gemm(
        self,
        tokens: tuple[torch.Tensor, torch.Tensor],
        weights: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        counts: torch.Tensor,
        factor: torch.Tensor,
    ) -> None:
        """Computes out [L, M, N] = factor [L] * tokens [M, K, L] x weights [N, K, L]."""
        self._kernels.grouped_gemm_nt_masked(
            tokens,
            weights,
            out.permute(1, 2, 0),
            counts,
            ab_dtype="float4_e2m1fn",
            sf_dtype="float8_e4m3fn",
            c_dtype="bfloat16",
            sf_vec_size=NVFP4_BLOCK,
            alpha=factor.view(1, 1, -1),
            alpha_dtype="float32",
        )


class ContiguousExperts:
    """`CuteDslMoEWrapper`: one call for everything. Applies the routing weights and sums over K; writes every row.

    The kernels read the rows of a gated first matrix as up and gate in turns of 64 rows.
    """

    def __init__(
        self,
        kernels: CuteDslKernels,
        weights: ExpertWeights,
        activation: Activation,
        shard: ExpertShard,
        device: torch.device,
        deterministic: bool,
        require_cold: Callable[[str], None] = anytime,
    ) -> None:
        self._require_cold = require_cold
        self._kernels = kernels
        self._activation = activation
        self._shard = shard
        self._deterministic = deterministic
        self._wrappers: dict[int, Any] = {}
        gate_up, down = nvfp4_matrix(weights.gate_up), nvfp4_matrix(weights.down)
        factors = Nvfp4Factors.from_matrices(gate_up, down, device)
        if not activation.plain:
            factors = factors.sharing(gate_up.global_scale.to(device).amax(dim=1))
        H, I = padded_size(weights, activation.parts)
        options = {"alternate": activation.gated, "share_scale": not activation.plain}
        first = nvfp4_stack(gate_up, activation.parts, I, H, device, **options)
        second = nvfp4_stack(down, 1, H, I, device)
        self._codes = first["codes"], second["codes"]  # u8 [L, rows, cols/2]
        self._scales = [mma_scale_view(stack["scales"].view(torch.uint8)) for stack in (first, second)]
        self._gate, self._down = factors.gate, factors.down * factors.ratio
        self._multiplier: torch.Tensor | None = None  # None: a weight-only checkpoint
        self._quantiser: torch.Tensor | None = None
        if factors.input is not None and factors.intermediate is not None:
            self._multiplier, self._calibrated_gate = 1.0 / factors.input, factors.gate * factors.input
            # One quantiser for all experts: the largest of what they were calibrated for, seen through up / ratio.
            intermediate = (factors.intermediate / factors.ratio).amax().view(1)
            self._quantiser = 1.0 / intermediate
            self._down = self._down * intermediate

    def __call__(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        x, x_scales, factor = self._quantised(tokens.hidden)
        result = self._wrapper(tokens.ids.shape[1]).run(
            x=x,
            x_sf=x_scales,
            token_selected_experts=tokens.ids,
            token_final_scales=tokens.weights,
            w1_weight=self._codes[0],
            w1_weight_sf=self._scales[0],
            w1_alpha=factor,
            fc2_input_scale=self._quantiser,
            w2_weight=self._codes[1],
            w2_weight_sf=self._scales[1],
            w2_alpha=self._down,
        )
        out.copy_(result[:, : out.shape[1]])

    def warmup(self, tokens: FlatTokens) -> None:
        """Compiles, and times FlashInfer's tactics for its ladder of batch sizes up to that of `tokens`."""
        with self._kernels.autotune(True):
            self(tokens, torch.empty_like(tokens.hidden.data))

    def _quantised(self, hidden: Payload) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Returns codes u8 [N, H/2] and scales u8 [N, H/16] (bf16 and None for W4A16), and the first GEMM's factor."""
        width = 2 * self._codes[0].shape[2]
        if self._multiplier is None:
            return widen(_bf16(hidden), width).contiguous(), None, self._gate
        if hidden.format == "nvfp4" and hidden.scale is not None and hidden.global_scale is not None:
            scales = widen(hidden.scale, width // NVFP4_BLOCK).contiguous().view(torch.uint8)
            return widen(hidden.data, width // 2).contiguous(), scales, self._gate * hidden.global_scale
        x = widen(_bf16(hidden), width).contiguous()
        codes, scales = self._kernels.fp4_quantize(
            x, self._multiplier, sf_vec_size=NVFP4_BLOCK, is_sf_swizzled_layout=False, nvfp4_4over6=None
        )
        return codes, scales.view(x.shape[0], width // NVFP4_BLOCK), self._calibrated_gate

    def _wrapper(self, top_k: int) -> Any:
        """Makes one wrapper per top-k: a dispatcher may pad the model's, an adapter emits 1."""
        if top_k not in self._wrappers:
            self._require_cold(f"compiling cutedsl_nvfp4's kernels for top-k {top_k}")
            activation, down = self._activation, self._codes[1]
            swiglu: dict[str, float] = {}
            if not activation.plain:
                swiglu = {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta}
                swiglu |= {} if activation.limit is None else {"swiglu_limit": activation.limit}
            self._wrappers[top_k] = self._kernels.moe_wrapper(
                num_experts=self._shard.num_experts,
                top_k=top_k,
                hidden_size=down.shape[1],
                intermediate_size=2 * down.shape[2],
                use_cuda_graph=down.is_cuda,
                num_local_experts=self._shard.num_local_experts,
                local_expert_offset=self._shard.first_expert,
                output_dtype=torch.bfloat16,
                device=str(down.device),
                activation_type=self._kernels.swiglu if activation.gated else self._kernels.relu2,
                # The fused finalize adds with atomics, in no fixed order.
                use_fused_finalize=not self._deterministic,
                quant_mode="w4a16" if self._multiplier is None else "w4a4",
                **swiglu,
            )
        return self._wrappers[top_k]


class CuteDslExecutor(PreparedExecutor):
    """Takes both token formats natively, as bf16 or NVFP4. Keeps the layout of `runtime.token_format` (the plan's
    choice), or both layouts if that is None.

    Weight-only checkpoints (no `input_scale`) compute flat tokens with bf16 activations (W4A16); the masked kernels
    have no such mode.

    No buffer outlives a call, so none can be sized by the first batch seen: temporaries follow the rows given, which
    are the dispatcher's own geometry and fixed under a CUDA graph.
    """

    kernels: ClassVar[CuteDslKernels | None] = None  # None: FlashInfer's, imported when an executor is built

    def _prepare(self, weights: ExpertWeights) -> None:
        kernels = type(self).kernels or CuteDslKernels.load()
        activation, wanted = self.config.activation, self.runtime.token_format
        calibrated = nvfp4_matrix(weights.gate_up).input_scale is not None
        self._contiguous: ContiguousExperts | None = None
        self._masked: MaskedExperts | None = None
        if wanted in (None, "flat"):
            ordered = self.runtime.deterministic
            self._contiguous = ContiguousExperts(
                kernels, weights, activation, self.shard, self.device, ordered, self.require_cold
            )
        if wanted == "expert_major" or (wanted is None and calibrated):
            self._masked = MaskedExperts(kernels, weights, activation, self.device, self.require_cold)

    def _flat(self, tokens: FlatTokens, out: torch.Tensor) -> None:
        if self._contiguous is None:
            raise ConfigError(_not_built("flat"))
        # Of two entries with one expert the routing kernel keeps one; only a table of ids can hold such rows.
        self._contiguous(merge_repeats(tokens) if self.config.routing.method == "hash" else tokens, out)

    def _expert_major(self, tokens: ExpertMajorTokens, out: torch.Tensor) -> None:
        if self._masked is None:
            raise ConfigError(_not_built("expert_major"))
        self._masked(tokens, out)

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        if self._contiguous is not None:
            self._contiguous.warmup(even_tokens(self.config, max_rows, top_k or self.config.top_k, self.device))
        if self._masked is not None:
            self._masked.warmup(max_rows, self.config.hidden_size, self.shard.num_local_experts, self.device)


def _not_built(token_format: TokenFormat) -> str:
    return (
        f"cutedsl_nvfp4 has no layout for {token_format} tokens here: build it with "
        f"RuntimeConfig.token_format={token_format!r}, and for expert_major from a checkpoint with input scales"
    )


def _bf16(hidden: Payload) -> torch.Tensor:
    """Returns plain tokens, decoding those that the kernels can't take packed."""
    if hidden.format == "nvfp4":
        return decode_payload(hidden)
    if hidden.format != "bf16":
        raise InputError(f"cutedsl_nvfp4 got {hidden.format} tokens: it takes bf16 or nvfp4")
    return hidden.data


def _activation(activation: Activation, middle: torch.Tensor, ratio: torch.Tensor) -> torch.Tensor:
    """Applies what the fused SwiGLU kernel doesn't know, in float32: [L, M, parts * I] -> bf16 [L, M, I]."""
    if not activation.gated:
        return activated(activation, None, middle.float()).to(torch.bfloat16)
    gate, up = middle.float().chunk(2, dim=-1)
    return activated(activation, gate, up * ratio[:, None, None]).to(torch.bfloat16)
