"""Tiny checkpoints for the tests inside engines, and the tokens that transformers adds to prompts.

Models are in float32, where sums in another order choose the same tokens, or of a seed whose best token leads the next
by more than bf16's own differences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

# Uneven: another number of prompts, of tokens in them, and of tokens to add on each rank.
PROMPTS: list[tuple[list[int], int]] = [
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


def fp8_model(folder: Path, seed: int) -> Any:
    """Writes a tiny Qwen3-MoE with experts in FP8, one scale per 128 x 128 block. Returns it decoded, in float32."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**SIZES | {"num_hidden_layers": 2, "moe_intermediate_size": 256, "initializer_range": 0.05})
    model = Qwen3MoeForCausalLM(config).bfloat16().float().eval()
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items() if ".experts." not in name}
    for number, layer in enumerate(model.model.layers):
        experts = layer.mlp.experts
        for matrix, names in ((experts.gate_up_proj, ("gate", "up")), (experts.down_proj, ("down",))):
            codes, scales, matrix.data = fp8_blocks(matrix.data)
            for expert in range(config.num_experts):
                parts = zip(names, codes[expert].chunk(len(names)), scales[expert].chunk(len(names)), strict=True)
                for name, code, scale in parts:
                    prefix = f"model.layers.{number}.mlp.experts.{expert}.{name}_proj"
                    tensors |= {f"{prefix}.weight": code.contiguous(), f"{prefix}.weight_scale_inv": scale.contiguous()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # Engines have no FP8 linear layers on CPU; routers are in no FP8 checkpoint.
    plain = [f"self_attn.{name}_proj" for name in "qkvo"] + ["mlp.gate"]
    written = config.to_dict() | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "weight_block_size": [128, 128],
            "ignored_layers": [f"model.layers.{i}.{name}" for i in range(2) for name in plain],
        },
    }
    (folder / "config.json").write_text(json.dumps(written))
    return model


def fp8_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales (powers of two, so that bf16 holds the products), and the numbers that they stand for."""
    tiles = matrix.unflatten(-1, (-1, 128)).unflatten(-3, (-1, 128))  # [..., rows / 128, 128, cols / 128, 128]
    scales = (tiles.abs().amax((-3, -1)) / 448).log2().ceil().exp2()
    spread = scales[..., :, None, :, None]
    codes = (tiles / spread).to(torch.float8_e4m3fn)
    return (
        codes.flatten(-2).flatten(-3, -2),
        scales,
        (codes.float() * spread).flatten(-2).flatten(-3, -2),
    )


def add_tokenizer(folder: Path) -> None:
    """Token i is the word "i": what a server needs to answer in text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(i): i for i in range(512)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0", eos_token="1").save_pretrained(folder)


def by_transformers(model: Any) -> tuple[list[list[int]], float]:
    """Greedy tokens, and by how much of the logits' deviation the best one led the next where it led by least."""
    settings = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    want, lead = [], 1.0
    for ids, added in PROMPTS:
        found = model.generate(torch.tensor([ids]), max_new_tokens=added, **settings)
        want.append(found.sequences[0, len(ids) :].tolist())
        logits = torch.stack(found.logits)[:, 0]
        best = logits.topk(2).values
        lead = min(lead, float(((best[:, 0] - best[:, 1]) / logits.std(-1)).min()))
    return want, lead
