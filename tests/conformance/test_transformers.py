"""ExpertParallelMoE equals transformers' own MoE blocks on the same weights, however the world is cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from eprt.config import RuntimeConfig
from eprt.conformance.harness import RankContext, WorldPool
from eprt.conformance.oracle import relative_error
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.weights import Dense, ExpertWeights

pytest.importorskip("transformers", reason="the witness is transformers: pip install 'eprt[transformers]'")

from transformers_blocks import BLOCKS, VOCABULARY

# float32: both sides sum in float32, in another order; 1e-5 is about 100 ulp, far under any wrong weight or id.
# bfloat16: activations round to 8 bits between the same steps in both, and each rank's share rounds once more.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Layout:
    ep: int
    moe_tp: int = 1
    attention_tp: int = 1

    @property
    def world(self) -> int:
        return self.ep * self.moe_tp

    def __str__(self) -> str:
        return f"ep{self.ep}-moetp{self.moe_tp}-attntp{self.attention_tp}"


LAYOUTS = (
    Layout(1),
    Layout(2),
    Layout(4),
    Layout(1, 2),
    Layout(2, 2),
    Layout(4, 2),
    Layout(2, 1, 2),
    Layout(4, 1, 2),
    Layout(1, 2, 2),
    Layout(2, 2, 2),
    Layout(4, 2, 2),
)
PATHS = (("none", "flat"), ("torch", "flat"), ("torch", "expert_major"))


def _share(weights: ExpertWeights, config, shard) -> ExpertWeights:
    """This rank's experts, and of each its slice of the intermediate dimension."""
    mine = slice(shard.first_expert, shard.end_expert)
    width = shard.slice_intermediate(config.intermediate_size)
    parts = config.activation.parts

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        halves = tensor[mine].unflatten(1, (parts, config.intermediate_size))
        return halves[:, :, width].flatten(1, 2).contiguous()

    return ExpertWeights(
        Dense(rows(weights.gate_up.data)),
        Dense(weights.down.data[mine][:, :, width].contiguous()),
        None if weights.gate_up_bias is None else rows(weights.gate_up_bias),
        None if weights.down_bias is None else weights.down_bias[mine],
    )


def compare_blocks(context: RankContext, moe_tp: int, attention_tp: int) -> list[tuple[str, float, float]]:
    """Every block, dtype and path in one world: (what, error, tolerance)."""
    from transformers_blocks import BLOCKS

    world = context.world(attention_tp_size=attention_tp, moe_tp_size=moe_tp)
    found = []
    for name, build in BLOCKS.items():
        for dtype, tolerance in TOLERANCE.items():
            block = build(dtype)
            generator = torch.Generator().manual_seed(100 + world.dp_rank)
            tokens = [7, 0, 13, 1, 5, 2, 3, 4][world.dp_rank] if world.parallel.dp_size > 1 else 7
            x = torch.randn(tokens, block.config.input_size, generator=generator).to(dtype)
            ids = torch.randint(VOCABULARY, (tokens,), generator=generator)
            with torch.no_grad():
                expected = block.reference(x, ids) if tokens else x.clone()
            shard = ExpertPlacement(block.config.num_experts, world.parallel).shard(world.rank)
            for dispatcher, token_format in PATHS:
                for executor in ("torch_grouped", "reference"):
                    layer = ExpertParallelMoE(
                        block.config,
                        world,
                        _share(block.experts, block.config, shard),
                        runtime=RuntimeConfig(dispatcher=dispatcher, executor=executor, token_format=token_format),
                        router=block.router,
                        shared=block.shared,
                        latent=block.latent,
                    )
                    output = layer(x, token_ids=ids)
                    layer.close()
                    assert output.shape == x.shape
                    assert output.dtype == dtype
                    what = f"{name} {dtype} {dispatcher}/{executor}/{token_format} rank {world.rank}"
                    found.append((what, relative_error(output, expected), tolerance))
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layer_equals_transformers_block(layout: Layout, pools) -> None:
    pool: WorldPool = pools(layout.world)
    results = pool.run(compare_blocks, moe_tp=layout.moe_tp, attention_tp=layout.attention_tp, timeout_s=100.0)
    rows = [row for rank in results for row in rank]
    assert len(rows) == layout.world * len(BLOCKS) * len(TOLERANCE) * len(PATHS) * 2
    wrong = [f"{what}: {error:.2e} > {tolerance:.0e}" for what, error, tolerance in rows if not error <= tolerance]
    assert not wrong, "\n".join(wrong)
