"""One tiny model a family: transformers' own classes and the config that makes them small.

Every table of families that tests share comes from here: saved checkpoints (model_cases.py), whole models
(jobs/integration_jobs.py). Sizes that a wrong layout would betray: H 64, I 96, 8 experts, gate and up apart.
"""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VOCABULARY, NUM_EXPERTS = 64, 8
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = COMMON | {"head_dim": 16}
LATENT_ATTENTION = COMMON | {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
LINEAR_ATTENTION = HEADS | {
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "layer_types": ["linear_attention", "full_attention"],
}
V4_ATTENTION = HEADS | {
    "q_lora_rank": 16,
    "o_lora_rank": 16,
    "o_groups": 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "num_key_value_heads": 1,
}
SPARSE_ATTENTION = LATENT_ATTENTION | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 16}
# A dense layer of width 80, then experts of width 96.
NARROW = {"intermediate_size": 80, "moe_intermediate_size": 96}
DEEPSEEK = NARROW | {
    "n_routed_experts": NUM_EXPERTS,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
}
QWEN = NARROW | {"num_experts": NUM_EXPERTS}
QWEN_SHARED = QWEN | {"shared_expert_intermediate_size": 48}
MIXTRAL = {"intermediate_size": 96, "num_local_experts": NUM_EXPERTS}
# What decoder layers call the module that is dense in one layer and a mixture in another.
BLOCKS = ("mlp", "mixer", "block_sparse_moe", "feed_forward")


@dataclass(frozen=True)
class Recipe:
    """A causal language model of one family.

    Attributes:
        stem: transformers has `<stem>ForCausalLM` and `<stem>Config`, unless `config` names another.
        fields: arguments of that config.
        layer: a layer that is a mixture of experts.
        moe_layers: how many there are.
        config: the config's class.
    """

    stem: str
    fields: dict[str, Any]
    layer: int = 1
    moe_layers: int = 2
    config: str = ""

    @property
    def model_class(self) -> str:
        return f"{self.stem}ForCausalLM"

    @property
    def config_class(self) -> str:
        return self.config or f"{self.stem}Config"


def _after_dense(stem: str, fields: dict[str, Any]) -> Recipe:
    """The first of two layers is dense."""
    return Recipe(stem, fields, moe_layers=1)


FIRST_DENSE = {"first_k_dense_replace": 1}

RECIPES: dict[str, Recipe] = {
    "gpt_oss": Recipe("GptOss", HEADS | MIXTRAL),
    "qwen3_moe": _after_dense("Qwen3Moe", HEADS | QWEN | {"decoder_sparse_step": 2}),
    "qwen3_5_moe_text": Recipe("Qwen3_5Moe", LINEAR_ATTENTION | QWEN_SHARED, config="Qwen3_5MoeTextConfig"),
    "deepseek_v3": _after_dense("DeepseekV3", LATENT_ATTENTION | DEEPSEEK | FIRST_DENSE),
    "deepseek_v4": Recipe(
        "DeepseekV4",
        V4_ATTENTION
        # A limit of 1 clamps many of these small activations, so that a wrong clamp shows.
        | {"moe_intermediate_size": 96, "n_routed_experts": NUM_EXPERTS, "num_hash_layers": 1, "swiglu_limit": 1.0},
    ),
    "nemotron_h": _after_dense(
        "NemotronH",
        {name: value for name, value in HEADS.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["full_attention", "moe"], "moe_intermediate_size": 96, "moe_latent_size": 32}
        | {"moe_shared_expert_intermediate_size": 48, "n_routed_experts": NUM_EXPERTS, "routed_scaling_factor": 2.5},
    ),
    "glm4_moe": _after_dense("Glm4Moe", HEADS | DEEPSEEK | FIRST_DENSE),
    "dots1": _after_dense("Dots1", HEADS | DEEPSEEK | FIRST_DENSE | {"norm_topk_prob": True}),
    "solar_open": Recipe("SolarOpen", HEADS | DEEPSEEK),
    "deepseek_v2": _after_dense(
        "DeepseekV2", LATENT_ATTENTION | DEEPSEEK | FIRST_DENSE | {"topk_method": "group_limited_greedy"}
    ),
    "deepseek_v32": _after_dense("DeepseekV32", SPARSE_ATTENTION | DEEPSEEK | FIRST_DENSE),
    "glm_moe_dsa": _after_dense("GlmMoeDsa", SPARSE_ATTENTION | DEEPSEEK | FIRST_DENSE),
    "glm4_moe_lite": _after_dense("Glm4MoeLite", LATENT_ATTENTION | DEEPSEEK),
    "mixtral": Recipe("Mixtral", HEADS | MIXTRAL),
    "minimax": Recipe("MiniMax", HEADS | MIXTRAL),
    "minimax_m2": Recipe("MiniMaxM2", HEADS | MIXTRAL),
    "phimoe": Recipe("Phimoe", COMMON | MIXTRAL | {"router_jitter_noise": 0.3}),
    "granitemoe": Recipe("GraniteMoe", COMMON | MIXTRAL),
    "olmoe": Recipe("Olmoe", COMMON | {"intermediate_size": 96, "num_experts": NUM_EXPERTS}),
    "qwen2_moe": Recipe("Qwen2Moe", COMMON | QWEN_SHARED),
    "qwen3_next": Recipe("Qwen3Next", LINEAR_ATTENTION | QWEN_SHARED),
    "hunyuan_v1_moe": Recipe(
        "HunYuanMoEV1",
        {name: value for name, value in HEADS.items() if name != "num_experts_per_tok"}
        | {"intermediate_size": 96, "num_experts": NUM_EXPERTS, "moe_topk": 2},
    ),
    "ernie4_5_moe": _after_dense(
        "Ernie4_5_Moe",
        {name: value for name, value in COMMON.items() if name != "num_experts_per_tok"}
        | NARROW
        | {"moe_num_experts": NUM_EXPERTS, "moe_k": 2, "moe_num_shared_experts": 2},
    ),
    "llama4_text": Recipe(
        "Llama4", HEADS | MIXTRAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 80}, config="Llama4TextConfig"
    ),
}

