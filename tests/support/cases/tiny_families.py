"""Every folder of the installed transformers that has experts, each as a tiny model with random weights.

A model is made from its family's own default config, whose widths, depths and counts are shrunk by rule; `FIELDS`
holds what the rules can't know. Nothing here lists the folders: a new version of transformers brings its own.
"""

from __future__ import annotations

import importlib
import inspect
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

VOCABULARY, NUM_EXPERTS, TOP_K, LAYERS, NARROW = 96, 8, 2, 2, 48
_EXPERTS = re.compile(r"^class \w*Experts?\b|use_experts_implementation", re.MULTILINE)

# The first rule whose pattern is found in a field's name gives the largest value of that integer; None: as it is.
_RULES: tuple[tuple[re.Pattern[str], int | None], ...] = tuple(
    (re.compile(pattern), most)
    for pattern, most in (
        (r"(token|_start|_end|eoi|boi|eoa|boa)_(id|index)$|^(bos|eos|pad)", 3),
        (r"vocab", VOCABULARY),
        (r"^(n_group|num_expert_group|topk_group)$|start_index|first_k_dense|_interval$", 1),
        (r"(num|n)_shared_experts|moe_num_shared", 1),
        (r"(num|n)_(hidden_|mask_|encoder_|decoder_)?layers?$|^(depth|encoder_layers|decoder_layers)$", LAYERS),
        (r"experts_per_tok|moe_topk|moe_k$|top_k", TOP_K),
        (r"experts$|expert_num$", NUM_EXPERTS),
        (r"n_heads_|heads|n_head$|o_groups", 2),
        (r"head_dim|_rank$|kv_channels|head_size|d_kv|state_size|d_state", 16),
        (r"hidden_size|d_model|n_embd|embed_dim|hidden_dim|model_dim|(in|out|output)_dim", 64),
        (r"intermediate|ffn|d_ff|mlp_dim|expert_dim|linear_dim", 48),
        (r"index_topk|window|chunk", 16),
        (r"position", 512),
    )
)


@cache
def _models() -> Path:
    found = find_spec("transformers")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "models"


@cache
def _code() -> dict[str, str]:
    """The modelling code of each folder of the installed transformers that has a class of experts."""
    code = ((file.parent.name, file.read_text()) for file in _models().glob("*/modeling_*.py"))
    return {folder: text for folder, text in code if _EXPERTS.search(text)}


@cache
def borrowed() -> dict[str, str]:
    """Folders of a config alone that run by such code (Sarvam's, of transformers 5.24), and its class with a head."""
    pairs = re.findall(r'\("(\w+)", "(\w+ForCausalLM)"\)', (_models() / "auto/modeling_auto.py").read_text())
    return {
        folder: name
        for folder, name in pairs
        if any((_models() / folder).glob("configuration_*.py"))
        and not any((_models() / folder).glob("modeling_*.py"))
        and any(f"class {name}(" in text for text in _code().values())
    }


def folders() -> list[str]:
    """Those of the installed transformers whose models have experts."""
    return sorted(_code().keys() | borrowed().keys())


