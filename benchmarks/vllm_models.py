"""Models of vllm_duel.py: the published widths, few layers, random weights."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from eprt.models.published import MODELS as PUBLISHED

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
FP8_TENSOR = {"quant_method": "fp8", "activation_scheme": "dynamic"}  # one scale each
COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
}
QWEN3 = (
    PUBLISHED["Qwen3-30B-A3B"]
    | COMMON
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "decoder_sparse_step": 1,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "rope_theta": 1e6,
        "eos_token_id": 151645,
    }
)
DEEPSEEK_V3 = (
    PUBLISHED["DeepSeek-V3"]
    | COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "max_position_embeddings": 4096,
        "rope_theta": 10000,
        "num_nextn_predict_layers": 0,
        "eos_token_id": 1,
        "quantization_config": FP8,
    }
)
# Expert widths of DeepSeek-V3 behind Qwen3's attention: FP8 blocks where MLA's kernels aren't there.
WIDE_QWEN3 = QWEN3 | {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 2048,
    "num_experts": 256,
    "quantization_config": FP8,
}
GLM_AIR = (
    PUBLISHED["GLM-4.5-Air"]
    | COMMON
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "use_qk_norm": False,
        "norm_topk_prob": True,
        "vocab_size": 151552,
        "intermediate_size": 10944,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rope_theta": 1e6,
        "num_nextn_predict_layers": 0,
        "eos_token_id": 151329,
    }
)
# Gemma-4-26B-A4B's text model: five layers of a sliding window to one whose heads are twice as wide.
GEMMA4 = COMMON | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "vocab_size": 262144,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "global_head_dim": 512,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "final_logit_softcapping": 30.0,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "eos_token_id": 1,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": QWEN3,
    "qwen3-30b-fp8": QWEN3 | {"quantization_config": FP8},
    "qwen3-30b-fp8-tensor": QWEN3 | {"quantization_config": FP8_TENSOR},
    "qwen3-fp8": WIDE_QWEN3,
    "deepseek-v3": DEEPSEEK_V3,
    "gemma-4": GEMMA4,
    "glm-4.5-air": GLM_AIR,
}
GPT_OSS = {"gpt-oss": 128, "gpt-oss-20b": 32}  # experts
LOUD = 32.0  # an embedding's size beside what a layer adds
MODELS = (*GPT_OSS, *CONFIGS)
LAYERS = {
    "gpt-oss": 12,
    "gpt-oss-20b": 24,
    "qwen3": 24,
    "qwen3-30b-fp8": 48,
    "qwen3-30b-fp8-tensor": 24,
    "qwen3-fp8": 4,
    "deepseek-v3": 5,
    "gemma-4": 30,
    "glm-4.5-air": 12,
}


def make_model(name: str, layers: int, models_in: Path, *, tiny: bool) -> Path:
    """Writes the model unless it is there. Returns its folder."""
    folder = models_in / f"vllm-duel-{name}-{layers}{'-tiny' if tiny else ''}"
    if (folder / "config.json").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    if name in GPT_OSS:
        write_gpt_oss(folder, layers, GPT_OSS[name], tiny=tiny)
    else:
        config = CONFIGS[name] | (TINY if tiny else {}) | {"num_hidden_layers": layers}
        if "quantization_config" in config:  # routers are never in FP8; vLLM has no FP8 linear layers on CPU
            kept = ["mlp.gate", *(f"self_attn.{name}_proj" for name in "qkvo" if tiny)]
            ignored = [f"model.layers.{i}.{name}" for i in range(layers) for name in kept]
            config["quantization_config"] = config["quantization_config"] | {"ignored_layers": ignored}
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def write_gpt_oss(folder: Path, layers: int, num_experts: int, *, tiny: bool) -> None:
    """gpt-oss's widths, random codes; every layer holds the first one's bytes, so only one has to be made.

    The embedding outweighs all layers and is the head, too, so a sequence repeats its last token: as many sequences
    visit as many experts in both engines. Other random weights end in the same dozen of tokens for all sequences.
    """
    import torch
    from safetensors.torch import save_file

    from eprt.conformance.tiny_model import RandomWeights, dense_tensors, end_tensors, gpt_oss_config

    E, H, I = (8, 128, 256) if tiny else (num_experts, 2880, 2880)
    config = gpt_oss_config(layers, E, 4, H, I) | {"max_position_embeddings": 4096, "dtype": "bfloat16"}
    if not tiny:
        config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32768}
    random = RandomWeights(0)
    ends, layer = end_tensors(random, config), dense_tensors(random, config)
    embedding = ends["model.embed_tokens.weight"]
    ends |= {"model.embed_tokens.weight": LOUD * embedding, "lm_head.weight": 0.02 * embedding}
    for name, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        layer[f"mlp.experts.{name}_blocks"] = torch.randint(0, 256, (E, rows, cols // 32, 16), dtype=torch.uint8)
        # A code is 3.4 in root mean square: with this power of two a row of products keeps its input's size.
        power = 127 - round(math.log2(3.4 * cols**0.5))
        layer[f"mlp.experts.{name}_scales"] = torch.full((E, rows, cols // 32), power, dtype=torch.uint8)
    folder.mkdir(parents=True)
    save_file(ends, folder / "ends.safetensors", metadata={"format": "pt"})
    names = dict.fromkeys(ends, "ends.safetensors")
    for number in range(layers):
        file, named = f"layer-{number}.safetensors", {f"model.layers.{number}.{name}": t for name, t in layer.items()}
        save_file(named, folder / file, metadata={"format": "pt"})
        names |= dict.fromkeys(named, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
