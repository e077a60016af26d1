"""Tiny checkpoints for the tests inside engines, and the tokens that transformers adds to prompts.

Models are in float32, where sums in another order choose the same tokens, or of a seed whose best token leads the next
by more than bf16's own differences.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from support.cases.number_formats import E2M1, mxfp4_numbers
from support.cases.number_formats import packed as two_a_byte
from support.cases.packed_int4 import GROUP, QUANT, awq_words, words

Stored = dict[str, torch.Tensor]
Prompts = list[tuple[list[int], int]]

# Uneven: another number of prompts, of tokens in them, and of tokens to add on each rank.
PROMPTS: Prompts = [
    ([5, 6, 7, 8], 6),
    ([9, 10, 11], 18),
    ([31, 7, 99, 12, 400, 3, 77], 9),
    ([250], 12),
    ([17, 18, 19, 20, 21], 5),
]
SIZES = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
}


def qwen3_model(folder: Path) -> Any:
    """Writes a tiny Qwen3-MoE in float32, with a tokenizer. Returns the model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_hidden_layers=3, moe_intermediate_size=64)).float().eval()
    model.save_pretrained(folder)
    add_tokenizer(folder)
    return model


def glm4_model(folder: Path) -> Any:
    """Writes a tiny GLM-4.5 in float32: a router with groups and a bias, blocks with shared experts."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    torch.manual_seed(3)
    sizes = {name: size for name, size in SIZES.items() if name != "num_experts"}
    routed = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    config = Glm4MoeConfig(**sizes, **routed, num_hidden_layers=3, moe_intermediate_size=64, first_k_dense_replace=1)
    model = Glm4MoeForCausalLM(config).float().eval()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def qwen2_model(folder: Path) -> Any:
    """Writes a tiny Qwen2-MoE in float32: blocks with a shared expert behind a gate."""
    from transformers import Qwen2MoeConfig, Qwen2MoeForCausalLM

    torch.manual_seed(5)
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    model = Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **experts, num_hidden_layers=2)).float().eval()
    model.save_pretrained(folder)
    return model


def llama4_model(folder: Path) -> Any:
    """Writes a tiny Llama-4 in float32: one expert a token, whose input the router's weight scales."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    torch.manual_seed(3)
    sizes = {name: size for name, size in SIZES.items() if name not in ("num_experts", "norm_topk_prob")}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 64, "intermediate_size_mlp": 96}
    layers = {"num_hidden_layers": 2, "interleave_moe_layer_step": 1, "attention_chunk_size": 128}
    model = Llama4ForCausalLM(Llama4TextConfig(**sizes | experts | layers)).float().eval()
    model.save_pretrained(folder)
    return model


def qwen3_next_model(folder: Path) -> Any:
    """Writes a tiny Qwen3-Next in float32: Qwen2-MoE's blocks behind gated attention, and none that is linear. Without
    that transformers can't cache it."""
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(7)
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "full_attention_interval": 1}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **experts, **layers)).float().eval()
    model.generation_config.use_cache = False
    model.save_pretrained(folder)
    return model


IMAGES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 128}
MARKS = {"image_token_id": 508, "video_token_id": 509, "vision_start_token_id": 510, "vision_end_token_id": 511}


def qwen3_5_model(folder: Path) -> Any:
    """Writes a tiny Qwen3.5-MoE in float32, with its vision tower: blocks as those of Qwen3-Next, settings one level
    deeper."""
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    torch.manual_seed(8)
    experts = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 96}
    layers = {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2, "full_attention_interval": 1}
    text = SIZES | experts | layers | {"dtype": "float32"}
    config = Qwen3_5MoeConfig(text_config=text, vision_config=IMAGES | {"num_position_embeddings": 16}, **MARKS)
    model = Qwen3_5MoeForConditionalGeneration(config).float().eval()
    model.generation_config.use_cache = False
    model.save_pretrained(folder)
    return model