def model_types(folder: str) -> set[str]:
    """The `model_type`s of a folder's configs."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

    return {name for name in CONFIG_MAPPING_NAMES if model_type_to_module_name(name) == folder}


def shrink(fields: dict[str, Any]) -> dict[str, Any]:
    """The same fields, smaller."""
    layers = next((v for k, v in fields.items() if re.search(r"^(num_(hidden_)?layers|n_layers?)$", str(k))), None)
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "per_layer_config":
            continue
        if isinstance(value, dict):
            found[name] = shrink(value)
        elif isinstance(value, list) and layers is not None and len(value) == layers:
            found[name] = value[-LAYERS:]
        elif type(value) is int:
            rule = next((most for pattern, most in _RULES if pattern.search(str(name))), None)
            found[name] = value if rule is None else min(value, rule)
        else:
            found[name] = value
    return found


def model_class(folder: str) -> type[Any]:
    """The class that generates text, else the one that labels tokens."""
    import transformers

    if name := HEADS.get(folder) or borrowed().get(folder):
        return getattr(transformers, name)
    if (folder, transformers.__version__) == ("llama4", "5.24.0"):
        return transformers.Llama4ForCausalLM  # Llama4ForConditionalGeneration can't call its own text model there
    module = next(iter(modules(folder)))
    classes = [c for _, c in inspect.getmembers(module, inspect.isclass) if c.__module__ == module.__name__]
    for ending in ("ForConditionalGeneration", "ForCausalLM", "ForTokenClassification"):
        found = [c for c in classes if c.__name__.endswith(ending) and getattr(c, "config_class", None) is not None]
        if found:
            return found[-1]
    raise LookupError(f"{folder} has no model with a head: {[c.__name__ for c in classes]}")


def config_class(folder: str) -> type[Any]:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[folder] if folder in borrowed() else model_class(folder).config_class


def modules(folder: str) -> list[Any]:
    import transformers

    root = Path(transformers.__file__).parent / "models" / folder
    return [importlib.import_module(f"transformers.models.{folder}.{f.stem}") for f in root.glob("modeling_*.py")]


# Where the folder's last class with a head isn't the one that reads text.
HEADS = {
    "inkling": "InklingForCausalLM",  # its image encoder needs scipy
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
_DEEPSEEK = {"n_routed_experts": NUM_EXPERTS, "n_shared_experts": 1, "num_experts_per_tok": TOP_K}
# Folders that eprt doesn't spread, and why.
REASONS = {
    "dbrx": "a layer's experts lie in matrices [experts * width, hidden] of a module of their own",
    "diffusion_gemma": "writes blocks of tokens by diffusion; encoder and decoder share experts and call them apart",
    "jetmoe": "attention has experts, too, and the model groups the tokens itself",
    "nllb_moe": "a token's experts depend on the other tokens of its batch (capacity)",
    "switch_transformers": "a token's experts depend on the other tokens of its batch (capacity)",
}
# Of the text model, or of the part that the dotted name says: what is off by default, and sizes that hang together.
FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"num_experts_per_tok": TOP_K, "mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v2": _DEEPSEEK | {"first_k_dense_replace": 1},
    "dots1": _DEEPSEEK,
    "dots3_note": {"audio_config.adapter_input_size": 64},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [48, 16], "head_dim": 128},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {"enable_moe_block": True, "num_experts": NUM_EXPERTS, "top_k_experts": TOP_K}
    | {"moe_intermediate_size": 48},
    "glm4v_moe": {"head_dim": 128},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_moe": {"num_experts": NUM_EXPERTS, "moe_topk": TOP_K, "head_dim": 16},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "hy_v4_vl": {"indexer_types": ["full", "shared"], "qk_rope_head_dim": 64, "index_head_dim": 64},
    "inkling2_loop": {"n_layers_per_attn_res_block": 1, "loop_layer_index_start": 1, "loop_layer_index_end": 2}
    | {"num_hidden_layers": 3, "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"qk_head_dim": 32, "head_dim": 16},
    "llama4": {"moe_layers": [0, 1]},
    "mimo_v2_flash": {"num_attention_heads": 4},
    "mistral4": {"qk_rope_head_dim": 16, "qk_head_dim": 32, "head_dim": 32},
    "mistral_large4": {"no_rope_layers": [1, 0], "kv_source_layers": [0, 1]},
    "muse_spark": {"audio_config.hidden_sizes": [16, 16], "audio_config.depths": [1, 1]}
    | {"audio_config.patch_sizes": [16, 6], "audio_config.num_hidden_layers": 2},
    "nemotron_h": {"n_groups": 1},
    "qwen3_omni_moe": {"*.vision_start_token_id": 3},
    "qwen4_exp": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
    | {"indexer_compress_ratio": 4},
    "step3p7": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
}


def tiny_config(folder: str) -> Any:
    kind = config_class(folder)
    fields = shrink(kind().to_dict())
    for path, value in FIELDS.get(folder, {}).items():
        part, _, name = path.rpartition(".")
        (fields if part == "*" else fields.get(part or "text_config", fields))[name] = value
    for name in ("architectures", "transformers_version", "_name_or_path"):
        fields.pop(name, None)
    fields = {k: v for k, v in fields.items() if k != "model_type"}
    return kind(**fields)


def tiny_model(folder: str) -> Any:
    """The model, its experts with numbers of a size that decides tokens: their own beginning (0.02) would hide a wrong
    expert behind the residual."""
    torch.manual_seed(1)
    model = model_class(folder)(tiny_config(folder)).eval().requires_grad_(False)
    for name, tensor in model.named_parameters():
        if "experts." in name and tensor.dim() == 3:
            tensor.normal_(std=tensor.shape[-1] ** -0.5)
    return model


def swap_halves(model: Any) -> None:
    """Exchanges gate and up of every expert; down's columns where there is no gate."""
    for name, tensor in model.named_parameters():
        if "experts." in name and tensor.dim() == 3 and ("gate_up" in name or name.endswith("experts.up_proj")):
            dim = 2 if tensor.shape[2] == 2 * NARROW else 1
            tensor.copy_(tensor.roll(tensor.shape[dim] // 2, dim))
