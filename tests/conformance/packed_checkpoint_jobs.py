"""The job of test_packed_checkpoints.py: load a layer as every rank of a model would, and run it."""

from __future__ import annotations

import torch

from eprt.checkpoint import load_on_all_ranks
from eprt.config import RuntimeConfig
from eprt.models import build_layer, load_layer


def hidden_of(rank, width):
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randn(9 + 4 * rank, width, generator=generator).bfloat16()


def run_layer(context, folder, number, dispatcher, executor, payload=None):
    """This rank's output, its routing, and the scale of its payload."""
    world = context.world()
    parts = load_on_all_ranks(world, lambda: load_layer(folder, number, world.parallel, world.rank), layer=number)
    runtime = RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=32, payload=payload)
    layer = build_layer(parts, world, runtime, number)
    hidden = hidden_of(world.rank, parts.config.input_size)
    out, scale = layer(hidden), layer.dispatcher.payload_scale
    layer.close()
    return out, parts.router(hidden), None if scale is None else float(scale)
