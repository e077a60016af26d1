"""What tests/gpu runs on whole layers, as data: held to the plan by test_gpu_layers_on_gloo.py, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.cases import CONFIGS
from eprt.dispatch import DISPATCHERS
from eprt.errors import UnsupportedError
from eprt.models import family_for
from eprt.placement import EMPTY
from eprt.plan import make_plan
from eprt.support import Device
from support.cases.model_recipes import RECIPES, make_config
from support.cases.packed_checkpoints import FAMILIES, QUANT, resized
from support.jobs.checkpoint_jobs import COST

ROWS = 32  # capacity, and what a graph is captured at
ROUNDS = [[ROWS] * 4, [3, 0, ROWS, 1], [0] * 4, [0, 7, 0, 0]]  # each rank's tokens, replay after replay
# Not multiples of humming's and cutlass's tiles of 128, nor of FP8's blocks. The layers of the graphs and of the tiny
# gpt-oss have one size, so their kernels are compiled once.
HIDDEN, INTERMEDIATE = 256, 192
PACKED_SIZES = {"hidden_size": 256, "moe_latent_size": 128, "moe_intermediate_size": 192, "num_experts_per_tok": 4}
PACKED_SIZES |= dict.fromkeys(("num_experts", "n_routed_experts"), 16)
PACKED_SIZES |= dict.fromkeys(("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 160)


@dataclass(frozen=True)
class GpuCase:
    name: str
    config: MoEConfig
    runtime: RuntimeConfig

    def refusal(self, device: Device, world_size: int = 4) -> str:
        """Why the plan turns it down, or nothing."""
        try:
            make_plan(self.config, ParallelConfig(world_size), self.runtime, device)
        except UnsupportedError as error:
            return str(error)
        return ""


def graph_layer(weight_format: str) -> MoEConfig:
    """gpt-oss's layer: biases and a clamped activation, which betray a wrong order of gate and up."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE}
    return replace(CONFIGS["gpt_oss"], weight_format=weight_format, **sizes)


def _graph_cases() -> list[GpuCase]:
    """Whole layers in CUDA graphs: every dispatcher that can be captured with every Hopper executor. A format that
    only the weights differ in is tried behind one dispatcher: test_checkpoints.py has the others."""
    everywhere = [("humming", "mxfp4"), ("cutlass_mxfp4", "mxfp4"), ("torch_grouped", "mxfp4")]
    everywhere += [("triton_grouped", form) for form in ("bf16", "fp8_block", "mxfp4")]
    once = [("humming", "nvfp4"), ("humming", "fp8_block")]
    return [
        GpuCase(
            f"{dispatcher}-{executor}-{form}",
            graph_layer(form),
            RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=ROWS),
        )
        for dispatcher, spec in DISPATCHERS.items()
        if spec.graph_safe
        for executor, form in everywhere + (once if dispatcher == "symm" else [])
    ]


GRAPHS = _graph_cases()


def turned_placements(num_experts: int, ranks: int) -> list[tuple[int, ...]]:
    """Slots of four placements, two a rank more than experts need: replicas of the first and the last expert, an empty
    slot, all of it turned round and mixed, so that every round moves most experts between ranks."""
    spare = -(-num_experts // ranks) * ranks + 2 * ranks - num_experts
    base = [*range(num_experts), *([0, num_experts - 1, EMPTY] * spare)[:spare]]
    mixed = [base[(7 * slot) % len(base)] if len(base) % 7 else base[-1 - slot] for slot in range(len(base))]
    return [tuple(base), tuple(reversed(base)), tuple(mixed), tuple(base[1:] + base[:1])]


def packed_case(family: str, dispatcher: str, payload: str | None) -> GpuCase:
    """A ModelOpt NVFP4 checkpoint's layer through humming."""
    recipe = resized(RECIPES[FAMILIES[family]], PACKED_SIZES)
    hf = make_config(recipe).to_dict() | {"dtype": "bfloat16", "quantization_config": QUANT["nvfp4"]}
    config = family_for(hf).moe_config(hf, recipe.layer)
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="humming", max_tokens_per_rank=ROWS, payload=payload)
    return GpuCase(f"{family}-{dispatcher}-{payload}", config, runtime)


PACKED = list(product(FAMILIES, DISPATCHERS, (None, *COST)))
