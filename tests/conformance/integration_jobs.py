"""Jobs for test_integration.py: whole models, each rank with its own batch."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eprt.checkpoint import Checkpoint
from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.integrations.transformers import idle_step, parallelize
from eprt.quant.mxfp4 import decode_mxfp4

BATCHES = ((1, 5), (2, 3), None, (1, 9))  # (sequences, length) of each rank; None: an idle rank
VOCABULARY = 64


def dequantized_gpt_oss(directory: str) -> torch.nn.Module:
    """transformers' own float32 model with the MXFP4 experts of the checkpoint written out."""
    config = AutoConfig.from_pretrained(directory)
    del config.quantization_config
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with Checkpoint(directory) as files, torch.no_grad():
        state = model.state_dict()
        for name, target in state.items():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                codes, scales = files.read(f"{name}_blocks").flatten(-2), files.read(f"{name}_scales")
                target.copy_(decode_mxfp4(codes, scales).transpose(1, 2))
            elif "rotary" not in name:
                target.copy_(files.read(name))
    return model


def compare_logits(
    context, directory: str, dispatcher: str, executor: str, packed: bool, dtype: torch.dtype = torch.float32
) -> float:
    """Relative error of this rank's logits against the same model without expert parallelism."""
    world = context.world()
    torch.manual_seed(0)
    if packed:
        model = dequantized_gpt_oss(directory)
    else:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model = model.to(world.device, dtype)
    batch = BATCHES[world.rank]
    generator = torch.Generator().manual_seed(world.rank)
    ids = None if batch is None else torch.randint(3, VOCABULARY, batch, generator=generator).to(world.device)
    with torch.no_grad():
        expected = None if ids is None else model(ids).logits
        layers = parallelize(
            model,
            world,
            Path(directory),
            runtime=RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=64),
        )
        for layer in layers:
            if layer.router is not None:
                layer.router.to(dtype)
            if layer.shared is not None:
                layer.shared.to(dtype)
        if ids is None:
            idle_step(layers)
            return 0.0
        return relative_error(model(ids).logits, expected)
