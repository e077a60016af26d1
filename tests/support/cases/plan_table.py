"""What `eprt explain` chooses for each model family on each machine: the table in docs/choose.md.

`python tests/support/cases/plan_table.py` writes it there; test_plan.py compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.models import family_for
from eprt.plan import Plan, make_plan
from eprt.support import Device

PAGE = Path(__file__).parents[3] / "docs/choose.md"
BEGIN, END = "<!-- plan table: python tests/support/cases/plan_table.py -->", "<!-- end of plan table -->"
WORLD = ParallelConfig(4)
DEVICES = ("cpu", "sm90", "sm100")
TOKENS = {"decode": 128, "prefill": 4096}

_MODELOPT_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
_MODELOPT_FP8 = {"quant_method": "modelopt", "quant_algo": "FP8"}
_DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}
_NEMOTRON_H: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEM*E",
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "hidden_size": 4096,
    "moe_latent_size": 1024,
    "moe_intermediate_size": 2688,
    "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
}

# The fields of each family's config.json that a plan reads, at a published model's sizes.
MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b, MXFP4": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "swiglu_limit": 7.0,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "Qwen3-30B-A3B, bf16": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "Qwen3.5-397B-A17B, NVFP4": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "num_hidden_layers": 60,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "hidden_size": 4096,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
        },
        "quantization_config": _MODELOPT_NVFP4,
    },
    "DeepSeek-V3, FP8 blocks": _DEEPSEEK_V3
    | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "DeepSeek-V3, NVFP4": _DEEPSEEK_V3 | {"quantization_config": _MODELOPT_NVFP4},
    "DeepSeek-V3, FP8 per tensor": _DEEPSEEK_V3 | {"quantization_config": _MODELOPT_FP8},
    "DeepSeek-V4-Flash, MXFP4": {
        "model_type": "deepseek_v4",
        "num_hidden_layers": 43,
        "num_hash_layers": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "hidden_size": 4096,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "swiglu_limit": 10.0,
        "routed_scaling_factor": 1.5,
        "quantization_config": {"quant_method": "fp8", "expert_dtype": "fp4"},
    },
    "Nemotron-H (latent experts), NVFP4": _NEMOTRON_H | {"quantization_config": _MODELOPT_NVFP4},
    "Nemotron-H (latent experts), bf16": _NEMOTRON_H,
}


def config_of(model: str) -> MoEConfig:
    hf = MODELS[model]
    family = family_for(hf)
    return family.moe_config(hf, family.moe_layers(hf)[-1])


def plan_for(model: str, device: str, phase: str, **runtime: Any) -> Plan:
    settings = RuntimeConfig(phase=phase, max_tokens_per_rank=TOKENS[phase], **runtime)  # type: ignore[arg-type]
    return make_plan(config_of(model), WORLD, settings, Device.parse(device))


def choice(model: str, device: str, phase: str) -> str:
    try:
        plan = plan_for(model, device, phase)
    except UnsupportedError:
        return "nothing"
    return f"{plan.dispatcher} + {plan.executor}"


def table() -> str:
    columns = [(device, phase) for device in DEVICES for phase in TOKENS]
    lines = ["| model, experts' format | " + " | ".join(f"{device} {phase}" for device, phase in columns) + " |"]
    lines.append("|" + " --- |" * (1 + len(columns)))
    for model in MODELS:
        lines.append(f"| {model} | " + " | ".join(choice(model, *column) for column in columns) + " |")
    return "\n".join(lines)


def on_page() -> str:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
