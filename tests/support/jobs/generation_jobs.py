"""What each rank runs for test_generation.py: prompts continued over the world, by three ways of loading a model."""

from __future__ import annotations

from typing import Any

import torch

from eprt.config import RuntimeConfig
from eprt.conformance.harness import RankContext
from support.cases.gpu_limits import BEHIND_S

RUNTIME = RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=64)


def parallelized(context: RankContext, folder: str, dtype: torch.dtype, **_: Any):
    """The whole model on every rank, then its own experts spread."""
    from eprt.integrations.transformers import parallelize

    model = load(folder, dtype)
    parallelize(model, context.world(timeout_s=BEHIND_S), RUNTIME)
    return model


def without_experts(context: RankContext, folder: str, dtype: torch.dtype, **_: Any):
    """Part 2: no rank holds another's experts."""
    from eprt.integrations.transformers import load_without_experts, parallelize

    model = load_without_experts(folder, dtype=dtype).eval()
    parallelize(model, context.world(timeout_s=BEHIND_S), RUNTIME)
    return model


def expert_parallel(context: RankContext, folder: str, dtype: torch.dtype, **sizes: Any):
    """Part 3: transformers' own loading, eprt's experts."""
    from transformers.distributed import DistributedConfig

    from eprt.integrations.transformers import register_expert_parallel

    context.world(timeout_s=BEHIND_S)  # torch.distributed is up
    register_expert_parallel(RUNTIME)
    config = DistributedConfig(ep_size=context.size, ep_implementation="eprt", **sizes)
    return load(folder, dtype, distributed_config=config)


WAYS = {"parallelized": parallelized, "without_experts": without_experts, "expert_parallel": expert_parallel}


def load(folder: str, dtype: torch.dtype, **options: Any):
    import transformers

    found = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    return found.eval()


def continue_prompts(
    context: RankContext,
    way: str,
    folder: str,
    prompts: list[list[list[int]]],
    dtype: torch.dtype,
    options: dict[str, Any],
    **sizes: Any,
) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """What follows this rank's prompts, and what was streamed."""
    from eprt.integrations.transformers import expert_layers, generate

    model = WAYS[way](context, folder, dtype, **sizes)
    streamed: list[tuple[int, int]] = []
    torch.manual_seed(context.rank)
    found = generate(model, prompts[context.rank], batch_size=2, on_token=lambda *one: streamed.append(one), **options)
    layers = expert_layers(model)
    for layer in layers:
        layer.close()
    if way == "expert_parallel":  # transformers made groups of its own for this model
        layers[0].world.close()
    return found, streamed
