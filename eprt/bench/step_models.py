"""Models of `eprt bench step`: transformers' own classes, random weights, the widths of the published config.json."""

from __future__ import annotations

import json
from typing import Any

import torch

from eprt.errors import ConfigError
from eprt.models.tiny import gpt_oss_config

_GPT_OSS = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088}
_QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
}
_DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "moe_intermediate_size": 2048,
    "intermediate_size": 18432,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 0,  # the published 3 have no experts
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}

MODELS = ("gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3", "tiny")


def _config_of(name: str, layers: int) -> dict[str, Any]:
    """config.json of so many layers."""
    match name:
        case "gpt-oss-120b":
            return gpt_oss_config(layers, 128, 4, 2880, 2880) | _GPT_OSS
        case "qwen3-30b-a3b":
            return _QWEN3 | {"num_hidden_layers": layers}
        case "deepseek-v3":
            return _DEEPSEEK_V3 | {"num_hidden_layers": layers}
        case "tiny":
            return gpt_oss_config(layers, 8, 4, 128, 256)
        case _:
            raise ConfigError(f"--models {name!r}: expected some of {', '.join(MODELS)}")


def make_model(name: str, layers: int, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """(the model in bf16 with random weights on the device, the published config of its layers, number format of the
    experts included).

    Raises:
        ConfigError: an unknown name, or transformers isn't installed.
    """
    published = _config_of(name, layers)
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ConfigError("bench step runs transformers' own models: pip install 'eprt[transformers]'") from error
    if "layer_types" in published:
        published["layer_types"] = ["full_attention"] * layers  # a short context: no window would be full
    fields = {key: value for key, value in published.items() if key not in ("quantization_config", "architectures")}
    config: Any = AutoConfig.for_model(**fields)
    config.dtype = torch.bfloat16
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.eval().requires_grad_(False)
    said = json.loads(config.to_json_string(use_diff=False))
    said.pop("quantization_config", None)
    if "quantization_config" in published:
        said["quantization_config"] = published["quantization_config"]
    return model, said
