"""Well-known models: the fields of their published config.json that `ModelFamily.moe_layers` and `moe_config` read.

`eprt explain --model NAME` and `eprt tune --model NAME` answer from this table without any file. Names are those of the
Hugging Face repositories, in any case, without the organisation. A checkpoint's own config.json says it better.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eprt.errors import ConfigError
from eprt.models.checkpoint import read_config

_MXFP4 = {"quant_method": "mxfp4"}
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def _deepseek_v3(layers: int, dense: int, experts: int, hidden: int, width: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "first_k_dense_replace": dense,
        "n_routed_experts": experts,
        "num_experts_per_tok": 8,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
    } | other


def _qwen3(layers: int, experts: int, hidden: int, width: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen3_moe",
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "hidden_size": hidden,
        "moe_intermediate_size": width,
        "norm_topk_prob": True,
    } | other


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "swiglu_limit": 7.0,
        "quantization_config": _MXFP4,
    }


def _plain(family: str, layers: int, experts: int, top_k: int, hidden: int, width: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": family,
        "num_hidden_layers": layers,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "hidden_size": hidden,
        "intermediate_size": width,
    } | other


_DEEPSEEK_V3 = _deepseek_v3(61, 3, 256, 7168, 2048, n_group=8, topk_group=4, routed_scaling_factor=2.5)
_QWEN35 = {
    "model_type": "qwen3_5_moe",
    "text_config": {
        "num_hidden_layers": 60,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hidden_size": 4096,
        "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
}

MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": _gpt_oss(36, 128),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "Qwen3-30B-A3B": _qwen3(48, 128, 2048, 768),
    "Qwen3-235B-A22B": _qwen3(94, 128, 4096, 1536),
    "Qwen3-235B-A22B-FP8": _qwen3(94, 128, 4096, 1536, quantization_config=_FP8),
    "Qwen3-Coder-480B-A35B-Instruct": _qwen3(62, 160, 6144, 2560),
    "Qwen3-Next-80B-A3B-Instruct": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "hidden_size": 2048,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    },
    "Qwen3.5-397B-A17B": _QWEN35,
    "Qwen3.5-397B-A17B-NVFP4": _QWEN35 | {"quantization_config": _NVFP4},
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "num_hidden_layers": 27,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "hidden_size": 2048,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "routed_scaling_factor": 1.0,
    },
    "DeepSeek-V3": _DEEPSEEK_V3 | {"quantization_config": _FP8},
    "DeepSeek-R1": _DEEPSEEK_V3 | {"quantization_config": _FP8},
    "DeepSeek-V3-NVFP4": _DEEPSEEK_V3 | {"quantization_config": _NVFP4},
    "DeepSeek-V4-Flash": {
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
    "Kimi-K2-Instruct": _deepseek_v3(61, 1, 384, 7168, 2048, routed_scaling_factor=2.827)
    | {"model_type": "kimi_k2", "quantization_config": _FP8},
    "GLM-4.5": _deepseek_v3(92, 3, 160, 5120, 1536, routed_scaling_factor=2.5) | {"model_type": "glm4_moe"},
    "GLM-4.5-Air": _deepseek_v3(46, 1, 128, 4096, 1408, routed_scaling_factor=1.0) | {"model_type": "glm4_moe"},
    "Mixtral-8x7B-Instruct-v0.1": _plain("mixtral", 32, 8, 2, 4096, 14336),
    "Mixtral-8x22B-Instruct-v0.1": _plain("mixtral", 56, 8, 2, 6144, 16384),
    "MiniMax-M2": _plain("minimax_m2", 62, 256, 8, 3072, 1536, scoring_func="sigmoid", quantization_config=_FP8),
    "Phi-3.5-MoE-instruct": _plain("phimoe", 32, 16, 2, 4096, 6400),
    "OLMoE-1B-7B-0125": _plain("olmoe", 16, 64, 8, 2048, 1024),
    "granite-3.1-3b-a800m-instruct": _plain("granitemoe", 32, 40, 8, 1536, 512),
    "Llama-4-Scout-17B-16E": _plain("llama4_text", 48, 16, 1, 5120, 8192, interleave_moe_layer_step=1),
    "Llama-4-Maverick-17B-128E": _plain("llama4_text", 48, 128, 1, 5120, 8192, interleave_moe_layer_step=2),
}


def model_config(model: str | Path) -> dict[str, Any]:
    """config.json of a checkpoint's folder, of that file itself, or of a model of `MODELS` by its name.

    Raises:
        CheckpointError: a path that can't be read.
        ConfigError: neither a path nor a name of the table; the message lists them.
    """
    path, known = Path(model), {name.lower(): config for name, config in MODELS.items()}
    if path.exists() or len(path.parts) > 2 or path.is_absolute():
        return read_config(path)
    if found := known.get(path.name.lower()):
        return found
    raise ConfigError(
        f"--model {model}: there is no such file or folder, and no such name here; known are {', '.join(MODELS)}"
    )
