"""A complete, tiny gpt-oss checkpoint with random weights, in the published format: what to try eprt on first."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch

from eprt.errors import ConfigError
from eprt.models.checkpoint import CONFIG, INDEX
from eprt.quant.blocks import encode_mxfp4
from eprt.weights import MX_BLOCK

_HEADS, _KV_HEADS, _HEAD_DIM, _VOCABULARY = 4, 2, 32, 512


def write_tiny_checkpoint(
    directory: str | Path,
    *,
    num_layers: int = 2,
    num_experts: int = 8,
    top_k: int = 4,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    seed: int = 0,
) -> Path:
    """Writes config.json, one shard per layer and the index of a gpt-oss model with MXFP4 experts.

    The model is whole (attention, embeddings, norms), so transformers loads it too.

    Args:
        directory: made if need be; must not hold a checkpoint yet.
        hidden_size, intermediate_size: multiples of 32.
        seed: same seed, same bytes.

    Returns:
        the directory.

    Raises:
        ConfigError: sizes that MXFP4 can't hold, or a directory that holds a checkpoint.
    """
    directory = Path(directory)
    if (directory / CONFIG).exists():
        raise ConfigError(f"{directory} already holds a checkpoint: choose an empty directory")
    if hidden_size % MX_BLOCK or intermediate_size % MX_BLOCK:
        raise ConfigError(f"hidden {hidden_size}, intermediate {intermediate_size}: expected multiples of {MX_BLOCK}")
    directory.mkdir(parents=True, exist_ok=True)
    config = gpt_oss_config(num_layers, num_experts, top_k, hidden_size, intermediate_size)
    random = _Random(seed)
    shards = [_ends(random, config)] + [_layer(random, config, layer) for layer in range(num_layers)]
    _write_shards(directory, shards)
    (directory / CONFIG).write_text(json.dumps(config, indent=2))
    return directory


def _write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    """Writes one file for each shard, and the index of them."""
    from safetensors.torch import save_file

    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


class _Random:
    """bf16 normal numbers from one seed, scaled so that a layer keeps its input's size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if std is None else std
        return (torch.randn(shape, generator=self.generator) * scale).bfloat16()


def _ends(random: _Random, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    H = config["hidden_size"]
    return {
        "model.embed_tokens.weight": random(_VOCABULARY, H, std=1.0),
        "model.norm.weight": torch.ones(H, dtype=torch.bfloat16),
        "lm_head.weight": random(_VOCABULARY, H),
    }


def _layer(random: _Random, config: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    H, I, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    tensors = {
        "input_layernorm.weight": torch.ones(H, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(H, dtype=torch.bfloat16),
        "self_attn.sinks": random(_HEADS, std=1.0),
        "mlp.router.weight": random(E, H),
        "mlp.router.bias": random(E, std=0.1),
        "mlp.experts.gate_up_proj_bias": random(E, 2 * I, std=0.1),
        "mlp.experts.down_proj_bias": random(E, H, std=0.1),
    }
    for name, rows, cols in (
        ("q_proj", _HEADS * _HEAD_DIM, H),
        ("k_proj", _KV_HEADS * _HEAD_DIM, H),
        ("v_proj", _KV_HEADS * _HEAD_DIM, H),
        ("o_proj", H, _HEADS * _HEAD_DIM),
    ):
        tensors[f"self_attn.{name}.weight"] = random(rows, cols)
        tensors[f"self_attn.{name}.bias"] = random(rows, std=0.1)
    # Rows of gate_up alternate gate, up in the file. The numbers are random either way, so none are moved here.
    for name, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes, scales = encode_mxfp4(random(E, rows, cols).float())
        tensors[f"mlp.experts.{name}_blocks"] = codes.unflatten(-1, (cols // MX_BLOCK, MX_BLOCK // 2))
        tensors[f"mlp.experts.{name}_scales"] = scales
    return {f"model.layers.{layer}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


# The fields of openai/gpt-oss-20b's config.json that no size changes.
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "initial_context_length": 4096,
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": _VOCABULARY,
}


def gpt_oss_config(
    num_layers: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
) -> dict[str, Any]:
    """Returns config.json with the fields of openai/gpt-oss-20b's."""
    return {
        **deepcopy(_GPT_OSS),
        "experts_per_token": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "num_experts_per_tok": top_k,
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
    }
