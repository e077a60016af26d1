"""Which compressed-tensors, GPTQ and AWQ experts the vLLM plugin leaves to vLLM, and scales that no file had."""

from __future__ import annotations

import pytest
import torch
from support.cases import vllm_layouts as layouts

from eprt.errors import CheckpointError
from eprt.integrations.engine.parameters import FallsBackToEngine, expert_weights, mark_unset
from eprt.integrations.vllm.parameters import layout_of


@pytest.mark.parametrize(
    ("make", "change", "reason"),
    [
        (layouts.w4a16, {"weight_quant": {"num_bits": 8}}, "INT8 experts"),
        (layouts.w4a16, {"weight_quant": {"group_size": 16}}, "a scale for 16 inputs"),
        (layouts.w4a16, {"weight_quant": {"actorder": "group"}}, "activation order"),
        (layouts.w4a16, {"weight_quant": {"actorder": "dynamic"}}, "activation order"),  # the same by its other name
        (layouts.gptq, {"quant_config": {"is_sym": False}}, "zero points of its own"),
        (layouts.gptq, {"moe": {"intermediate_size_per_partition": 48}}, "48 of the experts' rows .* a scale of 32"),
        (layouts.gptq, {"quant_config": {"desc_act": True}}, "desc_act"),
        (layouts.awq, {"quant_config": {"zero_point": False}}, "AWQ without zero points"),
        (layouts.awq, {"quant_config": {"group_size": 256}}, "a scale for 256 inputs"),
    ],
)
def test_settings_of_packed_checkpoints_that_are_left_to_vllm(make, change, reason) -> None:
    method = make().method
    for name, values in change.items():
        getattr(method, name).__dict__.update(values)
    with pytest.raises(FallsBackToEngine, match=reason):
        layout_of(method).weight_format(method, torch.bfloat16)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (layouts.w4a16, "w2_weight_scale"),
        (layouts.gptq, "w13_scales"),
        (layouts.awq, "w2_scales"),
        (lambda: layouts.w8a8_fp8("channel"), "w13_weight_scale"),
        (layouts.w4a4_nvfp4, "w2_weight_global_scale"),
    ],
)
def test_a_scale_of_a_packed_checkpoint_that_no_file_had_is_named(make, name) -> None:
    loaded = make()
    mark_unset(layout_of(loaded.method), loaded.parameters)
    assert loaded.parameters[name].isnan().all()
    loaded = make()
    loaded.parameters[name][1] = float("nan")
    with pytest.raises(CheckpointError, match=f"{name}: .* values were in no file"):
        expert_weights(layout_of(loaded.method), loaded.parameters, interleaved=False)
