"""Other libraries' whole experts, measured in the same run as eprt's executors.

Each takes FlatTokens and returns [N, H] bf16 weighted sums, everything that the library does around its GEMMs included.
Each gets eprt's canonical weights of one rank's share and lays them out as its own users would.

- `transformers grouped_mm`: the experts block of a transformers model under `experts_implementation="grouped_mm"`.
- `vllm ...` (`vllm_experts.py`): vLLM's modular kernel over its own Triton experts, Marlin, CUTLASS, DeepGEMM, or
  OpenAI's triton_kernels, which its wheel includes.
- `deep_gemm mega` (`mega_moe.py`): DeepGEMM's one kernel for a whole layer, on one rank. nvcc compiles it for each
  number of tokens, so it is measured only by name.
- `flashinfer cutlass`: `cutlass_fused_moe` on bf16 weights. FlashInfer compiles it for more than 20 minutes unless
  flashinfer-jit-cache is installed, so it is measured only by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from eprt.config import ActivationKind, MoEConfig, WeightFormat
from eprt.conformance.oracle import relative_error
from eprt.errors import EprtError
from eprt.experts.reference import decode_matrix, expert_forward
from eprt.placement import ExpertShard
from eprt.support import Device, Requirement, Support, refuse
from eprt.tokens import FlatTokens
from eprt.weights import ExpertWeights

from .direct import Call, Make, dense
from .mega_moe import mega_moe
from .vllm_experts import cutlass, deep_gemm, marlin, triton, triton_kernels

# Relative norm against the reference: activations in bf16; in FP8; MXFP4 weights times activations in bf16 or FP8.
BOUNDS: dict[WeightFormat, float] = {
    "bf16": 1.5e-2,
    "int4": 1.5e-2,
    "fp8_block": 6e-2,
    "fp8_channel": 6e-2,
    "mxfp4": 4e-2,
}
CHECKED_TOKENS = 8


@dataclass(frozen=True)
class ExpertsBaseline:
    """The experts of one library.

    Attributes:
        weights: number formats that it is given.
        named_only: left out unless asked for.
        kinds: only experts without biases, of these activations, SiLU as it is; empty: any experts.
    """

    make: Make
    requirement: Requirement
    weights: tuple[WeightFormat, ...]
    devices: tuple[str, ...] = ("cuda",)
    sm: tuple[int, int] = (80, 999)
    named_only: bool = False
    kinds: tuple[ActivationKind, ...] = ("swiglu",)

    def supports(self, config: MoEConfig, device: Device, named: bool) -> Support:
        """Says whether it can be measured on the device, and if not, why."""
        if config.weight_format not in self.weights:
            return refuse(f"takes {', '.join(self.weights)} weights, not {config.weight_format}")
        if device.kind not in self.devices or (device.kind == "cuda" and not self.sm[0] <= device.sm <= self.sm[1]):
            return refuse(f"runs on {', '.join(self.devices)} from sm{self.sm[0]} to sm{self.sm[1]}, not on {device}")
        activation = config.activation
        known = activation.kind in self.kinds and (activation.plain or activation.kind == "geglu")
        if self.kinds and (config.bias or not known):
            return refuse(f"measured with plain {', '.join(self.kinds)} and without biases only")
        if self.named_only and not named:
            return refuse("compiles for minutes where nobody has before: only by name, --libraries")
        return self.requirement.check()


def check_experts(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, tokens: FlatTokens, found: torch.Tensor
) -> None:
    """Raises EprtError unless what a library computed is what the reference computes, expert by expert in float32."""
    x, parts = tokens.hidden.data.float(), config.activation.parts
    expected = torch.zeros_like(x)
    for local in range(shard.num_local_experts):
        token, k = (tokens.ids == shard.first_expert + local).nonzero(as_tuple=True)
        if not token.numel():
            continue
        gate_up = decode_matrix(weights.gate_up.expert(local), parts).squeeze(0)
        down = decode_matrix(weights.down.expert(local), 1).squeeze(0)
        bias = [None if b is None else b[local] for b in (weights.gate_up_bias, weights.down_bias)]
        one = expert_forward(config, gate_up, down, bias[0], bias[1], x[token])
        expected.index_add_(0, token, tokens.weights[token, k, None].float() * one)
    error, bound = relative_error(found, expected), BOUNDS[config.weight_format]
    if not error <= bound:
        raise EprtError(f"its sums differ from the reference by {error:.3g} in norm: at most {bound:g}")


@contextmanager
def transformers_grouped(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Runs Qwen3-MoE's block under expert parallelism: pairs of other ranks name no expert, at weight 0."""
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
            ids = tokens.ids.long() - shard.first_expert
            ids = torch.where((ids >= 0) & (ids < nobody), ids, nobody)
            scales = tokens.weights.masked_fill(ids == nobody, 0.0).to(torch.bfloat16)
            return block(tokens.hidden.data, ids, scales)

        return call

    with torch.no_grad():
        yield call_for


@contextmanager
def flashinfer_cutlass(
    config: MoEConfig, shard: ExpertShard, weights: ExpertWeights, device: torch.device
) -> Iterator[Callable[[FlatTokens], Call]]:
    """Runs `cutlass_fused_moe`, which takes the rows of up before those of gate."""
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


_VLLM = Requirement("vllm", ("vllm",), "0.26")
EXPERTS: dict[str, ExpertsBaseline] = {
    "transformers grouped_mm": ExpertsBaseline(
        transformers_grouped,
        Requirement("transformers", ("transformers",), "5.17"),
        ("bf16",),
        devices=("cpu", "cuda"),
    ),
    "vllm triton": ExpertsBaseline(
        triton, _VLLM, ("bf16", "fp8_block", "fp8_channel"), kinds=("swiglu", "geglu", "relu2")
    ),
    "vllm cutlass": ExpertsBaseline(cutlass, _VLLM, ("fp8_channel",), sm=(90, 999)),
    "vllm deep_gemm": ExpertsBaseline(deep_gemm, _VLLM, ("fp8_block",), sm=(90, 999)),
    "vllm triton_kernels": ExpertsBaseline(triton_kernels, _VLLM, ("mxfp4",), sm=(90, 999), kinds=()),
    "vllm marlin": ExpertsBaseline(marlin, _VLLM, ("mxfp4", "int4"), kinds=()),
    "deep_gemm mega": ExpertsBaseline(
        mega_moe,
        Requirement("deep_gemm", ("sgl-deep-gemm",), "0.1.5"),
        ("fp8_block",),
        sm=(90, 90),
        named_only=True,
    ),
    "flashinfer cutlass": ExpertsBaseline(
        flashinfer_cutlass,
        Requirement("flashinfer", ("flashinfer-python",), "0.6.18"),
        ("bf16",),
        sm=(90, 90),
        named_only=True,
    ),
}
