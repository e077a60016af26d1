"""What `eprt explain` chooses for well-known models on each machine: the table in docs/plan_table.md.

`python tests/support/cases/plan_table.py` writes it there; test_plan.py compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import UnsupportedError
from eprt.models import family_for
from eprt.models.published import MODELS as PUBLISHED
from eprt.plan import Plan, make_plan
from eprt.support import Device

PAGE = Path(__file__).parents[3] / "docs/plan_table.md"
BEGIN, END = "<!-- plan table: python tests/support/cases/plan_table.py -->", "<!-- end of plan table -->"
WORLD = ParallelConfig(4)
DEVICES = ("cpu", "sm90", "sm100")
TOKENS = {"decode": 128, "prefill": 4096}

# Of the page's table: (ranks, ranks of a host), GPUs.
WORLDS = ((1, 8), (2, 8), (4, 8), (8, 8), (8, 4), (16, 8), (64, 8))
GPUS = ("sm80", "sm90", "sm100")
SHOWN = (
    "gpt-oss-120b, MXFP4",
    "Qwen3-30B-A3B, bf16",
    "Qwen3-235B-A22B, FP8 blocks",
    "Qwen3.5-397B-A17B, NVFP4",
    "DeepSeek-V3, FP8 blocks",
    "DeepSeek-V3, NVFP4",
    "DeepSeek-V4-Flash, MXFP4",
    "GLM-4.5, bf16",
    "Mixtral-8x7B, bf16",
    "Nemotron-H (latent experts), NVFP4",
)

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
    "gpt-oss-120b, MXFP4": PUBLISHED["gpt-oss-120b"],
    "Qwen3-30B-A3B, bf16": PUBLISHED["Qwen3-30B-A3B"],
    "Qwen3-235B-A22B, FP8 blocks": PUBLISHED["Qwen3-235B-A22B-FP8"],
    "Qwen3.5-397B-A17B, NVFP4": PUBLISHED["Qwen3.5-397B-A17B-NVFP4"],
    "DeepSeek-V3, FP8 blocks": PUBLISHED["DeepSeek-V3"],
    "DeepSeek-V3, NVFP4": PUBLISHED["DeepSeek-V3-NVFP4"],
    "DeepSeek-V3, FP8 per tensor": PUBLISHED["DeepSeek-V3"]
    | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
    "DeepSeek-V4-Flash, MXFP4": PUBLISHED["DeepSeek-V4-Flash"],
    "GLM-4.5, bf16": PUBLISHED["GLM-4.5"],
    "Mixtral-8x7B, bf16": PUBLISHED["Mixtral-8x7B-Instruct-v0.1"],
    "Nemotron-H (latent experts), NVFP4": _NEMOTRON_H
    | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "Nemotron-H (latent experts), bf16": _NEMOTRON_H,
}


def config_of(model: str) -> MoEConfig:
    hf = MODELS[model]
    family = family_for(hf)
    return family.moe_config(hf, family.moe_layers(hf)[-1])


def plan_for(model: str, device: str, phase: str, parallel: ParallelConfig = WORLD, **runtime: Any) -> Plan:
    settings = RuntimeConfig(phase=phase, max_tokens_per_rank=TOKENS[phase], **runtime)  # type: ignore[arg-type]
    return make_plan(config_of(model), parallel, settings, Device.parse(device))


def choice(model: str, device: str, phase: str, parallel: ParallelConfig = WORLD) -> str:
    try:
        plan = plan_for(model, device, phase, parallel)
    except UnsupportedError:
        return "nothing"
    return f"{plan.dispatcher} + {plan.executor}"


def table() -> str:
    """A line a model and world; neighbours that say the same are one."""
    columns = [(device, phase) for device in GPUS for phase in TOKENS]
    heading = ["model, experts' format", "ranks (a host)", *(f"{device} {phase}" for device, phase in columns)]
    lines = [f"| {' | '.join(heading)} |", "|" + " --- |" * len(heading)]
    for model in SHOWN:
        found: dict[tuple[str, ...], list[str]] = {}
        for ranks, host in WORLDS:
            parallel = ParallelConfig(ranks, ranks_per_host=min(ranks, host))
            world = f"{ranks} ({host})" if ranks > host else str(ranks)
            found.setdefault(tuple(choice(model, *column, parallel) for column in columns), []).append(world)
        for cells, worlds in found.items():
            lines.append(f"| {' | '.join([model, ', '.join(worlds), *cells])} |")
    return "\n".join(lines)


def on_page() -> str:
    return PAGE.read_text().split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}")
