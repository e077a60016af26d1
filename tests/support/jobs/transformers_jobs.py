"""Job of test_transformers.py. Ranks import neither pytest nor transformers here, so they start fast."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from eprt.config import RuntimeConfig
from eprt.conformance.oracle import relative_error
from eprt.models import build_layer, load_layer
from eprt.ranks.process import RankContext

# float32: both sides sum in float32, in another order; 1e-5 is about 100 ulp, far under any wrong weight or id.
# bfloat16: activations round to 8 bits between the same steps in both, and each rank's share rounds once more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
PATHS = tuple(
    (dispatcher, executor, token_format)
    for dispatcher, token_format in (("none", "flat"), ("torch", "flat"), ("torch", "expert_major"))
    for executor in ("torch_grouped", "reference")
)
Found = tuple[str, float, float]  # what, error, tolerance


@dataclass(frozen=True)
class Sample:
    """A saved model's MoE layer, each data-parallel rank's tokens, and what transformers' module made of them.

    `distinct` blocks go every path in every world; of the others' layers only routing, names and sizes differ, so they
    take turns: one path in one world, every path over the worlds.
    """

    name: str
    distinct: bool
    dtype: torch.dtype
    folder: str
    layer: int
    inputs: list[tuple[torch.Tensor, torch.Tensor]]
    expected: list[torch.Tensor]


def compare_blocks(
    context: RankContext, samples: list[Sample], moe_tp: int, attention_tp: int, turn: int
) -> list[Found]:
    """Every sample on its paths in one world. `turn`: the world's number."""
    world = context.world(attention_tp_size=attention_tp, moe_tp_size=moe_tp)
    found = []
    for number, sample in enumerate(samples):
        x, ids = sample.inputs[world.dp_rank]
        parts = load_layer(sample.folder, sample.layer, world.parallel, world.rank)
        for dispatcher, executor, token_format in PATHS if sample.distinct else [PATHS[(number + turn) % len(PATHS)]]:
            runtime = RuntimeConfig(dispatcher=dispatcher, executor=executor, token_format=token_format)
            layer = build_layer(parts, world, runtime)
            output = layer(x, token_ids=ids)
            layer.close()
            what = f"{sample.name} {sample.dtype} {dispatcher}/{executor}/{token_format} rank {world.rank}"
            error = relative_error(output, sample.expected[world.dp_rank])
            found.append((what, error if output.dtype == sample.dtype else math.inf, TOLERANCE[sample.dtype]))
    return found
