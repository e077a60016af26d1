"""Other libraries' whole experts, beside ours in the same run: FlatTokens in, [N, H] bf16 weighted sums out, everything
that the library does around its GEMMs included. Each gets eprt's canonical weights of one rank's share and lays them
out as its own users would.

- `transformers grouped_mm`: the experts block of a transformers model under `experts_implementation="grouped_mm"`.
- `vllm ...` (`eprt.bench.vllm_experts`): vLLM's modular kernel over its own Triton experts, Marlin, DeepGEMM, or
  OpenAI's triton_kernels that its wheel brings along.
- `flashinfer cutlass`: `cutlass_fused_moe` on bf16 weights. FlashInfer compiles it for more than 20 minutes unless
  flashinfer-jit-cache is installed, so only by name.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eprt.bench.expert_peers import Call
from eprt.config import MoEConfig, WeightFormat
from eprt.errors import EprtError
from eprt.experts.reference import decode_matrix, expert_forward
from eprt.placement import ExpertShard
from eprt.support import Device, Requirement, Support, refuse
from eprt.tokens import FlatTokens
from eprt.weights import Dense, ExpertWeights

Make = Callable[
    [MoEConfig, ExpertShard, ExpertWeights, torch.device], AbstractContextManager[Callable[[FlatTokens], Call]]
]
# Relative norm against the reference: activations in bf16; in FP8; MXFP4 weights times activations in bf16 or FP8.
BOUNDS: dict[WeightFormat, float] = {"bf16": 1.5e-2, "fp8_block": 6e-2, "mxfp4": 4e-2}
CHECKED_TOKENS = 8


@dataclass(frozen=True)
class OtherExperts:
    """One library's experts.

    Attributes:
        path: "module:function" of a `Make`.
        weights: number formats that it is given.
        named_only: left out unless asked for.
        plain: only SiLU-gated experts without biases.
    """

    path: str
    requirement: Requirement
    weights: tuple[WeightFormat, ...]
    devices: tuple[str, ...] = ("cuda",)
    sm: tuple[int, int] = (80, 999)
    named_only: bool = False
    plain: bool = True

    def supports(self, config: MoEConfig, device: Device, named: bool) -> Support:
        """Whether it can be measured there, and why not."""
        if config.weight_format not in self.weights:
            return refuse(f"takes {', '.join(self.weights)} weights, not {config.weight_format}")
        if device.kind not in self.devices or (device.kind == "cuda" and not self.sm[0] <= device.sm <= self.sm[1]):
            return refuse(f"runs on {', '.join(self.devices)} from sm{self.sm[0]} to sm{self.sm[1]}, not on {device}")
        if self.plain and (config.bias or not config.activation.gated or not config.activation.plain):
            return refuse("measured with SiLU-gated experts without biases only")
        if self.named_only and not named:
            return refuse("compiles for minutes where nobody has before: only by name, --libraries")
        return self.requirement.check()

    def make(
        self, config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
    ) -> AbstractContextManager[Callable[[FlatTokens], Call]]:
        """Its layout of these weights; inside, a call for tokens."""
        module, _, name = self.path.partition(":")
        make: Make = getattr(importlib.import_module(module), name)
        return make(config, shard, weights, device)


_VLLM = Requirement("vllm", ("vllm",), "0.26")
OTHERS: dict[str, OtherExperts] = {
    "transformers grouped_mm": OtherExperts(
        "eprt.bench.other_experts:transformers_grouped",
        Requirement("transformers", ("transformers",), "5.17"),
        ("bf16",),
        devices=("cpu", "cuda"),
    ),
    "vllm triton": OtherExperts("eprt.bench.vllm_experts:triton", _VLLM, ("bf16", "fp8_block")),
    "vllm deep_gemm": OtherExperts("eprt.bench.vllm_experts:deep_gemm", _VLLM, ("fp8_block",), sm=(90, 999)),
    "vllm triton_kernels": OtherExperts(
        "eprt.bench.vllm_experts:triton_kernels", _VLLM, ("mxfp4",), sm=(90, 999), plain=False
    ),
    "vllm marlin": OtherExperts("eprt.bench.vllm_experts:marlin", _VLLM, ("mxfp4",), sm=(80, 999), plain=False),
    "flashinfer cutlass": OtherExperts(
        "eprt.bench.other_experts:flashinfer_cutlass",
        Requirement("flashinfer", ("flashinfer-python",), "0.6.18"),
        ("bf16",),
        sm=(90, 90),
        named_only=True,
    ),
}


def check_other(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, tokens: FlatTokens, found: torch.Tensor
) -> None:
    """Raises EprtError unless what a library computed is what the reference computes, expert by expert in float32."""
    x, parts = tokens.hidden.data.float(), config.activation.parts
    expected = torch.zeros_like(x)
    for local in range(shard.num_local_experts):
        token, slot = (tokens.ids == shard.first_expert + local).nonzero(as_tuple=True)
        if not token.numel():
            continue
        gate_up, down = (
            decode_matrix(weights.gate_up.expert(local), parts),
            decode_matrix(weights.down.expert(local), 1),
        )
        bias = [None if b is None else b[local] for b in (weights.gate_up_bias, weights.down_bias)]
        one = expert_forward(config, gate_up.squeeze(0), down.squeeze(0), bias[0], bias[1], x[token])
        expected.index_add_(0, token, tokens.weights[token, slot, None].float() * one)
    off, size = (found.float() - expected).norm().item(), expected.norm().item()
    bound = BOUNDS[config.weight_format]
    if not off <= bound * size:
        raise EprtError(
            f"its sums differ from the reference by {off:.3g} in norm, of {size:.3g}: at most {bound:g} of it"
        )


def local_ids(tokens: FlatTokens, shard: ExpertShard, nobody: int) -> torch.Tensor:
    """[N, K] int64 ids counted from the shard's first expert; `nobody` for others'."""
    ids = tokens.ids.long() - shard.first_expert
    return torch.where((ids >= 0) & (ids < shard.num_local_experts), ids, nobody)


def dense(weights: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down in bf16."""
    if not isinstance(weights.gate_up, Dense) or not isinstance(weights.down, Dense):
        raise EprtError("this library is measured with bf16 weights")
    return weights.gate_up.data, weights.down.data