def qwen3_vl_model(folder: Path) -> Any:
    """Writes a tiny Qwen3-VL-MoE in float32, with its vision tower: Qwen3-MoE's blocks, settings one level deeper."""
    from safetensors.torch import load_file, save_file
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    torch.manual_seed(9)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
    text = SIZES | {"moe_intermediate_size": 64, "num_hidden_layers": 2, "dtype": "float32", "rope_parameters": rope}
    images = IMAGES | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=images, **MARKS)
    model = Qwen3VLMoeForConditionalGeneration(config).float().eval()
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")  # published experts are [E, inputs, outputs]
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".experts." in name}
    save_file(tensors | turned, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def glm4v_model(folder: Path) -> Any:
    """Writes a tiny GLM-4.5V in float32, with its vision tower: GLM-4.5's blocks, settings one level deeper."""
    from transformers import Glm4vMoeConfig, Glm4vMoeForConditionalGeneration

    torch.manual_seed(10)
    sizes = {name: size for name, size in SIZES.items() if name != "num_experts"}
    routed = {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 2, 3], "partial_rotary_factor": 0.5}
    layers = {"num_hidden_layers": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 0, "rope_parameters": rope}
    text = sizes | routed | layers | {"dtype": "float32"}
    config = Glm4vMoeConfig(text_config=text, vision_config=IMAGES, **MARKS)
    model = Glm4vMoeForConditionalGeneration(config).float().eval()
    for layer in model.model.language_model.layers:
        layer.mlp.gate.e_score_correction_bias.normal_(std=0.3)
    model.save_pretrained(folder)
    return model


