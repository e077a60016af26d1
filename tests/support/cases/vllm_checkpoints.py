"""Tiny Qwen3-MoE checkpoints whose experts alone are packed, each beside the same model with its numbers in float32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support.cases.packed_int4 import AWQ, GROUP, QUANT, words

Stored = dict[str, torch.Tensor]


def int4(dialect: str, codes: torch.Tensor, scales: torch.Tensor) -> Stored:
    """One matrix [rows, cols] of codes 1 to 15 around 8, scales [rows, cols / GROUP], as a packer stores it."""
    if dialect == "pack_quantized":
        shape = torch.tensor(codes.shape)
        return {"weight_packed": words(codes), "weight_scale": scales.bfloat16(), "weight_shape": shape}
    eights = torch.full((scales.shape[1], scales.shape[0]), 8)
    if dialect == "gptq":
        index = torch.arange(codes.shape[1], dtype=torch.int32) // GROUP
        return {"qweight": words(codes).T, "scales": scales.T.half(), "qzeros": words(eights - 1), "g_idx": index}

    def outputs(nibbles: torch.Tensor) -> torch.Tensor:
        return words(nibbles.unflatten(-1, (-1, 8))[..., list(AWQ)].flatten(-2))

    # Every code and zero point one less: the same numbers around another zero.
    return {"qweight": outputs(codes.T - 1), "scales": scales.T.half(), "qzeros": outputs(eights - 1)}


E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def nvfp4(matrix: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """compressed-tensors divides by the second scale, 64 here."""
    groups = matrix.unflatten(1, (-1, 16))
    scales = (groups.abs().amax(2, keepdim=True) / 6).log2().ceil().exp2()
    nearest = ((groups / scales).abs()[..., None] - E2M1).abs().argmin(-1)
    codes = (nearest + 8 * (groups < 0)).flatten(1).to(torch.uint8)
    stored = {"weight_packed": codes[:, ::2] + 16 * codes[:, 1::2], "weight_global_scale": torch.tensor([64.0])}
    stored |= {"weight_scale": (64 * scales[..., 0]).to(torch.float8_e4m3fn)}
    return stored, (E2M1[nearest] * groups.sign() * scales).flatten(1)


def packed(dialect: str, matrix: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """What a packer stores of [rows, cols], and the numbers that this stands for; scales are powers of two."""
    if dialect == "nvfp4_packed":
        return nvfp4(matrix)
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
    if dialect == "gptq":
        return QUANT[dialect] | {"dynamic": {"-:.*self_attn.*": {}, "-:.*mlp.gate$": {}}, "lm_head": False}
    if dialect == "awq":
        return QUANT[dialect] | {"modules_to_not_convert": ["self_attn", "mlp.gate"]}
    groups = json.loads(json.dumps(QUANT[dialect]))
    if dialect == "float_channel":
        tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        groups["config_groups"]["group_0"]["input_activations"] = tokens
    return groups | {"quantization_status": "compressed"}


def packed_model(folder: Path | None, dialect: str, sizes: dict[str, Any], seed: int) -> Any:
    """The model in float32; its checkpoint goes to the folder, if there is one."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(**sizes | {"num_hidden_layers": 2, "moe_intermediate_size": 256, "initializer_range": 0.05})
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
    if folder is not None:
        folder.mkdir()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        written = config.to_dict() | {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"}
        (folder / "config.json").write_text(json.dumps(written | {"quantization_config": quantization(dialect)}))
    return model
