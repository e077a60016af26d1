"""A complete, tiny gpt-oss checkpoint with random weights, in the published format: what to try eprt on first."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from eprt.errors import ConfigError
from eprt.files import write_whole
from eprt.models.checkpoint import CONFIG, INDEX
from eprt.models.published import MODELS
from eprt.quant.blocks import encode_mxfp4
from eprt.weights import MX_BLOCK


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
    random = RandomWeights(seed)
    shards = [end_tensors(random, config)] + [_layer(random, config, layer) for layer in range(num_layers)]
    _write_shards(directory, shards)
    (directory / CONFIG).write_text(json.dumps(config, indent=2))
    return directory


def _write_shards(directory: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_whole(directory / file, save(shard, metadata={"format": "pt"}))
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2))


class RandomWeights:
    """Draws bf16 normal numbers from one seed, scaled so that a layer keeps its input's size."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, std: float | None = None) -> torch.Tensor:
        scale = shape[-1] ** -0.5 if std is None else std
        return (torch.randn(shape, generator=self.generator) * scale).bfloat16()


def end_tensors(random: RandomWeights, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of a model outside its layers."""
    H, vocabulary = config["hidden_size"], config["vocab_size"]
    return {
        "model.embed_tokens.weight": random(vocabulary, H, std=1.0),
        "model.norm.weight": torch.ones(H, dtype=torch.bfloat16),
        "lm_head.weight": random(vocabulary, H),
    }


def dense_tensors(random: RandomWeights, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the tensors of one layer, by their names in it, but for the experts' MXFP4 matrices."""
    H, I, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, kv_heads = (config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    tensors = {
        "input_layernorm.weight": torch.ones(H, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(H, dtype=torch.bfloat16),
        "self_attn.sinks": random(heads, std=1.0),
        "mlp.router.weight": random(E, H),
        "mlp.router.bias": random(E, std=0.1),
        "mlp.experts.gate_up_proj_bias": random(E, 2 * I, std=0.1),
        "mlp.experts.down_proj_bias": random(E, H, std=0.1),
    }
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads), ("o_proj", heads)):
        width = count * config["head_dim"]
        rows, cols = (H, width) if name == "o_proj" else (width, H)
        tensors[f"self_attn.{name}.weight"] = random(rows, cols)
        tensors[f"self_attn.{name}.bias"] = random(rows, std=0.1)
    return tensors


def _layer(random: RandomWeights, config: dict[str, Any], layer: int) -> dict[str, torch.Tensor]:
    H, I, E = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    tensors = dense_tensors(random, config)
    # Rows of gate_up alternate gate, up in the file. The numbers are random either way, so none are moved here.
    for name, rows, cols in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        codes, scales = encode_mxfp4(random(E, rows, cols).float())
        tensors[f"mlp.experts.{name}_blocks"] = codes.unflatten(-1, (cols // MX_BLOCK, MX_BLOCK // 2))
        tensors[f"mlp.experts.{name}_scales"] = scales
    return {f"model.layers.{layer}.{name}": tensor.contiguous() for name, tensor in tensors.items()}


def gpt_oss_config(
    num_layers: int, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int
) -> dict[str, Any]:
    """Returns config.json with the fields of openai/gpt-oss-20b's, heads and vocabulary tiny."""
    return deepcopy(MODELS["gpt-oss-20b"]) | {
        "eos_token_id": 2,
        "pad_token_id": 1,
        "head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
        "experts_per_token": top_k,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(num_layers)],
        "num_experts_per_tok": top_k,
        "num_hidden_layers": num_layers,
        "num_local_experts": num_experts,
    }
