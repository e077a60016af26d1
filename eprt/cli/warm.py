"""Runs `eprt warm`: compiles a model's expert kernels ahead, for a GPU that needn't be here."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from eprt.bench.experts import random_experts
from eprt.cli.arguments import Warm
from eprt.cli.explain import kinds_of_layers
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import dispatcher_spec
from eprt.errors import ConfigError
from eprt.experts import executor_spec, make_executor
from eprt.models.published import model_config
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.support import Device, compiled_for

if TYPE_CHECKING:
    from eprt.launching import Specialization

OURS = "triton_grouped"  # whose kernels Triton compiles


def warm(arguments: Warm, terminal: Terminal) -> int:
    """Compiles what isn't in Triton's cache yet. Returns 0. Raises ConfigError without Triton."""
    requirement = executor_spec(OURS).requirement
    if requirement is not None and not (installed := requirement.check()):  # torch's CPU builds come without it
        raise ConfigError(f"eprt warm compiles Triton kernels: {installed.reason}")
    from eprt.compile_ahead import Compilation

    parallel, runtime, device = arguments.parallel, arguments.runtime, Device.parse(arguments.device)
    kinds = kinds_of_layers(model_config(arguments.model))
    plans = [(config, layers, make_plan(config, parallel, runtime, device)) for config, layers in kinds]
    start, compiled, needed = time.monotonic(), 0, 0
    for config, layers, plan in plans:
        if plan.executor != OURS:
            terminal.say(f"layers {layers}: {plan.executor} has nothing that can be compiled ahead")
            continue
        found = _kernels(config, parallel, runtime, plan, device)
        terminal.note(f"eprt warm: {len(found)} kernels of {config.num_experts} experts in {config.weight_format}")
        compiled += Compilation(found, device, len(os.sched_getaffinity(0)), fewest=1).wait()
        needed += len(found)
    seconds = round(time.monotonic() - start, 1)
    terminal.say(f"{arguments.model} on {device}: {needed} kernels, {compiled} of them compiled now, in {seconds} s")
    terminal.result(
        {"model": str(arguments.model), "device": str(device), "kernels": needed, "compiled": compiled, "s": seconds}
    )
    return 0


def _kernels(
    config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, plan: Plan, device: Device
) -> list[Specialization]:
    """Returns what the experts' warm-up compiles on every rank, recorded on tensors without memory."""
    from eprt.launching import recording

    placement, tp = ExpertPlacement(config.num_experts, parallel), parallel.moe_tp_size
    shards = {shard.num_local_experts: shard for shard in map(placement.shard, range(parallel.world_size))}
    sliced = replace(config, intermediate_size=config.intermediate_size // tp)
    one = random_experts(sliced, 1, torch.device("cpu"))
    rows = parallel.world_size * plan.max_tokens_per_rank
    top_k = dispatcher_spec(plan.dispatcher).padded_top_k(config.top_k)
    with compiled_for(device), recording() as found:
        for count, shard in shards.items():
            weights = one.map(lambda tensor, count=count: tensor.expand(count, *tensor.shape[1:]))
            meta = torch.device("meta")
            executor = make_executor(OURS, config, shard, weights, meta, runtime, plan.token_format)
            executor.warmup(rows, top_k)
    return found
