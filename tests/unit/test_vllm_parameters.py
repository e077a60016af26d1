"""How the vLLM plugin reads a layer's parameters, against plain numbers; no vLLM needed."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.cases import vllm_layouts as layouts
from support.cases.vllm_layouts import H, I, K, L, Loaded

from eprt.config import Activation, MoEConfig
from eprt.errors import CheckpointError
from eprt.integrations.engine.parameters import FallsBackToEngine, expert_weights, mark_unset
from eprt.integrations.vllm.parameters import INTERLEAVED, activation_of, layout_of
from eprt.weights import ExpertWeights, Nvfp4

CASES = {
    "gpt-oss, mxfp4": (lambda: layouts.mxfp4("GptOssMxfp4MoEMethod", "swigluoai"), None),
    "DeepSeek-V4, mxfp4": (lambda: layouts.mxfp4("Mxfp4MoEMethod", "silu"), 10.0),
    "ModelOpt nvfp4": (layouts.nvfp4, None),
    "ModelOpt fp8": (layouts.modelopt_fp8, None),
    "ModelOpt fp8, not calibrated": (lambda: layouts.modelopt_fp8(calibrated=False), None),
    "DeepSeek-V3, fp8 blocks": (lambda: layouts.fp8([128, 128]), None),
    "fp8 a tensor": (lambda: layouts.fp8(None), None),
    "bf16 made fp8 a tensor": (lambda: layouts.online(layouts.named("Fp8PerTensorOnlineMoEMethod")), None),
    "bf16 made fp8 a channel": (lambda: layouts.online(layouts.named("Fp8PtpcOnlineMoEMethod")), None),
    "bf16 made fp8 blocks": (lambda: layouts.online(layouts.named("Fp8PerBlockOnlineMoEMethod")), None),
    "gpt-oss, bf16 made fp8 blocks": (
        lambda: layouts.online(layouts.named("Fp8PerBlockOnlineMoEMethod"), "swigluoai"),
        None,
    ),
    "bf16": (lambda: layouts.dense(torch.bfloat16), None),
    "f32": (lambda: layouts.dense(torch.float32), None),
    "gpt-oss, bf16": (lambda: layouts.dense(torch.bfloat16, "swigluoai"), None),
    "Nemotron-H, bf16": (layouts.ungated, None),
    "compressed-tensors int4 of vLLM 0.32": (layouts.w4a16, None),
    "compressed-tensors int4 of vLLM 0.26": (lambda: layouts.w4a16(inputs_first=True), None),
    "compressed-tensors int4, zero points": (lambda: layouts.w4a16(zeros=True), None),
    "compressed-tensors int4, zero points, 0.26": (lambda: layouts.w4a16(inputs_first=True, zeros=True), None),
    "GPTQ": (layouts.gptq, None),
    "AWQ": (layouts.awq, None),
    "compressed-tensors fp8 a tensor": (lambda: layouts.w8a8_fp8("tensor"), None),
    "compressed-tensors fp8 a channel": (lambda: layouts.w8a8_fp8("channel"), None),
    "compressed-tensors fp8 blocks": (lambda: layouts.w8a8_fp8("block"), None),
    "compressed-tensors nvfp4": (layouts.w4a4_nvfp4, None),
}


def layer_of(loaded: Loaded, **swiglu: float | None) -> SimpleNamespace:
    limits = {f"swiglu_{key}": swiglu.get(key) for key in ("alpha", "beta", "limit")}
    return SimpleNamespace(activation=SimpleNamespace(value=loaded.activation), **limits)


def converted(loaded: Loaded) -> ExpertWeights:
    interleaved = loaded.activation == INTERLEAVED
    return expert_weights(layout_of(loaded.method), loaded.parameters, interleaved=interleaved)


@pytest.mark.parametrize("name", CASES)
def test_the_layer_computes_what_the_plain_numbers_say(name: str) -> None:
    torch.manual_seed(0)
    make, limit = CASES[name]
    loaded = make()
    weights = converted(loaded)
    config = MoEConfig(
        num_experts=L,
        top_k=K,
        hidden_size=H,
        intermediate_size=I,
        activation=activation_of(layer_of(loaded, limit=limit)),
        bias=loaded.down_bias is not None,
        weight_format=layout_of(loaded.method).weight_format(loaded.method, I, loaded.dtype),
    )
    layouts.check_sums(loaded, config, weights, limit)


def test_activations() -> None:
    def made(name: str, **given: float | None) -> tuple[float, float, float | None]:
        found = activation_of(layer_of(Loaded(None, name, {}, *[torch.empty(0)] * 3), **given))
        return found.alpha, found.beta, found.limit

    assert made("silu") == (1.0, 0.0, None)
    assert made("silu", limit=10.0) == (1.0, 0.0, 10.0)
    assert made("swigluoai") == (1.702, 1.0, 7.0)
    assert made("swigluoai_uninterleave", alpha=1.702, beta=1.0, limit=7.0) == (1.702, 1.0, 7.0)
    assert activation_of(layer_of(Loaded(None, "gelu_tanh", {}, *[torch.empty(0)] * 3))) == Activation("geglu")
    for name in ("gelu", "swiglustep", "situ", "silu_no_mul", "swigluoai_uninterleave"):
        with pytest.raises(FallsBackToEngine, match=name):
            made(name)


def test_what_eprt_cannot_read_is_left_to_vllm() -> None:
    with pytest.raises(FallsBackToEngine, match="CompressedTensorsW4A8Fp8MoEMethod"):
        layout_of(layouts.named("CompressedTensorsW4A8Fp8MoEMethod"))
    small = layouts.named("Fp8MoEMethod", weight_block_size=[64, 128])
    with pytest.raises(FallsBackToEngine, match=r"\[64, 128\]"):
        layout_of(small).weight_format(small, I, torch.bfloat16)
    refined = layouts.named("Fp8MoEMethod", weight_block_size=[128, 128], weight_scale_refine=(2, 1))
    with pytest.raises(FallsBackToEngine, match="128 x 128"):
        layout_of(refined).weight_format(refined, I, torch.bfloat16)
    half = layouts.named("UnquantizedFusedMoEMethod")
    with pytest.raises(FallsBackToEngine, match="float16"):
        layout_of(half).weight_format(half, I, torch.float16)


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (layouts.w4a16, {"weight_quant": {"num_bits": 8}}, "INT8 experts"),
        (layouts.w4a16, {"weight_quant": {"group_size": 16}}, "a scale for 16 inputs"),
        (layouts.w4a16, {"weight_quant": {"actorder": "group"}}, "activation order"),
        (layouts.w4a16, {"weight_quant": {"actorder": "dynamic"}}, "activation order"),  # the same by its other name
        (layouts.gptq, {"quant_config": {"is_sym": False}}, "zero points of its own"),
        (layouts.gptq, {"quant_config": {"desc_act": True}}, "desc_act"),
        (layouts.awq, {"quant_config": {"zero_point": False}}, "AWQ without zero points"),
        (layouts.awq, {"quant_config": {"group_size": 256}}, "a scale for 256 inputs"),
        (layouts.modelopt_fp8, {"quant_config": {"quant_method": "FP8_PB_WO"}}, "ModelOpt's FP8_PB_WO"),
        (layouts.modelopt_fp8, {"quant_config": {"is_checkpoint_fp8_serialized": False}}, "quantises to FP8 itself"),
    ],
)
def test_settings_of_packed_checkpoints_that_are_left_to_vllm(make, change, reason) -> None:
    method = make().method
    for name, values in change.items():
        getattr(method, name).__dict__.update(values)
    with pytest.raises(FallsBackToEngine, match=reason):
        layout_of(method).weight_format(method, I, torch.bfloat16)


@pytest.mark.parametrize("make", [layouts.w4a16, layouts.gptq, layouts.awq])
def test_parts_that_cut_a_scale_are_left_to_vllm(make) -> None:
    method = make().method
    with pytest.raises(FallsBackToEngine, match=r"48 of the experts' rows .* a scale of 32"):
        layout_of(method).weight_format(method, 48, torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (layouts.nvfp4, "w2_weight_scale_2"),
        (layouts.modelopt_fp8, "w13_weight_scale"),
        (layouts.w4a16, "w2_weight_scale"),
        (layouts.gptq, "w13_scales"),
        (layouts.awq, "w2_scales"),
        (lambda: layouts.w8a8_fp8("channel"), "w13_weight_scale"),
        (layouts.w4a4_nvfp4, "w2_weight_global_scale"),
    ],
)
def test_a_scale_that_no_file_had_is_named(make, name) -> None:
    loaded = make()
    layout = layout_of(loaded.method)
    mark_unset(layout, loaded.parameters)
    assert name in layout.unset
    assert all(loaded.parameters[each].isnan().all() for each in layout.unset if each in loaded.parameters)
    loaded = make()
    found = loaded.parameters[name]
    found[1] = float("nan")
    said = f"{name}: {found[1].numel()} of {found.numel()} values were in no file"
    with pytest.raises(CheckpointError, match=said):
        expert_weights(layout, loaded.parameters, interleaved=False)


def test_a_weight_only_checkpoint_has_no_input_scale() -> None:
    for make in (layouts.nvfp4, layouts.w4a4_nvfp4):
        weights = converted(make(input_scale=False))
        assert isinstance(weights.gate_up, Nvfp4)
        assert isinstance(weights.down, Nvfp4)
        assert weights.gate_up.input_scale is weights.down.input_scale is None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (layouts.nvfp4, "w2_input_scale"),
        (layouts.modelopt_fp8, "w2_input_scale"),
        (layouts.w4a4_nvfp4, "w2_input_global_scale"),
    ],
)
def test_a_layer_has_no_input_scale_if_calibration_never_met_one_of_its_experts(make, name) -> None:
    loaded = make()
    assert name in layout_of(loaded.method).unset
    loaded.parameters[name][1] = float("nan")
    weights = converted(loaded)
    assert weights.down.input_scale is None
    assert weights.gate_up.input_scale is not None
