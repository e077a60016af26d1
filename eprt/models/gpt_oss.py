"""gpt-oss: top-k-then-softmax routing, biases, clamped SwiGLU with alpha; MXFP4 blocks or bf16.

Both formats interleave the rows of gate and up (g0, u0, g1, u1, ...). MXFP4 stores `[E, out, in/32, 16]` bytes, a
block of 32 values in 16, and bf16 the transposed `[E, in, out]`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from eprt.config import Activation, MoEConfig, Routing
from eprt.errors import ConfigError
from eprt.models.base import FieldFamily
from eprt.models.checkpoint import Checkpoint
from eprt.models.fields import FORMATS, Field, Part
from eprt.models.formats import Extent, Location, MatrixReader, split_alternating
from eprt.models.hf_config import real
from eprt.placement import ExpertShard
from eprt.weights import MX_BLOCK, PLAIN, ExpertWeights


class GptOss(FieldFamily):
    """openai/gpt-oss-20b, -120b."""

    routers = ("router",)
    returns_scores = True

    top_k = ("num_experts_per_tok", "experts_per_token")
    intermediate_size = ("intermediate_size",)
    bias = True
    fixed_routing = Routing("topk_softmax")

    def activation(self, hf: dict[str, Any]) -> Activation:
        # The hub's configs give the limit but not alpha, which is a constant of the published model code.
        alpha, limit = real(hf, "swiglu_alpha", default=1.702), real(hf, "swiglu_limit", default=7.0)
        return Activation(alpha=alpha, beta=1.0, limit=limit)

    def load_experts(self, checkpoint: Checkpoint, layer: int, config: MoEConfig, shard: ExpertShard) -> ExpertWeights:
        if config.weight_format not in ("mxfp4", "bf16", "f32"):
            raise ConfigError(f"gpt-oss experts in {config.weight_format} are not supported: expected mxfp4 or bf16")
        prefix, E = f"{self.block(checkpoint, layer)}.experts", config.num_experts
        H, I = config.hidden_size, config.intermediate_size
        width = shard.slice_intermediate(I)
        both = slice(2 * width.start, 2 * width.stop)  # rows of gate and up alternate, so this rank's are one range

        def bias(name: str, size: int, take: slice) -> torch.Tensor:
            rows = [
                checkpoint.read(f"{prefix}.{name}", (e, take), shape=(E, size), dtypes=PLAIN) for e in shard.experts
            ]
            return torch.stack(rows)

        locate = partial(_locate, prefix)
        reader = MatrixReader(checkpoint, FORMATS[config.weight_format], locate, shard.experts, E)
        weights = ExpertWeights(
            reader.read(("up",), Extent((2 * I, H), both, slice(0, H))),
            reader.read(("down",), Extent((H, I), slice(0, H), width)),
            split_alternating(bias("gate_up_proj_bias", 2 * I, both), dim=1),
            bias("down_proj_bias", H, slice(None)),
        )
        weights.check(config, shard)
        return weights


def _locate(prefix: str, expert: int, part: Part, field: Field) -> list[Location]:
    """Returns the only place of a field. Part "up" is gate and up, whose rows alternate."""
    down = part == "down"
    name = f"{prefix}.{'down' if down else 'gate_up'}_proj"
    place = Location(name, expert, alternating=not down)
    if field.name == "data":
        return [replace(place, transposed=True)]
    ending, group = ("_blocks", MX_BLOCK // 2) if field.name == "codes" else ("_scales", 0)
    return [replace(place, name=name + ending, group=group)]
