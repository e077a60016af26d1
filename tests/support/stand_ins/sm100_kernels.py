"""Stand-ins for FlashInfer's Blackwell kernels: they check what they are given as the library's own launchers do, read
the prepared tensors by the documented addresses, and compute slowly.

Sources (FlashInfer 0.7.2): csrc/trtllm_fused_moe_kernel_launcher.cu (checks), batched_gemm/KernelRunner.h (formula),
utils.py srcToDstBlk32RowMap, cute_dsl/utils.py convert_sf_to_mma_layout, the docstrings of the CuteDSL gather GEMM
and of grouped_gemm_nt_masked. Nothing here uses eprt's layouts, its number formats or its executors.

`rounding=False` leaves tokens that the kernels quantise, and what passes between the two GEMMs, unrounded, so that the
algebra of the scales shows.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
UNSET = object()
SWIGLU, RELU2 = 3, 6
U8, I32, F32, BF16, FP8 = torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fn


def quantise(x: torch.Tensor, multiplier: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
    """[..., C] -> (u8 [..., C/2], e4m3 [..., C/16]): block scale = e4m3(amax * multiplier / 6)."""
    blocks = x.float().reshape(*x.shape[:-1], x.shape[-1] // 16, 16) * multiplier
    scales = (blocks.abs().amax(-1) / 6).clamp(max=448).to(FP8)
    step = scales.float()[..., None]
    ratio = torch.where(step > 0, blocks / step, 0.0).flatten(-2)
    codes = (ratio[..., None] - E2M1[:8].where(ratio[..., None] >= 0, -E2M1[:8])).abs().argmin(-1)
    codes = codes + 8 * (ratio < 0)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(U8), scales


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """u8 [..., C/2], e4m3 [..., C/16] -> float32 [..., C]."""
    spread = torch.stack((E2M1[(codes & 15).long()], E2M1[(codes >> 4).long()]), -1).flatten(-2)
    return spread * scales.float().repeat_interleave(16, -1)


def activate(kind: int, gate, up, alpha=1.0, beta=0.0, limit=None) -> torch.Tensor:
    if kind == RELU2:
        return torch.relu(gate) ** 2
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + beta)


def scale_offset(row: torch.Tensor, col: torch.Tensor, cols: int) -> torch.Tensor:
    """Byte of the block scale (row, col) in the 128 x 4 swizzled order, for a matrix of `cols` scales a row."""
    tile = (row // 128) * -(-cols // 4) + col // 4
    return tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + col % 4


def expect(ok: bool, what: str) -> None:
    if not ok:
        raise AssertionError(f"kernel contract: {what}")


def expect_like(**given) -> None:
    """Checks each `name=(tensor, dtype, *shape)`: tensors are contiguous, of this dtype and shape."""
    for name, (tensor, dtype, *shape) in given.items():
        fits = tensor.dtype == dtype and list(tensor.shape) == shape and tensor.is_contiguous()
        expect(fits, f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {shape}, contiguous")


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
    memory[:, scale_offset(r, c, cols).flatten()] = scales.view(U8).reshape(L, -1)
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


class FakeCuteDsl:
    """All entry points of `cutedsl.load_kernels`; `calls` counts them."""

    def __init__(self, rounding: bool = True) -> None:
        self.rounding = rounding
        self.calls: list[str] = []
        self._exact: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by address of the codes

    relu2, swiglu = RELU2, SWIGLU

    def kernels(self) -> SimpleNamespace:
        return SimpleNamespace(**{name: getattr(self, name) for name in CUTEDSL})

    def autotune(self, on):
        return nullcontext()

    def fp4_quantize(self, x, global_scale, *, sf_vec_size, is_sf_swizzled_layout, nvfp4_4over6=UNSET):
        self.calls.append("fp4_quantize")
        expect(x.dtype == BF16 and x.dim() == 2 and x.is_contiguous(), "fp4_quantize takes bf16 [M, K]")
        expect_like(global_scale=(global_scale, F32, 1))
        expect(sf_vec_size == 16 and not is_sf_swizzled_layout, "linear scales of 16")
        expect(nvfp4_4over6 is None, "recipe left to environment variables")
        codes, scales = quantise(x, global_scale)
        self._exact[codes.data_ptr()] = (codes, x.float() * global_scale)
        return codes, scales.view(U8)

    def tokens(self, codes, scales):
        """Values of codes [.., C/2]; unrounded if this stand-in made them itself and doesn't round."""
        if not self.rounding and codes.data_ptr() in self._exact:
            return self._exact[codes.data_ptr()][1]
        return values(codes, scales)

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

    def scaled_fp4_grouped_quantize(self, a, mask, a_global_sf, nvfp4_4over6=UNSET):
        self.calls.append("scaled_fp4_grouped_quantize")
        self._grouped(a, mask, a_global_sf, nvfp4_4over6)
        return self._masked_quantise(a, mask, a_global_sf)

    def silu_and_mul_scaled_nvfp4_experts_quantize(self, a, mask, a_global_sf, nvfp4_4over6=UNSET):
        self.calls.append("silu_and_mul_scaled_nvfp4_experts_quantize")
        self._grouped(a, mask, a_global_sf, nvfp4_4over6)
        gate, up = a[..., : a.shape[2] // 2].float(), a[..., a.shape[2] // 2 :].float()
        return self._masked_quantise(activate(SWIGLU, gate, up), mask, a_global_sf)

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
        L, H, I, gated = (
            self.num_local_experts,
            self.hidden_size,
            self.intermediate_size,
            self.activation_type == SWIGLU,
        )
        rows = I * (1 + gated)
        tokens = self._tokens(x, x_sf, fc2_input_scale)
        ids, N = token_selected_experts, x.shape[0]
        check_routing(ids, token_final_scales, N, self.top_k, self.num_experts)
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
            h = activate(self.activation_type, gate, up, *swiglu)
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


def check_routing(ids, weights, N, top_k, num_experts):
    expect_like(ids=(ids, I32, N, top_k), weights=(weights, F32, N, top_k))
    expect(N > 0, "no rows")
    expect(bool(((ids >= 0) & (ids <= num_experts)).all()), "ids are global, E for none")
    in_order = ids.sort(1).values
    repeated = (in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] < num_experts)
    expect(not bool(repeated.any()), "a row names an expert twice: the kernel keeps one of the two slots")


