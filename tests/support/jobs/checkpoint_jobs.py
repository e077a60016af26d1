"""Jobs that load a layer as every rank of a model would: refused, built, or run, and what came out judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eprt.config import ParallelConfig, PayloadFormat, RuntimeConfig
from eprt.conformance.cases import Batch
from eprt.conformance.oracle import expected_layer_output, relative_error
from eprt.experts.reference import decode_hidden
from eprt.models import LayerParts, build_layer, load_layer
from eprt.models.checkpoint import load_on_all_ranks
from eprt.quant import encode_payload
from eprt.ranks.launcher import RankContext
from eprt.tokens import TopK
from support.builders import BEHIND_S, caught, said

TOKENS = (9, 13, 0, 21)  # of each rank
BOUND = 2e-2  # bf16 tokens and outputs; the packed numbers themselves are exact
# What a payload may change in the layer's output, and the least it does (below: nothing was rounded). NVFP4:
# test_payload_scale.py says why 0.16; e4m3 keeps 3 bits of mantissa, which lose 0.026 in norm, twice in SwiGLU. A
# shared expert gets its tokens unpacked, so layers that have one change less.
COST: dict[PayloadFormat, tuple[float, float]] = {"nvfp4": (0.05, 0.16), "fp8_block": (0.012, 0.05)}


@dataclass(frozen=True)
class Written:
    """A checkpoint on disk: the layer to run, its numbers in float32 (all experts), the largest input scale."""

    layer: int
    known: LayerParts
    input_scale: float


@dataclass(frozen=True)
class Ran:
    """What one rank saw, on the CPU.

    Attributes:
        hidden, output: [T, H_model].
        sent: [T, H] what it dispatched: `hidden`, or that through the latent projection.
        topk: its routing.
        scale: the second-level scale of an nvfp4 payload, else None.
    """

    hidden: torch.Tensor
    output: torch.Tensor
    sent: torch.Tensor
    topk: TopK
    scale: torch.Tensor | None


def run_layer(context: RankContext, folder: str, number: int, runtime: RuntimeConfig) -> Ran:
    world = context.world(timeout_s=BEHIND_S)
    parts = load_on_all_ranks(world, lambda: load_layer(folder, number, world.parallel, world.rank), layer=number)
    layer = build_layer(parts, world, runtime)
    generator = torch.Generator().manual_seed(100 + world.rank)
    hidden = torch.randn(TOKENS[world.rank], parts.config.input_size, generator=generator).bfloat16()
    x = hidden.to(world.device)
    output, topk = layer(x).cpu(), layer.router(x)
    sent = x if layer.latent is None else layer.latent.into(x)
    scale = layer.dispatcher.payload_scale
    layer.close()
    topk = TopK(topk.ids.cpu(), topk.weights.cpu())
    return Ran(hidden, output, sent.cpu(), topk, None if scale is None else scale.cpu())


def errors(written: Written, ranks: Sequence[Ran], payload: PayloadFormat | None = None) -> tuple[float, float]:
    """Relative norm errors of all ranks' outputs against the oracle, which gets the same routing: on the tokens as the
    payload rounds them, and on the tokens as they were."""
    output = torch.cat([ran.output for ran in ranks])
    batches = [Batch(ran.hidden, ran.topk) for ran in ranks]
    plain = relative_error(output, torch.cat([expected_layer_output(written.known, batch) for batch in batches]))
    if payload is None:
        return plain, plain
    arrived = [decode_hidden(encode_payload(ran.sent, payload, ran.scale)) for ran in ranks]
    rounded = [expected_layer_output(written.known, *each) for each in zip(batches, arrived, strict=True)]
    return relative_error(output, torch.cat(rounded)), plain


def load(context: RankContext, directories: list[str]) -> tuple[str, str]:
    """Every rank loads from its own directory; the error's type and text, or what was loaded."""
    world, held = context.world(), list[LayerParts]()
    path = directories[context.rank]

    def read() -> LayerParts:
        return load_layer(path, 0, world.parallel, world.rank)

    told = caught(lambda: held.append(load_on_all_ranks(world, read, layer=0)))
    return ("loaded", str(held[0].shard.first_expert)) if held else told


def build(context: RankContext, directory: str, ranks: list[int | None], world_size: int) -> str:
    """A layer of the experts that were read for `ranks` of a world of `world_size`, None for nobody; the error, if
    there is one."""
    world, rank = context.world(), ranks[context.rank]
    parts = None if rank is None else load_layer(directory, 0, ParallelConfig(world_size), rank)
    return said(lambda: build_layer(parts, world).close())
