"""FlashInfer's CuteDSL grouped GEMMs for Hopper, run for real: bf16, fed by our own order of rows instead of the
library's CUDA C++ sort, against the float32 witness and timed beside torch_grouped and humming.

They are the Hopper members of the family that `experts/blackwell/cutedsl.py` calls on Blackwell (gather, tile maps,
gated rows in turns, fused finalize), and the only ones that a Hopper GPU can run.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass, replace

import pytest
import torch
from support.cases.expert_cases import RELU2, RUNTIME, SILU, make_config, make_flat, relative_error, rows_with_expert

from eprt.bench.experts import random_experts
from eprt.config import Activation, MoEConfig
from eprt.experts.blackwell.layouts import interleave_halves, swap_halves
from eprt.experts.humming import HummingExecutor
from eprt.experts.permute import group_by_expert
from eprt.experts.reference import ReferenceExecutor
from eprt.experts.sample_tokens import sample_ids
from eprt.experts.torch_grouped import GroupedExecutor
from eprt.placement import ExpertShard
from eprt.quant import decode
from eprt.timing import device_microseconds
from eprt.tokens import FlatTokens, Payload
from eprt.weights import Dense, ExpertWeights, Matrix

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
    pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="nvidia-cutlass-dsl isn't installed"),
]

CUDA = torch.device("cuda")
TILE = 128  # rows of a tile; every tile belongs to one expert
GATED_ROWS = 32  # rows of up, then of gate, that the Hopper kernel reads together (Blackwell's: 64)


@dataclass(frozen=True)
class Tiles:
    """What the kernels know of the routing: experts padded to whole tiles. Static sizes, nothing read by the host.

    Attributes:
        expert, limit: int32 [tiles], local expert of a tile and the end of its rows.
        slot: int32 [tiles * TILE], n * K + k of the slot in each row; rows past the limit are garbage.
        used: int32 [1], tiles that hold rows.
    """

    expert: torch.Tensor
    limit: torch.Tensor
    slot: torch.Tensor
    used: torch.Tensor


def make_tiles(ids: torch.Tensor, shard: ExpertShard) -> Tiles:
    order = group_by_expert(ids, shard.first_expert, shard.num_local_experts)
    counts = order.offsets.diff()
    tiles_of = (counts + TILE - 1) // TILE
    last = tiles_of.cumsum(0)
    first = last - tiles_of
    tiles = ids.numel() // TILE + shard.num_local_experts
    tile = torch.arange(tiles, device=ids.device)
    expert = torch.searchsorted(last, tile, right=True).clamp(max=shard.num_local_experts - 1)
    limit = torch.minimum((tile + 1) * TILE, first[expert] * TILE + counts[expert])
    place = order.place.flatten().long()
    owner = torch.searchsorted(order.offsets, place, right=True) - 1
    owner = owner.clamp(0, shard.num_local_experts - 1)
    row = first[owner] * TILE + place - order.offsets[owner]
    row = torch.where(place >= 0, row, tiles * TILE)
    slot = torch.zeros(tiles * TILE + 1, dtype=torch.int32, device=ids.device)
    slot[row] = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    return Tiles(expert.int(), limit.int(), slot[:-1], last[-1:].int())


class HopperCuteDsl:
    """Both GEMMs and the activation, weights applied and summed over K."""

    def __init__(self, config: MoEConfig, shard: ExpertShard, weights: ExpertWeights) -> None:
        from flashinfer.fused_moe.cute_dsl import (
            sm90_contiguous_gather_grouped_gemm_act_fusion as first,
        )
        from flashinfer.fused_moe.cute_dsl import (
            sm90_contiguous_grouped_gemm_finalize_fusion as second,
        )

        self.first = first.sm90_contiguous_gather_grouped_gemm_act_fusion
        self.second = second.sm90_contiguous_grouped_gemm_finalize_fusion
        gate_up = weights.gate_up.data.to(CUDA, torch.bfloat16)
        gated = config.activation.gated
        self.gate_up = interleave_halves(swap_halves(gate_up), GATED_ROWS) if gated else gate_up
        self.down = weights.down.data.to(CUDA, torch.bfloat16)
        self.shard = shard
        self.options: dict[str, float] = {"activation_type": 3 if gated else 6}
        if config.activation.limit is not None:
            act = config.activation
            self.options |= {"swiglu_alpha": act.alpha, "swiglu_beta": act.beta, "swiglu_limit": act.limit}

    def __call__(self, tokens: FlatTokens) -> torch.Tensor:
        return self.run(tokens, make_tiles(tokens.ids, self.shard))

    def run(self, tokens: FlatTokens, tiles: Tiles) -> torch.Tensor:
        x, K = tokens.hidden.data, tokens.ids.shape[1]
        h = self.first(
            x,
            self.gate_up,
            tiles.expert,
            tiles.limit,
            tiles.slot,
            tiles.used,
            topk=K,
            permuted_m=len(tiles.slot),
            tile_shape_mn=(TILE, 128),
            **self.options,
        )
        out = torch.zeros_like(x)
        return self.second(h, self.down, tiles.expert, tiles.limit, tiles.slot, tiles.used, tokens.weights, out, topk=K)


def on_gpu(flat: FlatTokens) -> FlatTokens:
    return FlatTokens(
        Payload.plain(flat.hidden.data.to(CUDA)), flat.ids.to(CUDA), flat.weights.to(CUDA), flat.num_experts
    )


def make_weights(config: MoEConfig, L: int, device: torch.device = CUDA) -> ExpertWeights:
    """Local experts alone; expert e is scaled by 1 + e / L, up by 1.5 against gate."""
    generator = torch.Generator(device).manual_seed(0)
    H, I, parts = config.hidden_size, config.intermediate_size, config.activation.parts
    number = 1 + torch.arange(L, device=device)[:, None, None] / L

    def draw(*shape: int) -> torch.Tensor:
        drawn = torch.randn(L, *shape, generator=generator, device=device) * shape[-1] ** -0.5
        return (drawn * number).to(torch.bfloat16)

    gate_up = draw(parts * I, H)
    gate_up[:, (parts - 1) * I :] *= 1.5
    return ExpertWeights(Dense(gate_up), Dense(draw(H, I)))


@pytest.mark.parametrize(
    "activation", [SILU, RELU2, Activation(alpha=1.702, beta=1.0, limit=7.0)], ids=["silu", "relu2", "gpt_oss"]
)
@pytest.mark.parametrize("rows", [1, 13, 700])
@pytest.mark.parametrize(("H", "I"), [(128, 64), (2880, 1856)])
def test_against_the_witness(H, I, rows, activation):
    config = make_config("bf16", num_experts=16, top_k=4, hidden_size=H, intermediate_size=I, activation=activation)
    shard = ExpertShard(16, 8, 8)
    weights = make_weights(config, 8)
    tokens = make_flat(config, rows + 1, dtype=torch.bfloat16)
    tokens = on_gpu(FlatTokens(Payload.plain(tokens.hidden.data.nan_to_num()), tokens.ids, tokens.weights, 16))
    local = rows_with_expert(tokens, shard)
    out = HopperCuteDsl(config, shard, weights)(tokens)
    expected = ReferenceExecutor(config, shard, weights, CUDA, RUNTIME)(tokens)
    assert not out[~local].any()
    assert not local.any() or relative_error(out[local], expected[local]) <= 1e-2


ROWS = (32, 512, 4096)
SHAPES = {
    "deepseek-v3": MoEConfig(256, 8, 7168, 2048, weight_format="bf16"),
    "qwen3.5-397b": MoEConfig(512, 10, 4096, 1024, weight_format="bf16"),
}


@functools.cache
def competitors(shape: str) -> tuple[HopperCuteDsl, GroupedExecutor, HummingExecutor]:
    """One of 8 ranks' shares, the same numbers in each: humming reads them as NVFP4, the others written out in bf16."""
    config = SHAPES[shape]
    L = config.num_experts // 8
    shard = ExpertShard(config.num_experts, L, L)
    packed = random_experts(replace(config, weight_format="nvfp4"), L, CUDA)
    plain = ExpertWeights(written_out(packed.gate_up, 2), written_out(packed.down, 1))
    runtime = replace(RUNTIME, token_format="flat")
    humming = HummingExecutor(replace(config, weight_format="nvfp4"), shard, packed, CUDA, runtime)
    humming.warmup(max(ROWS))
    return HopperCuteDsl(config, shard, plain), GroupedExecutor(config, shard, plain, CUDA, RUNTIME), humming


