"""Whole tiny models in their published MXFP4 formats, each beside the same model with its experts written out in bf16.

`folder/published` is what eprt reads, `folder/plain` what transformers reads by itself. E2M1 times a power of two is
exact in bf16, so both hold the same numbers; which those are is known without eprt's decoders.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.models.checkpoint import CONFIG, SINGLE
from support.cases.model_recipes import RECIPES
from support.cases.packed_checkpoints import mxfp4_numbers

_GPT_OSS_EXPERTS = re.compile(r"(.*experts\.(?:gate_up|down)_proj)_(blocks|scales)$")
_V4_EXPERT = re.compile(r".*\.ffn\.experts\.\d+\.w[123]\.weight$")
_V4_SHARED = re.compile(r".*\.ffn\.shared_experts\.w[123]\.weight$")


def gpt_oss(folder: Path, hidden: int, intermediate: int) -> None:
    published = write_tiny_checkpoint(folder / "published", hidden_size=hidden, intermediate_size=intermediate)
    held, tensors = {}, {}
    for file in published.glob("*.safetensors"):
        held |= load_file(file)
    for name, tensor in held.items():
        packed = _GPT_OSS_EXPERTS.match(name)
        if packed is None:
            tensors[name] = tensor
        elif packed[2] == "blocks":
            numbers = mxfp4_numbers(tensor.flatten(-2), held[f"{packed[1]}_scales"])
            tensors[packed[1]] = numbers.transpose(1, 2).bfloat16().contiguous()
    config = json.loads((published / CONFIG).read_text())
    del config["quantization_config"]
    (folder / "plain").mkdir()
    (folder / "plain" / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / "plain" / SINGLE, metadata={"format": "pt"})


def deepseek_v4(folder: Path, hidden: int, intermediate: int) -> None:
    """One layer routed by the token-id table, one by scores; routed experts in MXFP4, the shared one in block FP8."""
    import transformers

    sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "num_experts_per_tok": 4}
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**RECIPES["deepseek_v4"].fields | sizes)
    transformers.DeepseekV4ForCausalLM(config).bfloat16().save_pretrained(folder / "plain")
    plain, published = load_file(folder / "plain" / SINGLE), {}
    for name, tensor in sorted(plain.items()):
        if name.endswith("tid2eid"):
            plain[name] = torch.rand(len(tensor), config.n_routed_experts).argsort(dim=1)[:, : tensor.shape[1]]
        elif ".ffn." in name:
            plain[name] = (torch.randn(tensor.shape) * tensor.shape[-1] ** -0.5).to(tensor.dtype)
        stored = {name: plain[name].contiguous()}
        rows, cols = tensor.shape if tensor.dim() == 2 else (0, 0)
        if _V4_EXPERT.match(name):
            codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
            scales = torch.randint(120, 123, (rows, cols // 32), dtype=torch.uint8)
            plain[name] = mxfp4_numbers(codes, scales).bfloat16()
            stored = {name: codes.view(torch.int8), _scale(name): scales.view(torch.float8_e8m0fnu)}
        elif _V4_SHARED.match(name):
            data, scale = (plain[name].float() * 64).to(torch.float8_e4m3fn), torch.full(_grid(rows, cols), 121)
            plain[name] = (data.float() / 64).bfloat16()
            stored = {name: data, _scale(name): scale.to(torch.uint8).view(torch.float8_e8m0fnu)}
        published |= stored
    save_file({name: t.contiguous() for name, t in plain.items()}, folder / "plain" / SINGLE, metadata={"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp4"}
    settings = json.loads((folder / "plain" / CONFIG).read_text()) | {"quantization_config": said}
    (folder / "published").mkdir()
    (folder / "published" / CONFIG).write_text(json.dumps(settings))
    save_file(published, folder / "published" / SINGLE)


def _scale(name: str) -> str:
    return name.removesuffix("weight") + "scale"


def _grid(rows: int, cols: int) -> tuple[int, int]:
    return -(-rows // 128), -(-cols // 128)


WRITERS = {"gpt_oss": gpt_oss, "deepseek_v4": deepseek_v4}
