"""Whole tiny models in their published MXFP4 formats, each beside the same model with its experts written out in bf16.

`folder/published` is what eprt reads, `folder/plain` what transformers reads by itself. E2M1 times a power of two is
exact in bf16, so both hold the same numbers; which those are is known without eprt's decoders.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eprt.conformance.tiny_model import write_tiny_checkpoint
from eprt.models.checkpoint import CONFIG, SINGLE
from support.cases.model_recipes import RECIPES, make_model
from support.cases.number_formats import mxfp4_numbers
from support.cases.packed_checkpoints import pack, resized

_GPT_OSS_EXPERTS = re.compile(r"(.*experts\.(?:gate_up|down)_proj)_(blocks|scales)$")


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
    sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate, "num_experts_per_tok": 4}
    make_model(resized(RECIPES["deepseek_v4"], sizes), torch.bfloat16).save_pretrained(folder / "bf16")
    pack(folder / "bf16", folder / "published", "mxfp4", shared="fp8_block_e8m0", plain=folder / "plain")


def qwen3(dialect: str, folder: Path, hidden: int, intermediate: int) -> None:
    """One layer of two is a mixture of experts, in INT4 or FP8 of another packer; its scales aren't powers of two."""
    sizes = {"hidden_size": hidden, "moe_intermediate_size": intermediate}
    make_model(resized(RECIPES["qwen3_moe"], sizes), torch.bfloat16).save_pretrained(folder / "bf16")
    pack(folder / "bf16", folder / "published", dialect, plain=folder / "plain")


WRITERS = {"gpt_oss": gpt_oss, "deepseek_v4": deepseek_v4}
DIALECTS = {f"qwen3_moe_{name}": partial(qwen3, name) for name in ("pack_quantized", "float_channel", "gptq", "awq")}
