"""Experts as vLLM 0.26 and 0.32 hold them after loading, written by hand, beside the plain numbers they stand for.

Nothing of eprt is used for them: packing and shapes are those of the formats' papers and of vLLM's
`create_weights`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.experts import make_executor
from eprt.placement import ExpertPlacement
from eprt.tokens import FlatTokens, Payload
from eprt.weights import ExpertWeights
from support.cases.number_formats import E2M1, mxfp4_numbers, packed
from support.cases.packed_int4 import awq_words, words

L, I, H, K = 3, 128, 256, 2  # local experts, intermediate, hidden, top-k
SHAPES = ((I, H), (I, H), (H, I))  # gate, up, down


@dataclass
class Loaded:
    """One layer's parameters, and gate [L, I, H], up, down [L, H, I], biases [L, I], [L, I], [L, H] in float64. The
    scheme is what SGLang's method asks, where there is one."""

    method: Any
    activation: str
    parameters: dict[str, torch.Tensor]
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_bias: torch.Tensor | None = None
    up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    scheme: Any = None

    @property
    def dtype(self) -> torch.dtype:
        return self.parameters["w2_weight"].dtype if "w2_weight" in self.parameters else torch.bfloat16


def named(name: str, **attributes: Any) -> Any:
    """An object whose class has that name, as vLLM's methods are told apart."""
    made = type(name, (), {})()
    made.__dict__.update(attributes)
    return made


