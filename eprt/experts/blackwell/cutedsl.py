"""NVFP4 experts on Blackwell through FlashInfer's CuteDSL kernels.

Two kernel families, each with a weight layout of its own:

- `MaskedExperts`: two `grouped_gemm_nt_masked` around the activation, in the masked layout; takes
  `ExpertMajorTokens` as DeepEP's low-latency kernels leave them.
- `ContiguousExperts`: `CuteDslMoEWrapper`, which sorts rows by expert, gathers, and fuses activation, quantisation,
  routing weights and the sum over K; takes `FlatTokens`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch

from eprt.activation import activated
from eprt.config import TokenFormat
from eprt.errors import ConfigError, InputError
from eprt.experts.base import PreparedExecutor
from eprt.experts.blackwell.scales import GATED_ROWS, Nvfp4Factors, linear_nvfp4, nvfp4_stack
from eprt.experts.blackwell.swizzle import mma_scale_view, swizzle_scales, widen
from eprt.quant import decode_payload
from eprt.rounding import round_up
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, merge_repeats
from eprt.weights import NVFP4_BLOCK, ExpertWeights, Nvfp4

ROWS = 128  # both GEMMs need a number of output rows that is a multiple of this (FlashInfer 0.7.2)


def load_kernels() -> SimpleNamespace:
    """Returns FlashInfer's entry points that are used here. A test puts its own in their place."""
    import flashinfer
    from flashinfer.autotuner import autotune
    from flashinfer.cute_dsl import grouped_gemm_nt_masked
    from flashinfer.fused_moe import ActivationType, CuteDslMoEWrapper

    return SimpleNamespace(
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


class _Experts:
    """The weights of one kernel family: codes u8 [L, rows, cols/2] and 6-D scales of both matrices, and their factors.

    Args:
        executor: what they are a part of.
        kernels: as `load_kernels` returns them.
        contiguous: a gated first matrix has up and gate in turns of 64 rows; activations that aren't linear in up need
            one second-level scale for both.
    """

    def __init__(
        self, executor: PreparedExecutor, kernels: SimpleNamespace, weights: ExpertWeights, contiguous: bool
    ) -> None:
        self._kernels, self._require_cold = kernels, executor.require_cold
        self._activation = activation = executor.config.activation
        gate_up, down = cast(Nvfp4, weights.gate_up), cast(Nvfp4, weights.down)
        share = contiguous and not activation.plain
        self._factors = Nvfp4Factors.from_matrices(gate_up, down, executor.device, shared=share)
        H, I = padded_size(weights, activation.parts)
        options = {"alternate": contiguous and activation.gated, "share_scale": share}
        stacks = (
            nvfp4_stack(gate_up, activation.parts, I, H, executor.device, **options),
            nvfp4_stack(down, 1, H, I, executor.device),
        )
        self._codes = [stack["codes"] for stack in stacks]
        self._scales = [mma_scale_view(stack["scales"]) for stack in stacks]


class MaskedExperts(_Experts):
    """Runs the masked kernels: quantise, GEMM, activation, quantise, GEMM. Rows at and past the counts are never read.

    The second GEMM and the combine run one after the other. The GEMM could signal finished tiles while it leaves
    multiprocessors free (`dst_signals`, `sm_count`), but DeepEP 1.2.1's `low_latency_combine` has no argument that
    would wait for them; tests/upstream/test_deepep.py fails as soon as one appears.

    The library compiles a GEMM for each number of rows per expert. Fewer rows are raised to a number that it has, which
    costs memory but, as rows past the counts are skipped, no arithmetic; more are compiled, or refused behind a
    warm World.

    The kernels read weights with L last (memory [L, rows, cols]), rows [gate; up].

    Raises:
        ConfigError: a checkpoint without input scales.
    """

    def __init__(self, executor: PreparedExecutor, kernels: SimpleNamespace, weights: ExpertWeights) -> None:
        super().__init__(executor, kernels, weights, contiguous=False)
        factors, activation = self._factors, self._activation
        if factors.input is None or factors.intermediate is None:
            raise ConfigError(
                "cutedsl_nvfp4 quantises expert-major tokens and needs the checkpoint's input_scale, which experts "
                "lack: use a dispatcher that emits flat tokens (computed with bf16 activations)"
            )
        self._heights: set[int] = set()  # rows per expert that GEMMs are compiled for
        # Codes u8 [rows, cols/2, L], scales 6-D (32, 4, row tiles, 4, column tiles, L).
        self._first, self._second = zip((codes.permute(1, 2, 0) for codes in self._codes), self._scales, strict=True)
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

    def _height(self, rows: int) -> int:
        """Returns the least compiled number of rows per expert that holds `rows`; compiles for `rows` if none does."""
        enough = [height for height in self._heights if height >= rows]
        if enough:
            return min(enough)
        self._require_cold(f"compiling cutedsl_nvfp4's GEMMs for {rows} rows per expert")
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
        """Activates, in float32, and quantises bf16 [L, M, parts * I] to [L, M, I], as the second GEMM takes it."""
        if self._fused:
            fused = self._kernels.silu_and_mul_scaled_nvfp4_experts_quantize
            return fused(middle, counts, self._quantiser, nvfp4_4over6=None)
        gate, up = middle.float().chunk(2, dim=-1) if self._activation.gated else (None, middle.float())
        up = up if gate is None else up * self._ratio[:, None, None]
        h = activated(self._activation, gate, up).to(torch.bfloat16)
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


class ContiguousExperts(_Experts):
    """`CuteDslMoEWrapper`: one call for everything. Applies the routing weights and sums over K; writes every row.

    The kernels read the rows of a gated first matrix as up and gate in turns of 64 rows.
    """

    def __init__(self, executor: PreparedExecutor, kernels: SimpleNamespace, weights: ExpertWeights) -> None:
        super().__init__(executor, kernels, weights, contiguous=True)
        self._wrappers: dict[int, Any] = {}
        self._shard, self._deterministic = executor.shard, executor.runtime.deterministic
        self._scales = [scales.view(torch.uint8) for scales in self._scales]
        factors = self._factors
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

    def _quantised(self, hidden: Payload) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Returns codes u8 [N, H/2] and scales u8 [N, H/16] (bf16 and None for W4A16), and the first GEMM's factor."""
        width = 2 * self._codes[0].shape[2]
        if self._multiplier is None:
            return widen(_bf16(hidden), width).contiguous(), None, self._gate
        codes, scales, above = linear_nvfp4(hidden, width, _bf16, self._kernels.fp4_quantize, self._multiplier)
        return codes, scales.view(torch.uint8), self._calibrated_gate if above is None else self._gate * above

    def _wrapper(self, top_k: int) -> Any:
        """Makes one wrapper per top-k: a dispatcher may pad the model's, an adapter emits 1."""
        if top_k not in self._wrappers:
            self._require_cold(f"compiling cutedsl_nvfp4's kernels for top-k {top_k}")
            activation, down, shard = self._activation, self._codes[1], self._shard
            swiglu = {"swiglu_alpha": activation.alpha, "swiglu_beta": activation.beta}
            swiglu |= {} if activation.limit is None else {"swiglu_limit": activation.limit}
            self._wrappers[top_k] = self._kernels.moe_wrapper(
                num_experts=shard.num_experts,
                top_k=top_k,
                hidden_size=down.shape[1],
                intermediate_size=2 * down.shape[2],
                use_cuda_graph=down.is_cuda,
                num_local_experts=shard.num_local_experts,
                local_expert_offset=shard.first_expert,
                output_dtype=torch.bfloat16,
                device=str(down.device),
                activation_type=self._kernels.swiglu if activation.gated else self._kernels.relu2,
                # The fused finalize adds with atomics, in no fixed order.
                use_fused_finalize=not self._deterministic,
                quant_mode="w4a16" if self._multiplier is None else "w4a4",
                **({} if activation.plain else swiglu),
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

    kernels: ClassVar[SimpleNamespace | None] = None  # None: FlashInfer's, imported when an executor is built

    def _prepare(self, weights: ExpertWeights) -> None:
        self._kernels, wanted = type(self).kernels or load_kernels(), self.runtime.token_format
        calibrated = cast(Nvfp4, weights.gate_up).input_scale is not None
        self._contiguous: ContiguousExperts | None = None
        self._masked: MaskedExperts | None = None
        if wanted in (None, "flat"):
            self._contiguous = ContiguousExperts(self, self._kernels, weights)
        if wanted == "expert_major" or (wanted is None and calibrated):
            self._masked = MaskedExperts(self, self._kernels, weights)

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
        """Compiles; of FlatTokens, times FlashInfer's tactics for its ladder of batch sizes up to `max_rows`, too."""
        if self._contiguous is not None:
            with self._kernels.autotune(True):
                self(self._even_tokens(max_rows, top_k))
        if self._masked is not None:
            L, device = self.shard.num_local_experts, self.device
            rows = torch.zeros((L, max_rows, self.config.hidden_size), dtype=torch.bfloat16, device=device)
            self(ExpertMajorTokens(Payload.plain(rows), torch.zeros(L, dtype=torch.int32, device=device)))


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
