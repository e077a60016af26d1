"""A stand-in for FlashInfer's TRT-LLM-gen kernels; `sm100_kernels` names the sources."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import torch

from support.cases.number_formats import e8m0_numbers
from support.stand_ins import sm100_kernels as sm100
from support.stand_ins.sm100_kernels import RELU2, SWIGLU, Quantiser, expect, expect_like, quantise, values

U8, I32, F32, BF16, FP8 = torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.float8_e4m3fn


def shuffled_place(row: torch.Tensor) -> torch.Tensor:
    """Where row `row` of a matrix lies: block of 32, 0 -> 0, 1 -> 8, 2 -> 16, 3 -> 24, 4 -> 1, ..."""
    return row // 32 * 32 + row % 4 * 8 + row % 32 // 4


def read_swizzled(scales: torch.Tensor, rows: torch.Tensor, cols: int) -> torch.Tensor:
    """Block scales (bytes) of `rows`, from one expert's swizzled buffer."""
    return scales.view(U8).flatten()[sm100.scale_offset(rows[:, None], torch.arange(cols)[None], cols)]


ROUTING = ("routing_bias", "routing_method_type", "n_group", "topk_group", "routed_scaling_factor")
PRECOMPUTED = 5


class FakeTrtllm:
    """All entry points of `trtllm_formats.load_kernels`."""

    def __init__(self, rounding: bool = True) -> None:
        self.rounding = rounding
        self.calls: list[str] = []
        self._quantiser = Quantiser(rounding)

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
        sm100.check_routing(ids, weights, N, o.top_k, o.num_experts)
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
            return data.float() * e8m0_numbers(exponents).repeat_interleave(32, -1)

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
