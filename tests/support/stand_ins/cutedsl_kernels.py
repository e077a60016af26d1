"""A stand-in for FlashInfer's CuteDSL kernels; `sm100_kernels` names the sources."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from support.stand_ins import sm100_kernels as sm100
from support.stand_ins.sm100_kernels import RELU2, SWIGLU, Quantiser, expect, expect_like, quantise, values

U8, I32, F32, BF16, FP8 = torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fn


def read_mma_scales(view: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """[L, rows, cols] float32 of the 6-D layout, after checking its shape and strides."""
    row_tiles, col_tiles, L = -(-rows // 128), -(-cols // 4), view.shape[5]
    expect(tuple(view.shape) == (32, 4, row_tiles, 4, col_tiles, L), f"scales {tuple(view.shape)} for {rows} x {cols}")
    strides = (16, 4, col_tiles * 512, 1, 512, row_tiles * col_tiles * 512)
    expect(L == 1 or view.stride() == strides, f"scale strides {view.stride()}, expected {strides}")
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    bytes_ = view.view(U8) if view.dtype != U8 else view
    read = bytes_[r % 32, r % 128 // 32, r // 128, c % 4, c // 4]
    return read.permute(2, 0, 1).contiguous().view(FP8).float()


def write_mma_scales(scales: torch.Tensor) -> torch.Tensor:
    """[L, rows, cols] e4m3 -> the 6-D view, in memory (L, row tiles, column tiles, 32, 4, 4)."""
    L, rows, cols = scales.shape
    row_tiles, col_tiles = -(-rows // 128), -(-cols // 4)
    memory = torch.full((L, row_tiles * col_tiles * 512), 0x7F, dtype=U8)  # NaN wherever nothing is written
    r, c = torch.arange(rows)[:, None], torch.arange(cols)[None]
    memory[:, sm100.scale_offset(r, c, cols).flatten()] = scales.view(U8).reshape(L, -1)
    shaped = memory.view(L, row_tiles, col_tiles, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
    return shaped.view(FP8)


GEMM_OPTIONS = {
    "ab_dtype": "float4_e2m1fn", "sf_dtype": "float8_e4m3fn", "c_dtype": "bfloat16", "sf_vec_size": 16,
    "alpha_dtype": "float32",
}  # fmt: skip
GEOMETRY = {
    "num_experts", "top_k", "hidden_size", "intermediate_size", "use_cuda_graph", "num_local_experts",
    "local_expert_offset", "output_dtype", "device", "activation_type", "use_fused_finalize", "quant_mode",
}  # fmt: skip
SWIGLU_DEFAULTS = {"swiglu_alpha": 1.0, "swiglu_beta": 0.0, "swiglu_limit": None}


CUTEDSL = (
    "fp4_quantize", "scaled_fp4_grouped_quantize", "silu_and_mul_scaled_nvfp4_experts_quantize",
    "grouped_gemm_nt_masked", "moe_wrapper", "autotune", "relu2", "swiglu",
)  # fmt: skip


class FakeCuteDsl(Quantiser):
    """All entry points of `cutedsl.load_kernels`."""

    relu2, swiglu = RELU2, SWIGLU

    def kernels(self) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(self, name) for name in CUTEDSL})

    def autotune(self, on):
        return nullcontext()

    def _grouped(self, x, mask, multiplier, nvfp4_4over6):
        L, _, K = x.shape
        expect(x.dtype == BF16 and x.is_contiguous() and K % 16 == 0, "grouped quantise takes bf16 [L, M, K]")
        expect_like(mask=(mask, I32, L), global_scales=(multiplier, F32, L))
        expect(nvfp4_4over6 is None, "recipe left to environment variables")

    def _masked_quantise(self, x, mask, multiplier):
        """Rows past the mask stay garbage."""
        codes, scales = quantise(x, multiplier[:, None, None, None])
        past = torch.arange(x.shape[1])[None, :] >= mask[:, None]
        codes[past] = 0x77
        scales.view(U8)[past] = 0x7F
        exact = torch.where(past[..., None], torch.nan, x.float() * multiplier[:, None, None])
        self._exact[codes.data_ptr()] = (codes, exact)
        return codes.permute(1, 2, 0), write_mma_scales(scales)

    def scaled_fp4_grouped_quantize(self, a, mask, a_global_sf, nvfp4_4over6=sm100.UNSET):
        self.calls.append("scaled_fp4_grouped_quantize")
        self._grouped(a, mask, a_global_sf, nvfp4_4over6)
        return self._masked_quantise(a, mask, a_global_sf)

    def silu_and_mul_scaled_nvfp4_experts_quantize(self, a, mask, a_global_sf, nvfp4_4over6=sm100.UNSET):
        self.calls.append("silu_and_mul_scaled_nvfp4_experts_quantize")
        self._grouped(a, mask, a_global_sf, nvfp4_4over6)
        gate, up = a[..., : a.shape[2] // 2].float(), a[..., a.shape[2] // 2 :].float()
        return self._masked_quantise(sm100.activate(SWIGLU, gate, up), mask, a_global_sf)

    def grouped_gemm_nt_masked(self, lhs, rhs, out, masked_m, **options):
        self.calls.append("grouped_gemm_nt_masked")
        alpha = options.pop("alpha")
        expect(options == GEMM_OPTIONS, f"options {options}")
        (a, a_scales), (b, b_scales) = lhs, rhs
        m, half, L = a.shape
        n, k = b.shape[0], 2 * half
        expect(a.dtype == b.dtype == U8, "codes are bytes")
        expect(tuple(b.shape) == (n, half, L) and tuple(out.shape) == (m, n, L), "A (m,k,l), B (n,k,l), C (m,n,l)")
        for name, tensor in (("A", a), ("B", b), ("C", out)):
            expect(tensor.permute(2, 0, 1).is_contiguous(), f"{name} isn't [L, rows, cols] in memory")
            expect(tensor.data_ptr() % 16 == 0, f"{name} isn't aligned to 16 bytes")
        expect(n % 128 == 0 and k % 32 == 0 and out.dtype == BF16, f"n {n}, k {k}, C {out.dtype}")
        expect(alpha.numel() == L and alpha.dtype == F32, "alpha is float32, one an expert")
        expect_like(masked_m=(masked_m, I32, L))
        weights = values(b.permute(2, 0, 1), read_mma_scales(b_scales, n, k // 16))
        tokens = self.tokens(a.permute(2, 0, 1), read_mma_scales(a_scales, m, k // 16))
        out.fill_(torch.nan)
        for e in range(L):
            rows = int(masked_m[e])
            out.permute(2, 0, 1)[e, :rows] = (tokens[e, :rows] @ weights[e].T * alpha.flatten()[e]).to(out.dtype)
        return out

    def moe_wrapper(self, **geometry):
        return FakeMoEWrapper(self, **geometry)


class FakeMoEWrapper:
    def __init__(self, owner, **geometry):
        expect(GEOMETRY <= geometry.keys() <= GEOMETRY | SWIGLU_DEFAULTS.keys(), f"geometry {sorted(geometry)}")
        vars(self).update(SWIGLU_DEFAULTS | geometry, owner=owner)
        rows = self.intermediate_size * (1 + (self.activation_type == SWIGLU))
        expect(self.activation_type in (SWIGLU, RELU2), f"activation {self.activation_type}")
        expect(self.quant_mode in ("w4a4", "w4a16") and self.output_dtype == BF16, f"mode {self.quant_mode}")
        expect(self.hidden_size % 128 == 0, f"GEMM2 rows {self.hidden_size}")
        expect(rows % 128 == 0, f"GEMM1 rows of I {self.intermediate_size}")

    def run(
        self, *, x, x_sf, token_selected_experts, token_final_scales, w1_weight, w1_weight_sf, w1_alpha,
        fc2_input_scale, w2_weight, w2_weight_sf, w2_alpha,
    ):  # fmt: skip
        self.owner.calls.append("run")
        L, H, I = self.num_local_experts, self.hidden_size, self.intermediate_size
        gated = self.activation_type == SWIGLU
        rows = I * (1 + gated)
        tokens = self._tokens(x, x_sf, fc2_input_scale)
        ids, N = token_selected_experts, x.shape[0]
        sm100.check_routing(ids, token_final_scales, N, self.top_k, self.num_experts)
        expect_like(w1=(w1_weight, U8, L, rows, H // 2), w2=(w2_weight, U8, L, H, I // 2))
        expect_like(w1_alpha=(w1_alpha, F32, L), w2_alpha=(w2_alpha, F32, L))
        expect(w1_weight.data_ptr() % 32 == 0 and w2_weight.data_ptr() % 32 == 0, "weights are aligned to 32 bytes")
        w1 = values(w1_weight, read_mma_scales(w1_weight_sf, rows, H // 16)) * w1_alpha[:, None, None]
        w2 = values(w2_weight, read_mma_scales(w2_weight_sf, H, I // 16)) * w2_alpha[:, None, None]
        out = torch.zeros(N, H)
        j = torch.arange(I)
        for e in range(L):
            chosen = (ids == self.local_expert_offset + e).nonzero()
            sums = tokens[chosen[:, 0]] @ w1[e].T
            first = j // 64 * 128 + j % 64  # 64 rows of up, 64 of gate, ...
            gate, up = (sums[:, first + 64], sums[:, first]) if gated else (sums, sums)
            swiglu = self.swiglu_alpha, self.swiglu_beta, self.swiglu_limit
            h = sm100.activate(self.activation_type, gate, up, *swiglu)
            if fc2_input_scale is not None:
                h = h * fc2_input_scale
                h = values(*quantise(h, 1.0)) if self.owner.rounding else h
            weight = token_final_scales[chosen[:, 0], chosen[:, 1]]
            out.index_add_(0, chosen[:, 0], weight[:, None] * (h @ w2[e].T))
        return out.to(BF16)

    def _tokens(self, x, x_sf, fc2_input_scale):
        if self.quant_mode == "w4a16":
            expect(x_sf is None and fc2_input_scale is None, "W4A16 takes no scales of tokens")
            expect(x.dtype == BF16 and x.shape[1] == self.hidden_size, "W4A16 takes bf16 [N, H]")
            return x.float()
        N, H = x.shape[0], self.hidden_size
        expect_like(x=(x, U8, N, H // 2), x_sf=(x_sf, U8, N, H // 16), fc2_input_scale=(fc2_input_scale, F32, 1))
        return self.owner.tokens(x, x_sf.view(FP8))