def written_out(matrix: Matrix, parts: int) -> Dense:
    return Dense(torch.cat([decode(matrix.expert(index), parts, torch.bfloat16) for index in range(matrix.shape[0])]))


@pytest.mark.timeout(600)  # humming compiles about 100 schedules of each matrix, the first time
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_times_beside_torch_grouped_and_humming(shape, rows, record_property):
    """Microseconds of graph replays go to the report (--junitxml); the results must agree."""
    config = SHAPES[shape]
    cute, grouped, humming = competitors(shape)
    hidden = torch.randn(rows, config.hidden_size, device=CUDA).to(torch.bfloat16)
    ids = sample_ids(rows, config.top_k, config.num_experts, CUDA)
    tokens = FlatTokens(Payload.plain(hidden), ids, torch.rand(ids.shape, device=CUDA) + 0.25, config.num_experts)
    local = rows_with_expert(tokens, cute.shard)
    expected = grouped(tokens)[local]
    assert relative_error(cute(tokens)[local], expected) <= 1e-2
    assert relative_error(humming(tokens)[local], expected) <= 1e-2
    tiles, out = make_tiles(ids, cute.shard), torch.empty_like(hidden)
    record_property("cutedsl_us", device_microseconds(lambda: cute(tokens)))
    record_property("cutedsl_kernels_us", device_microseconds(lambda: cute.run(tokens, tiles)))
    record_property("torch_grouped_us", device_microseconds(lambda: grouped(tokens, out)))
    record_property("humming_nvfp4_us", device_microseconds(lambda: humming(tokens, out)))
