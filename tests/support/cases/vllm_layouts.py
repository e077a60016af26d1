"""Experts as vLLM 0.26 and 0.32 hold them after loading, written by hand, beside the plain numbers they stand for.

Nothing of eprt is used for them: packing and shapes are those of the formats' papers and of vLLM's
`create_weights`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.experts import make_executor
from eprt.placement import ExpertPlacement
from eprt.tokens import FlatTokens, Payload
from eprt.weights import FP8_BLOCK, ExpertWeights
from support.cases import packed_int4
from support.cases.packed_checkpoints import PACK
from support.cases.packed_int4 import Made, pack_quantized

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


def packed(
    make: Callable[[int, int], Made],
    method: Any,
    activation: str = "silu",
    order: Callable[..., torch.Tensor] = stacked,
    drop: Sequence[str] = (),
    calibrated: bool = True,
) -> Loaded:
    """Each expert's matrices as a checkpoint has them, in the places where vLLM loads them: those of gate and up
    together, scalars as [L, 2]. Without the file's tensors of `drop`; where it isn't calibrated, input scales are
    NaN."""
    made = [[make(*shape) for _ in range(L)] for shape in SHAPES]
    parameters = {}
    for name in [name for name in made[0][0][0] if name not in drop]:
        gate, up, down = (torch.stack([stored[name] for stored, _ in experts]) for experts in made)
        w13 = order(gate, up) if gate[0].numel() > 1 else torch.stack([gate.flatten(), up.flatten()], dim=1)
        parameters |= {f"w13_{name}": w13, f"w2_{name}": down if down[0].numel() > 1 else down.flatten()}
    for name in () if calibrated else [name for name in parameters if "_input_" in name]:
        parameters[name].fill_(float("nan"))
    plain = [torch.stack([numbers for _, numbers in experts]).double() for experts in made]
    return Loaded(method, activation, parameters, *plain)


def mxfp4(method: str, activation: str) -> Loaded:
    """GptOssMxfp4MoEMethod (biases, alternating rows) or Mxfp4MoEMethod (DeepSeek-V4)."""
    oss = method.startswith("GptOss")
    made = packed(PACK["mxfp4"], named(method), activation, alternating if oss else stacked)
    made.parameters = {name.replace("_scale", "_weight_scale"): tensor for name, tensor in made.parameters.items()}
    return with_biases(made, torch.bfloat16) if oss else made


def nvfp4(input_scale: bool = True) -> Loaded:
    """ModelOptNvFp4FusedMoE: gate and up with second scales of their own."""
    method = named("ModelOptNvFp4FusedMoE", quant_config=SimpleNamespace(group_size=16))
    return packed(PACK["nvfp4"], method, calibrated=input_scale)


def modelopt_fp8(calibrated: bool = True) -> Loaded:
    """ModelOptFp8MoEMethod: one scale for each of gate, up and down, and one of their inputs an expert."""
    config = SimpleNamespace(quant_method="FP8", is_checkpoint_fp8_serialized=True)
    made = packed(PACK["fp8_tensor"], named("ModelOptFp8MoEMethod", quant_config=config), calibrated=calibrated)
    made.parameters["w13_input_scale"] = made.parameters["w13_input_scale"].amax(1)  # one of an expert's inputs
    return made


def fp8(block: list[int] | None) -> Loaded:
    """Fp8MoEMethod: DeepSeek's blocks of 128, or one scale for each of gate, up and down."""
    method = named("Fp8MoEMethod", weight_block_size=block)
    return packed(PACK["fp8_block" if block else "fp8_tensor"], method, drop=["input_scale"])


def online(method: Any, activation: str = "silu") -> Loaded:
    """Plain experts that a method makes FP8 of, in numbers that a scale loses nothing of, however many share it."""

    def plain(rows: int, cols: int) -> Made:
        codes = (100 * torch.randn(rows, cols)).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        codes[:, ::FP8_BLOCK] = 448  # the largest there is, in each block and row
        numbers = codes / 2 ** int(torch.randint(8, 12, ()))
        return {"weight": numbers.bfloat16()}, numbers

    oss = activation == "swigluoai"
    made = packed(plain, method, activation, alternating if oss else stacked)
    return with_biases(made, torch.bfloat16) if oss else made


def w4a16(inputs_first: bool = False, zeros: bool = False) -> Loaded:
    """CompressedTensorsWNA16MoEMethod: vLLM 0.26 keeps the inputs first, 0.32 the outputs."""
    quant = SimpleNamespace(num_bits=4, group_size=32, actorder=None)
    name = "CompressedTensorsWNA16MarlinMoEMethod" if inputs_first else "CompressedTensorsWNA16MoEMethod"
    made = packed(partial(pack_quantized, zeros=zeros), named(name, weight_quant=quant), drop=["weight_shape"])
    if inputs_first:
        made.parameters = {name: tensor.mT.contiguous() for name, tensor in made.parameters.items()}
    return made


def columns_last(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Of tensors whose rows lie in the last dimension."""
    return torch.cat([gate, up], dim=2)


def gptq(dtype: torch.dtype = torch.bfloat16) -> Loaded:
    """AutoGPTQMoEMethod: symmetric, biases declared for every model."""
    config = SimpleNamespace(is_sym=True, desc_act=False, quant_type=SimpleNamespace(size_bits=4), group_size=32)
    method = named("AutoGPTQMoEMethod", quant_config=config)
    made = packed(partial(packed_int4.gptq, dtype=dtype), method, order=columns_last, drop=["g_idx"])
    made.parameters |= {"w13_bias": torch.zeros(L, 2 * I).bfloat16(), "w2_bias": torch.zeros(L, H).bfloat16()}
    return made


def awq() -> Loaded:
    """AutoAWQMoEMethod: eight outputs a word, in AWQ's order; zero points."""
    config = SimpleNamespace(zero_point=True, weight_bits=4, group_size=32)
    method = named("AutoAWQMoEMethod", quant_config=config)
    return packed(partial(packed_int4.awq, dtype=torch.bfloat16), method, order=columns_last)


def w8a8_fp8(strategy: str) -> Loaded:
    """CompressedTensorsW8A8Fp8MoEMethod: a scale a tensor, a row or a block of 128 x 128."""
    dialect = {"tensor": "fp8_tensor", "channel": "float_channel", "block": "float_block"}[strategy]
    quant = SimpleNamespace(strategy=SimpleNamespace(value=strategy))
    block = [128, 128] if strategy == "block" else None
    method = named("CompressedTensorsW8A8Fp8MoEMethod", weight_quant=quant, weight_block_size=block)
    made = packed(PACK[dialect], method, drop=["input_scale"])
    made.parameters |= {name: tensor.float() for name, tensor in made.parameters.items() if name.endswith("_scale")}
    return made


def w4a4_nvfp4(input_scale: bool = True) -> Loaded:
    """CompressedTensorsW4A4Nvfp4MoEMethod: second scales are one over ModelOpt's."""
    return packed(PACK["nvfp4_packed"], named("CompressedTensorsW4A4Nvfp4MoEMethod"), calibrated=input_scale)


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
