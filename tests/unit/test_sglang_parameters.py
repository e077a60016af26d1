"""Experts as SGLang's methods and schemes keep them, read into plain numbers; no SGLang needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cases import vllm_layouts as layouts
from support.cases.vllm_layouts import H, I, K, L, Loaded, named
from support.stand_ins.sglang import GPT_OSS, fused_moe, runner_config

from eprt.integrations.engine.parameters import FallsBackToEngine, expert_weights
from eprt.integrations.sglang import supported
from eprt.integrations.sglang.parameters import canonical, interleaved, layout_of


def fp8_method(block: list[int] | None, **changes: Any) -> Any:
    return named("Fp8MoEMethod", quant_config=SimpleNamespace(weight_block_size=block), **changes)


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (fp8_method([64, 128]), r"\[64, 128\]"),
        (fp8_method([128, 128], is_fp4_expert=True, dequant_fp4_to_fp8=True), "decodes to FP8"),
        (fp8_method([1, 32], use_mxfp8=True), "MXFP8 experts"),
    ],
)
def test_fp8_that_eprt_does_not_read(method: Any, reason: str) -> None:
    layer = fused_moe(method, runner_config())
    with pytest.raises(FallsBackToEngine, match=reason):
        layout_of(layer).weight_format(method, I, torch.bfloat16)


def padded(loaded: Loaded) -> Loaded:
    """As Mxfp4MoEMethod keeps gpt-oss's experts for a kernel with tiles of 192: more rows, more columns."""
    more = {"w13_weight": (0, 0, 0, 128), "w13_weight_scale": (0, 0, 0, 128), "w13_bias": (0, 128)}
    more |= {"w2_weight": (0, 32), "w2_weight_scale": (0, 2)}
    for name, widths in more.items():
        loaded.parameters[name] = torch.nn.functional.pad(loaded.parameters[name], widths, value=9)
    loaded.method = named("Mxfp4MoEMethod")
    return loaded


def of_all_ranks(loaded: Loaded) -> Loaded:
    """As ModelOpt's method keeps input scales: those of every rank's experts, ours in the middle."""
    for name in ("w13_input_scale", "w2_input_scale"):
        own = loaded.parameters[name]
        loaded.parameters[name] = torch.cat([own + 1, own, own + 2])
    loaded.method = named("ModelOptNvFp4FusedMoEMethod", quant_config=SimpleNamespace(group_size=16))
    return loaded


def fp8(block: list[int] | None) -> Loaded:
    loaded = layouts.fp8(block)
    loaded.method = fp8_method(block)
    return loaded


def fp4() -> Loaded:
    """DeepSeek-V4's experts, as FP8's method keeps them."""
    loaded = layouts.mxfp4("Mxfp4MoEMethod", "silu")
    held = loaded.parameters
    held = {n: t.view(torch.int8) if n.endswith("weight") else torch.exp2(t.float() - 127) for n, t in held.items()}
    loaded.parameters = {name.replace("_scale", "_scale_inv"): tensor for name, tensor in held.items()}
    loaded.method = fp8_method([128, 128], is_fp4_expert=True)
    return loaded


def online(activation: str) -> Loaded:
    """Plain experts under `--quantization fp8`, and the scales that their method makes once they are loaded."""
    loaded = layouts.online(fp8_method(None), activation)
    loaded.parameters |= {"w13_weight_scale": torch.ones(L, 2), "w2_weight_scale": torch.ones(L)}
    return loaded


def transposed(loaded: Loaded) -> Loaded:
    """As the triton_kernel runner has unquantised experts loaded."""
    loaded.method = named("UnquantizedFusedMoEMethod", use_triton_kernels=True)
    for name in ("w13_weight", "w2_weight"):
        loaded.parameters[name] = loaded.parameters[name].transpose(1, 2).contiguous()
    return loaded


def up_first() -> Loaded:
    loaded = layouts.dense(torch.bfloat16)
    loaded.method.load_up_proj_weight_first = True
    return loaded


def schemed(loaded: Loaded, name: str, **scheme: Any) -> Loaded:
    """As methods of SGLang that leave parameters to a scheme keep them; columns' numbers are for its own kernels."""
    loaded.method, loaded.scheme = named("CompressedTensorsFusedMoEMethod"), named(name, **scheme)
    loaded.parameters |= {f"{matrix}_g_idx": torch.zeros(L, 1, dtype=torch.int32) for matrix in ("w13", "w2")}
    return loaded


def w4a16(zeros: bool = False, **scheme: Any) -> Loaded:
    settings = {"num_bits": 4, "group_size": 32, "actorder": None} | scheme
    return schemed(layouts.w4a16(inputs_first=True, zeros=zeros), "CompressedTensorsWNA16MoE", **settings)


def w8a8_fp8(strategy: str) -> Loaded:
    loaded = layouts.w8a8_fp8(strategy)
    return schemed(loaded, "CompressedTensorsW8A8Fp8MoE", **vars(loaded.method))


