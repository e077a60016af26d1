"""Tiny transformers models with random weights, saved as their families' checkpoints are."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eprt.models.checkpoint import CONFIG, SINGLE
from eprt.placement import ExpertShard

COMMON = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
LINEAR = {f"linear_{kind}": 16 for kind in ("key_head_dim", "value_head_dim")}
LINEAR |= {"linear_num_key_heads": 1, "linear_num_value_heads": 1}
V4_ATTENTION = {"q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2, "index_n_heads": 2, "index_head_dim": 16}

# family -> transformers' classes, config, the MoE layer that is compared
MODELS = {
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        COMMON | {"num_hidden_layers": 2, "intermediate_size": 96, "num_local_experts": 4},
        1,
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        COMMON | {"num_hidden_layers": 2, "moe_intermediate_size": 96, "num_experts": 4, "decoder_sparse_step": 2},
        1,
    ),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeTextConfig",
        COMMON
        | LINEAR
        | {"num_hidden_layers": 1, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 48}
        | {"num_experts": 4},
        0,
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        COMMON
        | MLA
        | {"num_hidden_layers": 2, "first_k_dense_replace": 1, "intermediate_size": 96, "moe_intermediate_size": 96}
        | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
        1,
    ),
    "deepseek_v4": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        COMMON
        | V4_ATTENTION
        | {"num_hidden_layers": 2, "moe_intermediate_size": 96, "n_routed_experts": 4, "num_key_value_heads": 1}
        | {"num_hash_layers": 1},
        1,
    ),
    "deepseek_v4_hash": (
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        COMMON
        | V4_ATTENTION
        | {"num_hidden_layers": 2, "moe_intermediate_size": 96, "n_routed_experts": 4, "num_key_value_heads": 1}
        | {"num_hash_layers": 1},
        0,
    ),
    "nemotron_h": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        COMMON
        | {"layers_block_type": ["full_attention", "moe"], "moe_intermediate_size": 96, "moe_latent_size": 32}
        | {"moe_shared_expert_intermediate_size": 48, "n_routed_experts": 4, "routed_scaling_factor": 2.5},
        1,
    ),
    "nemotron_h_flat": (
        "NemotronHForCausalLM",
        "NemotronHConfig",
        COMMON
        | {"layers_block_type": ["moe", "full_attention"], "moe_intermediate_size": 96, "n_routed_experts": 4}
        | {"moe_shared_expert_intermediate_size": 48},
        0,
    ),
}


def make_model(case: str, dtype: torch.dtype = torch.bfloat16):
    """The model of a case, every tensor of its MoE block random, and its block."""
    import transformers

    model_class, config_class, fields, layer = MODELS[case]
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**fields)).requires_grad_(False)
    block = model.model.layers[layer]
    block = block.mixer if hasattr(block, "mixer") else block.mlp
    for name, tensor in block.state_dict().items():
        if name.endswith("tid2eid"):
            tensor.copy_(torch.rand(*tensor.shape[:1], 4).argsort(dim=1)[:, : tensor.shape[1]])
        else:
            tensor.copy_(torch.randn(tensor.shape) * 0.2)
    model.to(dtype)
    for name, buffer in block.named_buffers():
        if name.endswith("e_score_correction_bias"):
            block.get_submodule("gate").e_score_correction_bias = buffer.float()  # as from_pretrained keeps it
    return model, block, layer


def canonical_experts(block) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, parts * I, H] with rows [gate; up], and [E, H, I], from a transformers block's own parameters."""
    experts = block.experts
    if type(experts).__name__ == "GptOssExperts":
        gate_up = experts.gate_up_proj.transpose(1, 2)
        return torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1), experts.down_proj.transpose(1, 2)
    first = experts.gate_up_proj if hasattr(experts, "gate_up_proj") else experts.up_proj
    return first, experts.down_proj


def shard_of(gate_up: torch.Tensor, down: torch.Tensor, parts: int, shard: ExpertShard):
    """This shard of canonical whole matrices (any tensors with their row and column grids)."""
    mine = slice(shard.first_expert, shard.end_expert)
    gates = gate_up[mine].unflatten(1, (parts, -1)).chunk(shard.moe_tp_size, dim=2)[shard.moe_tp_rank]
    return gates.flatten(1, 2), down[mine].chunk(shard.moe_tp_size, dim=2)[shard.moe_tp_rank]


def edit(source: Path, target: Path, tensors=None, config=None, drop=()) -> Path:
    """A copy of a one-file checkpoint with tensors (a function of all of them, or more of them) and config changed."""
    target.mkdir(parents=True, exist_ok=True)
    held = load_file(source / SINGLE)
    held = tensors(held) if callable(tensors) else held | (tensors or {})
    save_file({name: value.contiguous() for name, value in held.items() if name not in drop}, target / SINGLE)
    settings = json.loads((source / CONFIG).read_text()) | (config or {})
    (target / CONFIG).write_text(json.dumps({k: v for k, v in settings.items() if k not in drop}))
    return target


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="eprt-models-")


@functools.cache
def saved(case: str):
    """(model, MoE block, layer, folders) of a case: its checkpoint with the family's own names under "original",
    with transformers' stacked ones under "stacked". Made once a process, gone with it."""
    model, block, layer = make_model(case)
    folders = {kind: Path(_root().name) / case / kind for kind in ("original", "stacked")}
    model.save_pretrained(folders["original"])
    model.save_pretrained(folders["stacked"], save_original_format=False)
    return model, block, layer, folders


def equal(found, expected) -> None:
    """Same dtype, same bytes; or both None."""
    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