# Other layers of families above: routed by a token-id table, experts in the model's own width, no groups, ...
VARIANTS: dict[str, Recipe] = {
    "deepseek_v4_hash": Recipe("DeepseekV4", RECIPES["deepseek_v4"].fields, layer=0),
    "nemotron_h_flat": Recipe(
        "NemotronH",
        {name: value for name, value in HEADS.items() if name != "num_hidden_layers"}
        | {"layers_block_type": ["moe", "full_attention"], "moe_intermediate_size": 96, "n_routed_experts": NUM_EXPERTS}
        | {"moe_shared_expert_intermediate_size": 48},
        layer=0,
        moe_layers=1,
    ),
    "deepseek_v2_greedy": _after_dense(
        "DeepseekV2",
        LATENT_ATTENTION
        | NARROW
        | FIRST_DENSE
        | {
            "n_routed_experts": NUM_EXPERTS,
            "n_shared_experts": 1,
            "topk_method": "greedy",
            "routed_scaling_factor": 2.0,
        },
    ),
    "llama4_interleaved": Recipe(
        "Llama4",
        RECIPES["llama4_text"].fields | {"interleave_moe_layer_step": 2},
        moe_layers=1,
        config="Llama4TextConfig",
    ),
}


def make_config(recipe: Recipe) -> Any:
    """transformers' config; experts are computed one by one, whatever the machine has kernels for."""
    import transformers

    config = getattr(transformers, recipe.config_class)(**recipe.fields)
    config._experts_implementation = "eager"
    return config


def make_model(recipe: Recipe, dtype: torch.dtype = torch.float32, seed: int = 1) -> Any:
    """transformers' model, in evaluation mode. Its MoE blocks hold random numbers of a size that decides logits, biases
    too: transformers' own beginning (0.02, biases zero) would hide a wrong expert behind the residual."""
    import transformers

    torch.manual_seed(0)
    model = getattr(transformers, recipe.model_class)(make_config(recipe)).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if name.endswith("tid2eid"):  # the token-id table of hash routing
            experts = torch.rand(tensor.shape[0], NUM_EXPERTS, generator=generator).argsort(dim=1)
            tensor.copy_(experts[:, : tensor.shape[1]])
        elif tensor.is_floating_point() and any(f".{block}." in name for block in BLOCKS):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5)
    return model.to(dtype)


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="eprt-models-")


def scratch(name: str) -> Path:
    """A folder for models that tests of this process share, gone with it."""
    return Path(_scratch().name) / name


def known(recipe: Recipe) -> bool:
    """Whether the installed transformers has this family."""
    return recipe.model_class in _names_in_transformers()


@functools.cache
def _names_in_transformers() -> frozenset[str]:
    import transformers

    return frozenset(dir(transformers))  # which imports no model, as hasattr does, but takes 0.2 s