def minimax_model(folder: Path) -> Any:
    """Writes a tiny MiniMax-M2 in float32: sigmoid scores with a bias, norms of queries and keys over all heads."""
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    torch.manual_seed(6)
    sizes = {name: size for name, size in SIZES.items() if name not in ("norm_topk_prob", "num_experts")}
    sizes |= {"num_local_experts": 8, "intermediate_size": 64, "bos_token_id": 0, "eos_token_id": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    # SGLang asks for these, which transformers takes for granted.
    named = {
        "use_qk_norm": True,
        "rotary_dim": SIZES["head_dim"] // 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    }
    config = MiniMaxM2Config(**sizes, **named, num_hidden_layers=2, rope_parameters=rope)
    model = MiniMaxM2ForCausalLM(config).float().eval()
    for layer in model.model.layers:
        layer.mlp.e_score_correction_bias.normal_(std=0.3)
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return model


def gpt_oss_model(folder: Path) -> Any:
    """Writes a tiny gpt-oss whose experts are MXFP4. Returns the model with their numbers, in float32."""
    from safetensors.torch import save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(7)
    names = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"
    sizes = {name: SIZES[name] for name in names}
    sizes |= {"num_local_experts": SIZES["num_experts"], "num_experts_per_tok": 4, "initializer_range": 0.05}
    config = GptOssConfig(**sizes, num_hidden_layers=2)
    model = GptOssForCausalLM(config).bfloat16().float().eval()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for each in (layer.self_attn.sinks, layer.mlp.router.bias, experts.gate_up_proj_bias, experts.down_proj_bias):
            each.data.copy_(torch.randn(each.shape).bfloat16() / 8)
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items() if not name.endswith("_proj")}
    for number, layer in enumerate(model.model.layers):
        for name in ("gate_up_proj", "down_proj"):
            matrix = getattr(layer.mlp.experts, name).data
            experts, cols, rows = matrix.shape
            codes = torch.randint(0, 256, (experts, rows, cols // 2), dtype=torch.uint8)
            scales = torch.randint(118, 122, (experts, rows, cols // 32), dtype=torch.uint8)
            matrix.copy_(mxfp4_numbers(codes, scales).transpose(1, 2))
            prefix = f"model.layers.{number}.mlp.experts.{name}_"
            tensors |= {prefix + "blocks": codes.unflatten(2, (-1, 16)), prefix + "scales": scales}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    packing = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": plain}}
    written = config.to_dict() | {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", "swiglu_limit": 7.0}
    (folder / "config.json").write_text(json.dumps(written | packing))
    return model


def gemma4_model(folder: Path) -> Any:
    """Writes a tiny Gemma 4 in float32: experts of GELU beside a dense block, a router with a scale for each expert."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    torch.manual_seed(4)
    sizes = {name: size for name, size in SIZES.items() if name not in ("norm_topk_prob", "num_experts_per_tok")}
    sizes |= {"global_head_dim": 32, "num_global_key_value_heads": 2, "hidden_size_per_layer_input": 0}
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    experts = {"enable_moe_block": True, "top_k_experts": 2, "moe_intermediate_size": 48}
    config = Gemma4TextConfig(**sizes, **layers, **experts)
    model = Gemma4ForCausalLM(config).float().eval()
    model.model.embed_tokens.weight.data *= 0.1  # tied to the head, they would repeat each token
    for layer in model.model.layers:
        layer.router.per_expert_scale.data.uniform_(0.5, 2.0)
    model.save_pretrained(folder)
    return model


def int4(dialect: str, codes: torch.Tensor, scales: torch.Tensor) -> Stored:
    """One matrix [rows, cols] of codes 1 to 15 around 8, scales [rows, cols / GROUP], as a packer stores it."""
    if dialect == "pack_quantized":
        shape = torch.tensor(codes.shape)
        return {"weight_packed": words(codes), "weight_scale": scales.bfloat16(), "weight_shape": shape}
    eights = torch.full((scales.shape[1], scales.shape[0]), 8)
    if dialect == "gptq":
        index = torch.arange(codes.shape[1], dtype=torch.int32) // GROUP
        return {"qweight": words(codes).T, "scales": scales.T.half(), "qzeros": words(eights - 1), "g_idx": index}
    # Every code and zero point one less: the same numbers around another zero.
    return {"qweight": awq_words(codes - 1), "scales": scales.T.half(), "qzeros": awq_words(eights.T - 1)}


def nvfp4(matrix: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors divides by the second scale, 64 here."""
    groups = matrix.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2, keepdim=True) / 6).log2().ceil().exp2()
    nearest = ((groups / scales).abs()[..., None] - E2M1[:8]).abs().argmin(-1)
    codes = (nearest + 8 * (groups < 0)).flatten(1)
    stored = {"weight_packed": two_a_byte(codes), "weight_global_scale": torch.tensor([64.0])}
    stored |= {"weight_scale": (64 * scales[..., 0]).to(torch.float8_e4m3fn)}
    return stored, (E2M1[nearest] * groups.sign() * scales).flatten(1)


def fp8_block(matrix: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """One scale per 128 x 128 block, as DeepSeek-V3 has them; powers of two, so that bf16 holds the products."""
    tiles = matrix.unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
    scales = (tiles.abs().amax((1, 3), keepdim=True) / 448).log2().ceil().exp2()
    codes = (tiles / scales).to(torch.float8_e4m3fn)
    stored = {"weight": codes.view(matrix.shape), "weight_scale_inv": scales[:, 0, :, 0]}
    return stored, (codes.float() * scales).view(matrix.shape)


def packed(dialect: str, matrix: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """What a packer stores of [rows, cols], and the numbers that this stands for; scales are powers of two."""
    if dialect == "online":  # numbers that one scale, of the largest, loses nothing of
        scale = (matrix.abs().max() / 448).log2().ceil().exp2()
        codes = (matrix / scale).to(torch.float8_e4m3fn).float()
        numbers = scale * torch.where(codes.abs() == codes.abs().max(), 448 * codes.sign(), codes)
        return {"weight": numbers.bfloat16()}, numbers
    if dialect in ("nvfp4_packed", "fp8_block"):
        return nvfp4(matrix) if dialect == "nvfp4_packed" else fp8_block(matrix)
    if dialect == "modelopt_fp8":
        scale = (matrix.abs().max() / 448).log2().ceil().exp2()
        data = (matrix / scale).to(torch.float8_e4m3fn)
        return {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(1 / 64)}, data.float() * scale
    if dialect == "float_channel":
        scale = (matrix.abs().amax(1, keepdim=True) / 448).log2().ceil().exp2()
        data = (matrix / scale).to(torch.float8_e4m3fn)
        return {"weight": data, "weight_scale": scale.bfloat16()}, data.float() * scale
    groups = matrix.unflatten(1, (-1, GROUP))
    scales = (groups.abs().amax(2) / 7).log2().ceil().exp2()
    codes = (groups / scales[..., None]).round()
    return int4(dialect, (codes + 8).flatten(1).int(), scales), (codes * scales[..., None]).flatten(1)


def quantization(dialect: str) -> dict[str, Any]:
    """The quantization_config of a model whose attention and routers stay as they are."""
    if dialect == "fp8_block":
        plain = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate"]
        ignored = [f"model.layers.{i}.{name}" for i in range(2) for name in plain]
        fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
        return fp8 | {"ignored_layers": ignored}
    if dialect == "modelopt_fp8":
        plain = ["*self_attn*", "*mlp.gate", "lm_head"]
        return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": plain}
    if dialect == "gptq":
        return QUANT[dialect] | {"dynamic": {"-:.*self_attn.*": {}, "-:.*mlp.gate$": {}}, "lm_head": False}
    if dialect == "awq":
        return QUANT[dialect] | {"modules_to_not_convert": ["self_attn", "mlp.gate"]}
    groups = json.loads(json.dumps(QUANT[dialect]))
    if dialect == "float_channel":
        tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        groups["config_groups"]["group_0"]["input_activations"] = tokens
    return groups | {"quantization_status": "compressed"}


def packed_model(folder: Path, dialect: str, seed: int) -> Any:
    """Writes a tiny Qwen3-MoE whose experts alone are packed, or, "online", may be by an engine. Returns the model with
    their numbers, in float32."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 2, "moe_intermediate_size": 256, "initializer_range": 0.05})
    model = Qwen3MoeForCausalLM(config).bfloat16().float().eval()
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items() if ".experts." not in name}
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for matrices, names in ((experts.gate_up_proj, ("gate", "up")), (experts.down_proj, ("down",))):
            for expert in range(config.num_experts):
                for name, part in zip(names, matrices.data[expert].chunk(len(names)), strict=True):
                    stored, numbers = packed(dialect, part)
                    part.copy_(numbers)
                    prefix = f"model.layers.{number}.mlp.experts.{expert}.{name}_proj."
                    tensors |= {prefix + suffix: tensor.contiguous() for suffix, tensor in stored.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    written = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
    packing = {} if dialect == "online" else {"quantization_config": quantization(dialect)}
    (folder / "config.json").write_text(json.dumps(written | packing))
    return model


def add_tokenizer(folder: Path) -> None:
    """Token i is the word "i": what a server needs to answer in text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(512)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="1").save_pretrained(folder)


def by_transformers(model: Any, prompts: Prompts = PROMPTS) -> tuple[list[list[int]], float]:
    """Greedy tokens, and by how much of the logits' deviation the best one led the next where it led by least."""
    settings = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    want, lead = [], 1.0
    for ids, added in prompts:
        found = model.generate(torch.tensor([ids]), max_new_tokens=added, **settings)
        want.append(found.sequences[0, len(ids) :].tolist())
        logits = torch.stack(found.logits)[:, 0]
        best = logits.topk(2).values
        lead = min(lead, float(((best[:, 0] - best[:, 1]) / logits.std(-1)).min()))
    return want, lead


def experts_by_transformers(folder: Path, tokens: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """What each token but the last chooses in each layer, by prompts: (layer, *experts), ascending."""
    from transformers import AutoModelForCausalLM

    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").float().eval(), []
    for (ids, _), added in zip(PROMPTS, tokens, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids + added[:-1]]), output_router_logits=True).router_logits
        chosen = [each.topk(model.config.num_experts_per_tok).indices.sort().values.tolist() for each in logits]
        found.append([(layer, *row) for rows in zip(*chosen, strict=True) for layer, row in enumerate(rows)])
    return found


def retrained(start: Path, folders: Sequence[Path]) -> list[tuple[Path, list[list[int]]]]:
    """Writes what a training run makes of a model, each time to another folder. Returns these, each with the tokens
    that transformers gives with it."""
    from transformers import AutoModelForCausalLM

    found = []
    for step, folder in enumerate(folders):
        model = AutoModelForCausalLM.from_pretrained(start).float().eval()
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += torch.randn(parameter.shape, generator=generator) * 0.15 * parameter.std()
        model.save_pretrained(folder)
        want, lead = by_transformers(model)
        assert lead > 1e-4  # float32 on both sides, sums in another order
        found.append((folder, want))
    assert len({str(want) for _, want in found}) == len(folders)
    return found


def adapted(start: Path, folder: Path) -> list[list[int]]:
    """Writes a LoRA adapter of a Qwen3-MoE's attention. Returns the tokens that transformers gives with it merged."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM

    model, stored = Qwen3MoeForCausalLM.from_pretrained(start).float().eval(), Stored()
    generator, rank, alpha, targets = torch.Generator().manual_seed(7), 8, 16, ["q_proj", "v_proj"]
    for number, layer in enumerate(model.model.layers):
        for name in targets:
            weight = getattr(layer.self_attn, name).weight.data
            first, second = (
                torch.randn(shape, generator=generator) * 0.1
                for shape in ((rank, weight.shape[1]), (weight.shape[0], rank))
            )
            weight += alpha / rank * second @ first
            key = f"base_model.model.model.layers.{number}.self_attn.{name}"
            stored |= {f"{key}.lora_A.weight": first, f"{key}.lora_B.weight": second}
    folder.mkdir()
    save_file(stored, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    want, lead = by_transformers(model)
    assert lead > 1e-4  # float32 on both sides, sums in another order
    return want