def shuffled_place(row: torch.Tensor) -> torch.Tensor:
    """Where row `row` of a matrix lies: block of 32, 0 -> 0, 1 -> 8, 2 -> 16, 3 -> 24, 4 -> 1, ..."""
    return row // 32 * 32 + row % 4 * 8 + row % 32 // 4


def read_swizzled(scales: torch.Tensor, rows: torch.Tensor, cols: int) -> torch.Tensor:
    """Block scales (bytes) of `rows`, from one expert's swizzled buffer."""
    return scales.view(U8).flatten()[scale_offset(rows[:, None], torch.arange(cols)[None], cols)]


ROUTING = ("routing_bias", "routing_method_type", "n_group", "topk_group", "routed_scaling_factor")
PRECOMPUTED = 5


class FakeTrtllm:
    """All entry points of `trtllm_formats.load_kernels`."""

    def __init__(self, rounding: bool = True) -> None:
        self.rounding = rounding
        self.calls: list[str] = []
        self._quantiser = FakeCuteDsl(rounding)

    def kernels(self) -> SimpleNamespace:
        routed = {"fp4": self.fp4, "fp8_block": self.fp8_block, "fp8_tensor": self.fp8_tensor}
        return SimpleNamespace(
            routed=routed,
            logits={name: self._from_logits(kernel) for name, kernel in routed.items()},
            fp4_quantize=self._quantiser.fp4_quantize,
            mxfp8_quantize=self.mxfp8_quantize,
            autotune=lambda on: nullcontext(),
            enums=ENUMS,
        )

    def mxfp8_quantize(self, x, is_sf_swizzled_layout):
        expect(x.dtype == BF16 and x.is_contiguous() and not is_sf_swizzled_layout, "bf16, linear scales")
        blocks = x.float().view(x.shape[0], -1, 32)
        exponent = torch.ceil(torch.log2((blocks.abs().amax(-1) / 448).clamp(min=2.0**-126)))
        data = (blocks / 2 ** exponent[..., None]).to(FP8)
        return data.flatten(1), (exponent + 127).to(U8).flatten()

    def _from_logits(self, kernel):
        def run(*, routing_logits, **options):
            self.calls.append("logits")
            expect(routing_logits.shape[1] == options["num_experts"], "logits [N, E]")
            expect(routing_logits.dtype in (F32, BF16), "logits f32 or bf16")
            routing = [options[name] for name in ROUTING]
            ids, weights = choose(routing_logits.float(), *routing, options["top_k"])
            before = dict.fromkeys(ROUTING) | {"routing_method_type": PRECOMPUTED}
            return kernel(topk_ids=(ids.to(I32), weights), **options | before)

        return run

    def _common(self, N, o):
        """Checks shared by the launchers, and the geometry."""
        ids, weights = o.topk_ids
        check_routing(ids, weights, N, o.top_k, o.num_experts)
        expect(o.routed_scaling_factor is None, "routed scaling is in the weights already")
        expect(o.routing_bias is None and o.n_group is None and o.topk_group is None, "routing was done before")
        expect(o.routing_method_type == PRECOMPUTED, "precomputed routing")
        expect(o.do_finalize is True and o.activation_type in (SWIGLU, RELU2), "finalised, known activation")
        expect(o.local_expert_offset + o.local_num_experts <= o.num_experts, "local range")
        expect(o.output.dtype == BF16 and o.output.is_contiguous(), "bf16 output")
        expect(o.tune_max_num_tokens >= N, "tuned for fewer rows than it is given")
        gated = o.activation_type == SWIGLU
        return ids, weights, gated, o.intermediate_size * (2 if gated else 1)

    def _finish(self, o, ids, weights, expert):
        """Weighted sums of `expert(e, rows)` over the local experts; 0 where a row has none."""
        out = torch.zeros(o.output.shape)
        for e in range(o.local_num_experts):
            chosen = (ids == o.local_expert_offset + e).nonzero()
            out.index_add_(0, chosen[:, 0], weights[chosen[:, 0], chosen[:, 1], None] * expert(e, chosen[:, 0]))
        o.output.copy_(out)
        return [o.output]

    def _rows(self, gated, intermediate):
        """Places of up's (or the only) rows and of gate's in a shuffled first matrix."""
        i = torch.arange(intermediate)
        return (shuffled_place(2 * i), shuffled_place(2 * i + 1)) if gated else (shuffled_place(i), shuffled_place(i))

    def fp4(self, **keywords):
        self.calls.append("fp4")
        o = SimpleNamespace(**keywords)
        N, half = o.hidden_states.shape
        H, I = 2 * half, o.intermediate_size
        ids, weights, gated, rows = self._common(N, o)
        L = o.local_num_experts
        expect_like(tokens=(o.hidden_states, U8, N, half), token_scales=(o.hidden_states_scale, FP8, N, H // 16))
        expect(o.hidden_states_scale_layout == ENUMS.SfLayout.layout_linear, "layout named")
        expect(rows % 128 == 0 and H % 128 == 0 and I % 64 == 0, f"rows {rows}, H {H}")
        expect_like(gemm1=(o.gemm1_weights, U8, L, rows, H // 2), gemm2=(o.gemm2_weights, U8, L, H, I // 2))
        scales = o.gemm1_weights_scale, o.gemm2_weights_scale
        expect_like(gemm1_scales=(scales[0], FP8, L, rows, H // 16), gemm2_scales=(scales[1], FP8, L, H, I // 16))
        expect(o.gemm1_bias is None and o.gemm2_bias is None, "no bias")
        per_expert(L, o.output1_scale_scalar, o.output1_scale_gate_scalar, o.output2_scale_scalar)
        per_expert(L, *(v for v in (o.gemm1_alpha, o.gemm1_beta, o.gemm1_clamp_limit) if v is not None))
        tokens = self._quantiser.tokens(o.hidden_states, o.hidden_states_scale)
        up_rows, gate_rows = self._rows(gated, I)
        down_rows = shuffled_place(torch.arange(H))

        def matrix(codes, scales, places, cols):
            bytes_ = read_swizzled(scales, places, cols // 16)
            return values(codes[places], bytes_.view(FP8))

        def expert(e, chosen):
            raw = [
                tokens[chosen] @ matrix(o.gemm1_weights[e], o.gemm1_weights_scale[e], places, H).T
                for places in (up_rows, gate_rows)
            ]
            h = fused(gated, *raw, o.output1_scale_scalar[e], o.output1_scale_gate_scalar[e], *swiglu(o, e))
            h = values(*quantise(h, 1.0)) if self.rounding else h
            return h @ matrix(o.gemm2_weights[e], o.gemm2_weights_scale[e], down_rows, I).T * o.output2_scale_scalar[e]

        return self._finish(o, ids, weights, expert)

    def fp8_tensor(self, **keywords):
        self.calls.append("fp8_tensor")
        o = SimpleNamespace(**keywords)
        N, H = o.hidden_states.shape
        I, L = o.intermediate_size, o.local_num_experts
        ids, weights, gated, rows = self._common(N, o)
        expect(o.use_routing_scales_on_input is False, "weights applied to the output")
        expect(rows % 128 == 0, f"rows {rows}")
        expect_fp8(o, N, H, I, L, rows)
        per_expert(L, o.output1_scales_scalar, o.output1_scales_gate_scalar, o.output2_scales_scalar)
        up_rows, gate_rows = self._rows(gated, I)
        down_rows = shuffled_place(torch.arange(H))

        def expert(e, chosen):
            x = o.hidden_states[chosen].float()
            raw = [x @ o.gemm1_weights[e].float()[places].T for places in (up_rows, gate_rows)]
            h = fused(gated, *raw, o.output1_scales_scalar[e], o.output1_scales_gate_scalar[e])
            h = h.clamp(-448, 448).to(FP8).float() if self.rounding else h
            return h @ o.gemm2_weights[e].float()[down_rows].T * o.output2_scales_scalar[e]

        return self._finish(o, ids, weights, expert)

    def fp8_block(self, **keywords):
        self.calls.append("fp8_block")
        o = SimpleNamespace(**{"gemm1_alpha": None, "gemm1_beta": None, "gemm1_clamp_limit": None} | keywords)
        N, H = o.hidden_states.shape
        I, L = o.intermediate_size, o.local_num_experts
        ids, weights, gated, rows = self._common(N, o)
        expect(o.num_experts % 4 == 0 and o.num_experts > o.top_k, "routing wants E % 4 == 0 and E > K")
        expect_fp8(o, N, H, I, L, rows)
        per_expert(L, *(v for v in (o.gemm1_alpha, o.gemm1_beta, o.gemm1_clamp_limit) if v is not None))
        read = self._mxfp8 if o.fp8_quantization_type == 2 else self._deepseek
        tokens, first, second = read(o, N, H, I, L, rows, gated)

        def expert(e, chosen):
            up, gate = (tokens[chosen] @ m.T for m in first(e))
            return fused(gated, up, gate, 1.0, 1.0, *swiglu(o, e)) @ second(e).T

        return self._finish(o, ids, weights, expert)

    def _deepseek(self, o, N, H, I, L, rows, gated):
        expect(o.fp8_quantization_type == 1 and gated, "DeepSeek FP8 is gated")
        expect(o.use_shuffled_weight is False, "rows as they are")
        expect_like(token_scales=(o.hidden_states_scale, F32, H // 128, N))
        scales = o.gemm1_weights_scale, o.gemm2_weights_scale
        expect_like(first=(scales[0], F32, L, rows // 128, H // 128), second=(scales[1], F32, L, H // 128, I // 128))
        tokens = o.hidden_states.float() * o.hidden_states_scale.T.repeat_interleave(128, 1)

        def blocks(data, scale):
            return data.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)

        def first(e):
            whole = blocks(o.gemm1_weights[e], o.gemm1_weights_scale[e])
            return whole[:I], whole[I:]  # up, then gate

        return tokens, first, lambda e: blocks(o.gemm2_weights[e], o.gemm2_weights_scale[e])

    def _mxfp8(self, o, N, H, I, L, rows, gated):
        expect(o.use_shuffled_weight is True, "shuffled rows")
        expect_like(
            token_scales=(o.hidden_states_scale, U8, N, H // 32),
            gemm1_scales=(o.gemm1_weights_scale, U8, L, rows, H // 32),
            gemm2_scales=(o.gemm2_weights_scale, U8, L, H, I // 32),
        )

        def spread(data, exponents):
            return data.float() * (2.0 ** (exponents.float() - 127)).repeat_interleave(32, -1)

        def matrix(data, scales, places, cols):
            return spread(data[places], read_swizzled(scales, places, cols // 32))

        def first(e):
            return [matrix(o.gemm1_weights[e], o.gemm1_weights_scale[e], p, H) for p in self._rows(gated, I)]

        down = shuffled_place(torch.arange(H))
        tokens = spread(o.hidden_states, o.hidden_states_scale)
        return tokens, first, lambda e: matrix(o.gemm2_weights[e], o.gemm2_weights_scale[e], down, I)


def expect_fp8(o, N, H, I, L, rows):
    expect(H % 128 == 0 and I % 128 == 0, f"H {H}, I {I}")
    expect(o.hidden_states.dtype == FP8, "tokens e4m3")
    expect_like(gemm1=(o.gemm1_weights, FP8, L, rows, H), gemm2=(o.gemm2_weights, FP8, L, H, I))


def per_expert(L, *scalars):
    for scalar in scalars:
        expect_like(scalars=(scalar, F32, L))


def swiglu(o, e):
    return [None if v is None else v[e] for v in (o.gemm1_alpha, o.gemm1_beta, o.gemm1_clamp_limit)]


def fused(gated, x0, x1, scale_c, scale_gate, alpha=None, beta=None, limit=None):
    """KernelRunner.h: raw sums of up and gate -> what leaves the first GEMM."""
    if not gated:
        return scale_c * torch.relu(x0 * scale_gate) ** 2
    if limit is not None:
        x0, x1 = x0.clamp(-limit, limit), x1.clamp(max=limit)
    gate = x1 * scale_gate
    up = x0 + (0.0 if beta is None else beta)
    return scale_c * up * gate * torch.sigmoid((1.0 if alpha is None else alpha) * gate)


def choose(logits, bias, method, n_group, topk_group, scaling, top_k):
    """The logits kernels' routing methods (FlashInfer tllm_enums.RoutingMethodType)."""
    if method == 0:
        weights, ids = logits.softmax(-1).topk(top_k)
        return ids, weights
    if method in (1, 4):
        chosen, ids = logits.topk(top_k)
        return ids, chosen.softmax(-1)
    expect(method == 2, f"routing method {method}")
    expect(bias is not None and scaling is not None, "DeepSeekV3 routing has a bias and a factor")
    scores = logits.sigmoid()
    biased = scores + bias.float()
    groups = biased.view(len(logits), n_group, -1)
    best = groups.topk(2).values.sum(-1).topk(topk_group).indices
    keep = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0).bool()
    ids = groups.masked_fill(~keep[..., None], -torch.inf).flatten(1).topk(top_k).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * scaling


ENUMS = SimpleNamespace(
    SfLayout=SimpleNamespace(layout_linear=2),
    Fp8QuantizationType=SimpleNamespace(DeepSeekFp8=1, MxFp8=2),
    ActivationType=SimpleNamespace(Swiglu=SWIGLU, Relu2=RELU2),
    RoutingMethodType=SimpleNamespace(Default=0, Renormalize=1, DeepSeekV3=2, RenormalizeNaive=4, TopK=5),
)
