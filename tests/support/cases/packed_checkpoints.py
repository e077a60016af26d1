"""MoE layers written as ModelOpt writes them, and packed numbers whose values are known without eprt's decoders.

Published examples: nvidia/Qwen3-30B-A3B-NVFP4, nvidia/DeepSeek-R1-0528-NVFP4 (`weight`, `weight_scale`,
`weight_scale_2`, `input_scale`, and hf_quant_config.json beside config.json).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eprt.models import LayerParts, load_layer
from eprt.models.checkpoint import CONFIG, QUANT_CONFIG, SINGLE
from eprt.weights import Dense, ExpertWeights, LatentWeights, SharedExpertWeights

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
Made = tuple[dict[str, torch.Tensor], torch.Tensor]  # (stored tensors by suffix, the numbers they stand for, float32)


# ---- one matrix -----------------------------------------------------------------------------------------------


def codes_and_numbers(rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(bytes, unscaled numbers) of random E2M1 codes: two a byte, the first in the low half."""
    codes = torch.randint(0, 16, (rows, cols))
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), E2M1[codes]


def nvfp4(rows: int, cols: int) -> Made:
    codes, numbers = codes_and_numbers(rows, cols)
    scale = torch.rand(rows, cols // 16).add(0.5).to(torch.float8_e4m3fn)
    second = (torch.rand(()) + 0.5) * cols**-0.5 / 3
    input_scale = torch.rand(()) / 100 + 0.01
    stored = {"weight": codes, "weight_scale": scale, "weight_scale_2": second, "input_scale": input_scale}
    return stored, numbers * scale.float().repeat_interleave(16, dim=1) * second


def fp8_tensor(rows: int, cols: int) -> Made:
    data = torch.randn(rows, cols).mul(40).to(torch.float8_e4m3fn)
    scale = (torch.rand(()) + 0.5) * cols**-0.5 / 40
    return {"weight": data, "weight_scale": scale, "input_scale": torch.rand(()) / 10 + 0.1}, data.float() * scale


def mxfp4_numbers(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of bytes [..., n / 2] and E8M0 bytes [..., n / 32], as the OCP MX specification has them."""
    nibbles = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    factors = torch.ldexp(torch.ones(scales.shape), scales.int() - 127)
    return E2M1[nibbles.int()] * factors.repeat_interleave(32, dim=-1)


def plain(rows: int, cols: int) -> Made:
    weight = (torch.randn(rows, cols) * cols**-0.5).bfloat16()
    return {"weight": weight}, weight.float()


PACK = {"nvfp4": nvfp4, "fp8_tensor": fp8_tensor}
QUANTIZATION = {
    "nvfp4": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16},
    "fp8_tensor": {"quant_algo": "FP8", "kv_cache_quant_algo": None},
}


# ---- one layer ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """E, K, the model's H, Nemotron-H's latent width, I of an expert, and of a shared expert with a size of its own."""

    num_experts: int = 8
    top_k: int = 2
    hidden: int = 64
    latent: int = 32
    intermediate: int = 48
    shared: int = 80


@dataclass(frozen=True)
class Family:
    """A config.json, the layer to run, and what its tensors are called."""

    config: dict[str, Any]
    layer: int
    block: str
    parts: tuple[str, ...] = ("gate_proj", "up_proj")
    latent: bool = False
    shared: str = ""
    shared_size: int = 0
    output_gate: str = ""
    bias: str = ""


FAMILIES = ("qwen3_moe", "qwen3_5_moe", "deepseek_v3", "nemotron_h")


def family_of(name: str, sizes: Sizes) -> Family:
    common = {"hidden_size": sizes.hidden, "num_experts_per_tok": sizes.top_k, "torch_dtype": "bfloat16"}
    common |= {"moe_intermediate_size": sizes.intermediate, "num_hidden_layers": 2}
    qwen = common | {"num_experts": sizes.num_experts, "norm_topk_prob": True}
    text = qwen | {"num_hidden_layers": 1, "shared_expert_intermediate_size": sizes.shared}
    routed = common | {"n_routed_experts": sizes.num_experts, "routed_scaling_factor": 2.5}
    deepseek = {"first_k_dense_replace": 1, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    nemotron = {"hybrid_override_pattern": "ME", "mlp_hidden_act": "relu2", "moe_latent_size": sizes.latent}
    nemotron |= {"moe_shared_expert_intermediate_size": sizes.shared}
    shared = {"shared": "shared_experts", "bias": "gate.e_score_correction_bias"}
    made = {
        "qwen3_moe": Family(qwen, 1, "model.layers.1.mlp"),
        "qwen3_5_moe": Family(
            {"text_config": text | {"model_type": "qwen3_5_moe_text"}},
            0,
            "model.language_model.layers.0.mlp",
            shared="shared_expert",
            shared_size=sizes.shared,
            output_gate="shared_expert_gate",
        ),
        "deepseek_v3": Family(routed | deepseek, 1, "model.layers.1.mlp", shared_size=sizes.intermediate, **shared),
        "nemotron_h": Family(
            routed | nemotron,
            1,
            "backbone.layers.1.mixer",
            parts=("up_proj",),
            latent=True,
            shared_size=sizes.shared,
            **shared,
        ),
    }[name]
    return replace(made, config=made.config | {"model_type": name})


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: the layer to run, its numbers in float32 (all experts), the largest input scale."""

    layer: int
    known: LayerParts
    input_scale: float


def write(folder: Path, name: str, algorithm: str, sizes: Sizes | None = None) -> Written:
    """One layer of a family in a ModelOpt format. Config and router in `Written.known` are read back from the files."""
    torch.manual_seed(7)
    sizes = sizes or Sizes()
    family, pack, tensors = family_of(name, sizes), PACK[algorithm], {}
    E, H, I = sizes.num_experts, sizes.hidden, sizes.intermediate
    width = sizes.latent if family.latent else H

    def put(module: str, made: Made) -> torch.Tensor:
        stored, numbers = made
        tensors.update({f"{family.block}.{module}.{suffix}": value for suffix, value in stored.items()})
        return numbers

    put("gate", plain(E, H))
    if family.bias:
        tensors[f"{family.block}.{family.bias}"] = torch.randn(E) * 0.1
    first, down = [], []
    for e in range(E):
        first.append(torch.cat([put(f"experts.{e}.{part}", pack(I, width)) for part in family.parts]))
        down.append(put(f"experts.{e}.down_proj", pack(width, I)))
    input_scales = [v for k, v in tensors.items() if k.endswith(".input_scale") and "down" not in k]
    shared = latent = None
    if family.shared:
        inner = family.shared_size
        numbers = {part: put(f"{family.shared}.{part}", pack(inner, H)) for part in family.parts}
        last = put(f"{family.shared}.down_proj", pack(H, inner))
        gate = put(family.output_gate, plain(1, H)) if family.output_gate else None
        shared = SharedExpertWeights(numbers["up_proj"], last, numbers.get("gate_proj"), gate)
    if family.latent:
        latent = LatentWeights(put("fc1_latent_proj", plain(width, H)), put("fc2_latent_proj", plain(H, width)))
    save_file(tensors, folder / SINGLE)
    (folder / CONFIG).write_text(json.dumps(family.config))
    excluded = ["lm_head", "*.mlp.gate", "*.mixer.gate", "*shared_expert_gate"]
    quantization = QUANTIZATION[algorithm] | {"exclude_modules": excluded}
    said = {"producer": {"name": "modelopt", "version": "0.33.0"}, "quantization": quantization}
    (folder / QUANT_CONFIG).write_text(json.dumps(said))
    found = load_layer(folder, family.layer)
    known = replace(
        found,
        config=replace(found.config, weight_format="f32"),
        experts=ExpertWeights(Dense(torch.stack(first)), Dense(torch.stack(down))),
        shared=shared,
        latent=latent,
    )
    return Written(family.layer, known, float(torch.stack(input_scales).max()))