def alternating(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Rows g0, u0, g1, u1: gpt-oss."""
    rows = gate.new_empty((gate.shape[0], 2 * gate.shape[1], *gate.shape[2:]))
    rows[:, 0::2], rows[:, 1::2] = gate, up
    return rows


def stacked(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """w1 over w3: everything else."""
    return torch.cat([gate, up], dim=1)


def with_biases(made: Loaded, dtype: torch.dtype) -> Loaded:
    """gpt-oss: biases, whose rows alternate, too."""
    gate, up, down = (torch.randn(L, n).to(dtype) for n in (I, I, H))
    made.parameters |= {"w13_bias": alternating(gate, up), "w2_bias": down}
    made.gate_bias, made.up_bias, made.down_bias = gate.double(), up.double(), down.double()
    return made


def codes() -> list[torch.Tensor]:
    return [torch.randint(0, 16, (L, *shape), dtype=torch.int32) for shape in SHAPES]


def per(block: int) -> list[tuple[int, int, int]]:
    """Shapes with one entry for each `block` columns."""
    return [(L, rows, cols // block) for rows, cols in SHAPES]


def mxfp4(method: str, activation: str) -> Loaded:
    """GptOssMxfp4MoEMethod (biases, alternating rows) or Mxfp4MoEMethod (DeepSeek-V4)."""
    oss = method.startswith("GptOss")
    order = alternating if oss else stacked
    g, u, d = codes()
    gs, us, ds = (torch.randint(118, 122, shape, dtype=torch.uint8) for shape in per(32))

    def values(code: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return mxfp4_numbers(packed(code), scale).double()

    parameters = {"w13_weight": packed(order(g, u)), "w13_weight_scale": order(gs, us)}
    parameters |= {"w2_weight": packed(d), "w2_weight_scale": ds}
    made = Loaded(named(method), activation, parameters, values(g, gs), values(u, us), values(d, ds))
    return with_biases(made, torch.bfloat16) if oss else made


def nvfp4(input_scale: bool = True) -> Loaded:
    """ModelOptNvFp4FusedMoE: gate and up with second scales of their own."""
    g, u, d = codes()
    gs, us, ds = (torch.randint(1, 9, shape).float().to(torch.float8_e4m3fn) for shape in per(16))
    w13_2, w2_2 = torch.rand(L, 2) * 0.01 + 0.002, torch.rand(L) * 0.01 + 0.002
    nothing = torch.full((), float("nan"))

    def values(code: torch.Tensor, scale: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return E2M1.double()[code.long()] * scale.double().repeat_interleave(16, -1) * second.double()[:, None, None]

    return Loaded(
        named("ModelOptNvFp4FusedMoE", quant_config=SimpleNamespace(group_size=16)),
        "silu",
        {
            "w13_weight": packed(stacked(g, u)),
            "w13_weight_scale": stacked(gs.view(torch.uint8), us.view(torch.uint8)).view(torch.float8_e4m3fn),
            "w13_weight_scale_2": w13_2,
            "w13_input_scale": torch.rand(L, 2) + 0.1 if input_scale else nothing.expand(L, 2).clone(),
            "w2_weight": packed(d),
            "w2_weight_scale": ds,
            "w2_weight_scale_2": w2_2,
            "w2_input_scale": torch.rand(L) + 0.1 if input_scale else nothing.expand(L).clone(),
        },
        values(g, gs, w13_2[:, 0]),
        values(u, us, w13_2[:, 1]),
        values(d, ds, w2_2),
    )


def fp8(block: list[int] | None) -> Loaded:
    """Fp8MoEMethod: DeepSeek's blocks of 128, or one scale for each of gate, up and down."""
    g, u, d = (torch.randn(L, *shape).to(torch.float8_e4m3fn) for shape in SHAPES)
    w13 = stacked(g.view(torch.uint8), u.view(torch.uint8)).view(torch.float8_e4m3fn)
    method = named("Fp8MoEMethod", weight_block_size=block)
    if block is None:
        w13_scale, w2_scale = torch.rand(L, 2) * 0.05 + 0.01, torch.rand(L) * 0.05 + 0.01
        weights = {"w13_weight": w13, "w13_weight_scale": w13_scale, "w2_weight": d, "w2_weight_scale": w2_scale}
        scales = (w13_scale[:, :1, None], w13_scale[:, 1:, None], w2_scale[:, None, None])
    else:
        gs, us, ds = (torch.rand(L, rows // 128, cols // 128) * 0.05 + 0.01 for rows, cols in SHAPES)
        weights = {"w13_weight": w13, "w13_weight_scale_inv": stacked(gs, us)}
        weights |= {"w2_weight": d, "w2_weight_scale_inv": ds}
        scales = tuple(s.repeat_interleave(128, 1).repeat_interleave(128, 2) for s in (gs, us, ds))
    plain = [data.double() * scale.double() for data, scale in zip((g, u, d), scales, strict=True)]
    return Loaded(method, "silu", weights, *plain)


def grouped(zeros: bool) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """INT4 in groups of 32: codes, bf16 scales, zero points and the plain numbers of gate, up and down."""
    scales = [(torch.rand(shape) * 0.02 + 0.01).bfloat16() for shape in per(32)]
    points = [torch.randint(0, 16, s.shape) if zeros else torch.full(s.shape, 8) for s in scales]
    made = codes()
    spread = [[t.double().repeat_interleave(32, -1) for t in pair] for pair in zip(scales, points, strict=True)]
    plain = [(code.double() - zero) * scale for code, (scale, zero) in zip(made, spread, strict=True)]
    return made, scales, points, plain


def w4a16(inputs_first: bool = False, zeros: bool = False) -> Loaded:
    """CompressedTensorsWNA16MoEMethod: vLLM 0.26 keeps the inputs first, 0.32 the outputs."""
    (g, u, d), (gs, us, ds), (gz, uz, dz), plain = grouped(zeros)
    parameters = {"w13_weight_packed": words(stacked(g, u)), "w2_weight_packed": words(d)}
    parameters |= {"w13_weight_scale": stacked(gs, us), "w2_weight_scale": ds}
    if zeros:
        parameters["w13_weight_zero_point"] = words(stacked(gz, uz).mT).mT
        parameters["w2_weight_zero_point"] = words(dz.mT).mT
    if inputs_first:
        parameters = {name: tensor.mT.contiguous() for name, tensor in parameters.items()}
    quant = SimpleNamespace(num_bits=4, group_size=32, actorder=None)
    name = "CompressedTensorsWNA16MarlinMoEMethod" if inputs_first else "CompressedTensorsWNA16MoEMethod"
    return Loaded(named(name, weight_quant=quant), "silu", parameters, *plain)


def gptq() -> Loaded:
    """AutoGPTQMoEMethod: symmetric, biases declared for every model."""
    (g, u, d), (gs, us, ds), (gz, uz, dz), plain = grouped(zeros=False)
    parameters = {"w13_qweight": words(stacked(g, u)).mT.contiguous(), "w2_qweight": words(d).mT.contiguous()}
    parameters |= {"w13_scales": stacked(gs, us).mT.contiguous(), "w2_scales": ds.mT.contiguous()}
    parameters |= {"w13_qzeros": words(stacked(gz, uz).mT - 1), "w2_qzeros": words(dz.mT - 1)}
    parameters |= {"w13_bias": torch.zeros(L, 2 * I).bfloat16(), "w2_bias": torch.zeros(L, H).bfloat16()}
    kind = SimpleNamespace(size_bits=4)
    config = SimpleNamespace(is_sym=True, desc_act=False, quant_type=kind, group_size=32)
    return Loaded(named("AutoGPTQMoEMethod", quant_config=config), "silu", parameters, *plain)


def awq() -> Loaded:
    """AutoAWQMoEMethod: eight outputs a word, in AWQ's order; zero points."""
    (g, u, d), (gs, us, ds), (gz, uz, dz), plain = grouped(zeros=True)
    parameters = {"w13_qweight": awq_words(stacked(g, u)), "w2_qweight": awq_words(d)}
    parameters |= {"w13_scales": stacked(gs, us).mT.contiguous(), "w2_scales": ds.mT.contiguous()}
    parameters |= {"w13_qzeros": awq_words(stacked(gz, uz)), "w2_qzeros": awq_words(dz)}
    config = SimpleNamespace(zero_point=True, weight_bits=4, group_size=32)
    return Loaded(named("AutoAWQMoEMethod", quant_config=config), "silu", parameters, *plain)


def w8a8_fp8(strategy: str) -> Loaded:
    """CompressedTensorsW8A8Fp8MoEMethod: a scale a tensor, a row or a block of 128 x 128."""
    made = fp8([128, 128] if strategy == "block" else None)
    parameters = made.parameters
    if strategy == "channel":
        parameters |= {"w13_weight_scale": torch.rand(L, 2 * I, 1) + 0.5, "w2_weight_scale": torch.rand(L, H, 1) + 0.5}
        data, scale = parameters["w13_weight"], parameters["w13_weight_scale"]
        made.gate, made.up = (data.double() * scale.double()).split(I, dim=1)
        made.down = parameters["w2_weight"].double() * parameters["w2_weight_scale"].double()
    made.parameters = {name.replace("_scale_inv", "_scale"): tensor for name, tensor in parameters.items()}
    block = [128, 128] if strategy == "block" else None
    quant = SimpleNamespace(strategy=SimpleNamespace(value=strategy))
    made.method = named("CompressedTensorsW8A8Fp8MoEMethod", weight_quant=quant, weight_block_size=block)
    return made


def w4a4_nvfp4(input_scale: bool = True) -> Loaded:
    """CompressedTensorsW4A4Nvfp4MoEMethod: second scales are one over ModelOpt's."""
    made = nvfp4(input_scale)
    renamed = {"weight": "weight_packed", "weight_scale": "weight_scale"}
    inverse = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    parameters = {}
    for name, tensor in made.parameters.items():
        matrix, _, kind = name.partition("_")
        parameters[f"{matrix}_{(renamed | inverse)[kind]}"] = 1 / tensor if kind in inverse else tensor
    return replace(made, method=named("CompressedTensorsW4A4Nvfp4MoEMethod"), parameters=parameters)


def dense(dtype: torch.dtype, activation: str = "silu") -> Loaded:
    """UnquantizedFusedMoEMethod; under `swigluoai` an unquantised gpt-oss, biases included."""
    oss = activation == "swigluoai"
    order = alternating if oss else stacked
    g, u, d = (torch.randn(L, *shape).div(16).to(dtype) for shape in SHAPES)
    parameters, plain = {"w13_weight": order(g, u), "w2_weight": d}, (g.double(), u.double(), d.double())
    made = Loaded(named("UnquantizedFusedMoEMethod"), activation, parameters, *plain)
    return with_biases(made, dtype) if oss else made


def ungated() -> Loaded:
    """Nemotron-H: `relu2_no_mul`, w13 is up alone."""
    u, d = (torch.randn(L, *shape).div(16).bfloat16() for shape in ((I, H), (H, I)))
    method = named("UnquantizedFusedMoEMethod")
    return Loaded(method, "relu2_no_mul", {"w13_weight": u, "w2_weight": d}, u.double(), u.double(), d.double())


def expected(
    layer: Loaded, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, limit: float | None
) -> torch.Tensor:
    """[T, H] float64, expert by expert from the plain numbers, by the formulas of the models' own papers."""
    total = torch.zeros(x.shape[0], H, dtype=torch.float64)
    for t in range(x.shape[0]):
        for slot in range(K):
            e = int(ids[t, slot])
            up = layer.up[e] @ x[t].double()
            gate = layer.gate[e] @ x[t].double()
            if layer.gate_bias is not None and layer.up_bias is not None:
                gate, up = gate + layer.gate_bias[e], up + layer.up_bias[e]
            if layer.activation == "swigluoai":
                gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
                inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            elif layer.activation == "relu2_no_mul":
                inner = up.clamp(min=0) ** 2
            else:
                if limit is not None:
                    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
                inner = gate * torch.sigmoid(gate) * up
            y = layer.down[e] @ inner
            if layer.down_bias is not None:
                y = y + layer.down_bias[e]
            total[t] += float(weights[t, slot]) * y
    return total


def check_sums(layer: Loaded, config: MoEConfig, weights: ExpertWeights, limit: float | None = None) -> None:
    """Experts that eprt read compute what the plain numbers say."""
    shard = ExpertPlacement(L, ParallelConfig()).shard(0)
    executor = make_executor("reference", config, shard, weights, torch.device("cpu"), RuntimeConfig(), "flat")
    x, scores = torch.randn(5, H), torch.rand(5, K)
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]], dtype=torch.int32)
    want = expected(layer, x, ids, scores, limit)
    found = executor(FlatTokens(Payload.plain(x), ids, scores, L))
    # Sums of H and I float32 products: 256 * 2^-24 of the largest is the worst rounding there can be.
    torch.testing.assert_close(found.double(), want, rtol=0, atol=float(want.abs().max()) * 256 * 2**-24)