def gptq() -> Loaded:
    """Scales in float16, whatever the tokens are."""
    loaded = layouts.gptq(torch.float16)
    loaded.parameters = {name: tensor for name, tensor in loaded.parameters.items() if not name.endswith("bias")}
    return schemed(loaded, "GPTQMarlinMoEScheme", quant_config=loaded.method.quant_config)


def awq() -> Loaded:
    loaded = layouts.awq()
    return schemed(loaded, "AWQMoEScheme", quant_config=loaded.method.quant_config)


CASES = {
    "gpt-oss, mxfp4": lambda: padded(layouts.mxfp4("GptOssMxfp4MoEMethod", "swigluoai")),
    "ModelOpt nvfp4": lambda: of_all_ranks(layouts.nvfp4()),
    "ModelOpt fp8": layouts.modelopt_fp8,
    "DeepSeek-V3, fp8 blocks": lambda: fp8([128, 128]),
    "fp8 a tensor": lambda: fp8(None),
    "bf16 made fp8": lambda: online("silu"),
    "gpt-oss, bf16 made fp8": lambda: online("swigluoai"),
    "DeepSeek-V4, fp4": fp4,
    "bf16": lambda: layouts.dense(torch.bfloat16),
    "f32": lambda: layouts.dense(torch.float32),
    "bf16 for triton_kernel": lambda: transposed(layouts.dense(torch.bfloat16)),
    "gpt-oss, bf16": lambda: layouts.dense(torch.bfloat16, "swigluoai"),
    "Nemotron-H, bf16": layouts.ungated,
    "compressed-tensors int4": w4a16,
    "compressed-tensors int4 with zero points": lambda: w4a16(zeros=True),
    "compressed-tensors fp8 a tensor": lambda: w8a8_fp8("tensor"),
    "compressed-tensors fp8 a channel": lambda: w8a8_fp8("channel"),
    "compressed-tensors fp8 a block": lambda: w8a8_fp8("block"),
    "GPTQ int4": gptq,
    "AWQ int4": awq,
}
ACTIVATIONS = {"silu": {}, "swigluoai": GPT_OSS, "relu2_no_mul": {"activation": "relu2", "is_gated": False}}


def made(loaded: Loaded, **changes: Any) -> Any:
    layer = fused_moe(loaded.method, runner_config(**ACTIVATIONS[loaded.activation]), scheme=loaded.scheme, **changes)
    layer.intermediate_size_per_partition = I
    layer.params_dtype = torch.float32 if loaded.dtype == torch.float32 else torch.bfloat16
    return layer


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_what_the_plain_numbers_say(name: str) -> None:
    torch.manual_seed(0)
    loaded = CASES[name]()
    sizes = {"num_experts": 3 * L, "num_local_experts": L, "moe_ep_rank": 1, "top_k": K, "hidden_size": H}
    biased = loaded.down_bias is not None
    layer = made(loaded, **sizes, with_bias=biased)
    given = {key.replace("_bias", "_weight_bias"): tensor for key, tensor in loaded.parameters.items()}
    weights = expert_weights(
        layout_of(layer), canonical(layer, given), interleaved=interleaved(layer.moe_runner_config)
    )
    layouts.check_sums(loaded, supported.moe_config(layer, all_to_all=False), weights)
    if name == "ModelOpt nvfp4":
        assert torch.equal(weights.gate_up.input_scale, loaded.parameters["w13_input_scale"][L : 2 * L])


def test_biases_that_the_model_has_not_got_are_dropped() -> None:
    """Mxfp4MoEMethod declares them for every model."""
    loaded = padded(layouts.mxfp4("GptOssMxfp4MoEMethod", "swigluoai"))
    layer = fused_moe(loaded.method, runner_config(), hidden_size=H, intermediate_size_per_partition=I, with_bias=False)
    assert not [name for name in canonical(layer, loaded.parameters) if name.endswith("bias")]


@pytest.mark.parametrize(
    ("loaded", "change", "reason"),
    [
        (lambda: w4a16(num_bits=8), {}, "INT8 experts"),
        (w4a16, {"intermediate_size_per_partition": 48}, "48 of the experts' rows .* a scale of 32"),
        (lambda: schemed(layouts.w4a4_nvfp4(), "CompressedTensorsW4A4Nvfp4MoE"), {}, "CompressedTensorsW4A4Nvfp4MoE"),
        (up_first, {"with_bias": False}, "rows of up"),
    ],
)
def test_experts_that_are_left_to_sglang(loaded: Any, change: dict[str, Any], reason: str) -> None:
    """Of what both engines' packed experts share, one setting: test_vllm_parameters.py has each."""
    layer = made(loaded())
    vars(layer).update(change)
    with pytest.raises(FallsBackToEngine, match=reason):
        supported.moe_config(layer, all_to_all=False)