@contextmanager
def transformers_grouped(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Qwen3-MoE's block under expert parallelism: other ranks' slots name an expert that isn't there, at weight 0."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    gate_up, down = dense(weights)
    sizes: dict[str, Any] = {
        "num_experts": shard.num_local_experts,
        "hidden_size": config.hidden_size,
        "moe_intermediate_size": config.intermediate_size,
    }
    settings = Qwen3MoeConfig(**sizes)
    settings._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        block: Any = Qwen3MoeExperts(settings)
    block.gate_up_proj = torch.nn.Parameter(gate_up, requires_grad=False)
    block.down_proj = torch.nn.Parameter(down, requires_grad=False)
    block._is_expert_parallel = True  # as its own EP sets it

    def call_for(tokens: FlatTokens) -> Call:
        nobody = shard.num_local_experts

        def call() -> torch.Tensor:
            ids = local_ids(tokens, shard, nobody)
            scales = tokens.weights.masked_fill(ids == nobody, 0.0).to(torch.bfloat16)
            return block(tokens.hidden.data, ids, scales)

        return call

    with torch.no_grad():
        yield call_for


@contextmanager
def flashinfer_cutlass(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """The library wants up before gate."""
    from flashinfer.fused_moe import cutlass_fused_moe

    gate_up, down = dense(weights)
    up_gate = torch.cat(gate_up.chunk(2, dim=1)[::-1], dim=1)
    ranks, rank = config.num_experts // shard.num_local_experts, shard.first_expert // shard.num_local_experts

    def call_for(tokens: FlatTokens) -> Call:
        ids, scales, out = tokens.ids.contiguous(), tokens.weights.float(), torch.empty_like(tokens.hidden.data)

        def call() -> torch.Tensor:
            cutlass_fused_moe(
                tokens.hidden.data,
                ids,
                scales,
                up_gate,
                down,
                torch.bfloat16,
                [],
                output=out,
                ep_size=ranks,
                ep_rank=rank,
            )
            return out

        return call

    yield call_for
