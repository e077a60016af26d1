"""Checkpoints as ModelOpt writes them, from their bytes to the whole layer's output on two ranks.

The files are written here from numbers chosen here: what they mean is known without eprt's readers and decoders.
Published examples: nvidia/Qwen3-30B-A3B-NVFP4, nvidia/DeepSeek-R1-0528-NVFP4 (`weight`, `weight_scale`,
`weight_scale_2`, `input_scale`, and hf_quant_config.json beside config.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest
import torch
from packed_checkpoint_jobs import hidden_of, run_layer
from safetensors.torch import save_file

from eprt.checkpoint import CONFIG, QUANT_CONFIG, SINGLE
from eprt.conformance.cases import Batch
from eprt.conformance.oracle import relative_error
from eprt.conformance.whole_layer import expected_layer_output
from eprt.models import load_layer
from eprt.weights import Dense, ExpertWeights, LatentWeights, SharedExpertWeights

BOUND = 2e-2  # bf16 tokens and outputs; the packed numbers themselves are exact
E, K, H, LATENT, I, I_SHARED = 8, 2, 64, 32, 48, 80
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Family:
    """A config.json, the layer to run, and what its tensors are called."""

    config: dict
    layer: int
    block: str
    parts: tuple[str, ...] = ("gate_proj", "up_proj")
    width: int = H
    shared: str = ""
    output_gate: str = ""
    bias: str = ""


COMMON = {"hidden_size": H, "num_experts_per_tok": K, "moe_intermediate_size": I, "torch_dtype": "bfloat16"}
FAMILIES = {
    "qwen3_moe": Family(
        {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": E, "norm_topk_prob": True, **COMMON},
        1,
        "model.layers.1.mlp",
    ),
    "qwen3_5_moe": Family(
        {
            "model_type": "qwen3_5_moe",
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "num_hidden_layers": 1,
                "num_experts": E,
                "shared_expert_intermediate_size": I_SHARED,
                **COMMON,
            },
        },
        0,
        "model.language_model.layers.0.mlp",
        shared="shared_expert",
        output_gate="shared_expert_gate",
    ),
    "deepseek_v3": Family(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "n_routed_experts": E,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            **COMMON,
        },
        1,
        "model.layers.1.mlp",
        shared="shared_experts",
        bias="gate.e_score_correction_bias",
    ),
    "nemotron_h": Family(
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "ME",
            "n_routed_experts": E,
            "moe_latent_size": LATENT,
            "moe_shared_expert_intermediate_size": I_SHARED,
            "routed_scaling_factor": 2.5,
            "mlp_hidden_act": "relu2",
            **COMMON,
        },
        1,
        "backbone.layers.1.mixer",
        parts=("up_proj",),
        width=LATENT,
        shared="shared_experts",
        bias="gate.e_score_correction_bias",
    ),
}
QUANTIZATION = {
    "nvfp4": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
    "fp8_tensor": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
}


def nvfp4(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(stored tensors, their numbers): two E2M1 codes a byte, the first in the low half."""
    codes = torch.randint(0, 16, (rows, cols))
    scale = torch.rand(rows, cols // 16).add(0.5).to(torch.float8_e4m3fn)
    second = (torch.rand(()) + 0.5) * cols**-0.5 / 3
    stored = {
        "weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "weight_scale_2": second,
        "input_scale": torch.rand(()) / 100 + 0.01,
    }
    return stored, E2M1[codes] * scale.float().repeat_interleave(16, dim=1) * second


def fp8_tensor(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    data = torch.randn(rows, cols).mul(40).to(torch.float8_e4m3fn)
    scale = (torch.rand(()) + 0.5) * cols**-0.5 / 40
    return {"weight": data, "weight_scale": scale, "input_scale": torch.rand(()) / 10 + 0.1}, data.float() * scale


PACK = {"nvfp4": nvfp4, "fp8_tensor": fp8_tensor}


def plain(rows: int, cols: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    weight = (torch.randn(rows, cols) * cols**-0.5).bfloat16()
    return {"weight": weight}, weight.float()


def write(folder, name: str, algorithm: str):
    """The checkpoint; and its float32 numbers: experts, shared expert, latent projections, largest input scale."""
    torch.manual_seed(7)
    family, pack, tensors = FAMILIES[name], PACK[algorithm], {}

    def put(module: str, made) -> torch.Tensor:
        stored, numbers = made
        tensors.update({f"{family.block}.{module}.{suffix}": value for suffix, value in stored.items()})
        return numbers

    put("gate", plain(E, H))
    if family.bias:
        tensors[f"{family.block}.{family.bias}"] = torch.randn(E) * 0.1
    width, first, down = family.width, [], []
    for e in range(E):
        first.append(torch.cat([put(f"experts.{e}.{part}", pack(I, width)) for part in family.parts]))
        down.append(put(f"experts.{e}.down_proj", pack(width, I)))
    input_scales = [v for k, v in tensors.items() if k.endswith(".input_scale") and "down" not in k]
    shared = latent = None
    if family.shared:
        inner = I if name == "deepseek_v3" else I_SHARED
        numbers = {part: put(f"{family.shared}.{part}", pack(inner, H)) for part in family.parts}
        last = put(f"{family.shared}.down_proj", pack(H, inner))
        gate = put(family.output_gate, plain(1, H)) if family.output_gate else None
        shared = SharedExpertWeights(numbers["up_proj"], last, numbers.get("gate_proj"), gate)
    if width != H:
        latent = LatentWeights(put("fc1_latent_proj", plain(width, H)), put("fc2_latent_proj", plain(H, width)))
    save_file(tensors, folder / SINGLE)
    (folder / CONFIG).write_text(json.dumps(family.config))
    excluded = ["lm_head", "*.mlp.gate", "*.mixer.gate", "*shared_expert_gate"]
    quantization = QUANTIZATION[algorithm] | {"exclude_modules": excluded}
    said = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}
    (folder / QUANT_CONFIG).write_text(json.dumps(said))
    experts = ExpertWeights(Dense(torch.stack(first)), Dense(torch.stack(down)))
    return experts, shared, latent, float(torch.stack(input_scales).max())


@pytest.mark.parametrize("algorithm", list(PACK))
@pytest.mark.parametrize("name", list(FAMILIES))
def test_layer_from_a_modelopt_checkpoint(pools, tmp_path, name, algorithm):
    experts, shared, latent, input_scale = write(tmp_path, name, algorithm)
    layer = FAMILIES[name].layer
    found = load_layer(tmp_path, layer)
    assert found.config.weight_format == algorithm
    config = replace(found.config, weight_format="f32")
    known = replace(found, config=config, experts=experts, shared=shared, latent=latent)
    swapped = replace(known, experts=replace(experts, gate_up=Dense(experts.gate_up.data.roll(1, dims=0))))
    for dispatcher, executor in (("none", "reference"), ("torch", "torch_grouped")):
        results = pools(2).run(run_layer, folder=str(tmp_path), number=layer, dispatcher=dispatcher, executor=executor)
        for rank, (out, topk, _) in enumerate(results):
            batch = Batch(hidden_of(rank, H), topk)
            assert relative_error(out, expected_layer_output(known, batch)) <= BOUND
            assert relative_error(out, expected_layer_output(swapped, batch)) > 5 * BOUND
    packed = pools(2).run(
        run_layer, folder=str(tmp_path), number=layer, dispatcher="torch", executor="reference", payload="nvfp4"
    )
    expected_scale = pytest.approx(input_scale) if algorithm == "nvfp4" else 1.0
    assert [scale for *_, scale in packed] == [expected_scale] * 2
