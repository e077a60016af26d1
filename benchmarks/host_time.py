"""Measure what a layer call costs, R being known: of this tree, or of an older one put before it on the path.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/host_time.py NEW FILE gpt-oss:symm+humming ...
    PYTHONPATH=OLDER_TREE python -m torch.distributed.run ... benchmarks/host_time.py OLD FILE gpt-oss:symm+humming ...

A layer of a model's sizes, random weights, one rank a GPU. Appends rows to FILE: the host's microseconds of an eager
call behind a sync (`alone`) and of ten in a row, medians, and of each phase; the device's in a CUDA graph
(`graph_us`, the slowest rank's median), where the pair can be captured. Trees before `World.step` are given R in each
call. TOKENS in the environment: tokens a rank, "1 32" if unset.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

import eprt
from eprt.bench.experts import random_experts
from eprt.bench.layer import shape_config
from eprt.bench.timing import samples
from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.experts import EXECUTORS
from eprt.placement import ExpertPlacement
from eprt.routing import Router

MODELS = {"gpt-oss": "gpt-oss-120b", "qwen3": "qwen3-30b-a3b", "deepseek-v3": "deepseek-v3-fp8"}
TOKENS = tuple(int(count) for count in os.environ.get("TOKENS", "1 32").split())


def layer_of(world: Any, config: MoEConfig, dispatcher: str, executor: str) -> Any:
    weight = torch.randn(config.num_experts, config.input_size).to(torch.bfloat16)
    bias = torch.zeros(config.num_experts, dtype=torch.bfloat16)
    local = ExpertPlacement(config.num_experts, world.parallel).num_local_experts
    layer = eprt.ExpertParallelMoE(
        config,
        world,
        random_experts(config, local, world.device),
        runtime=RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=max(128, *TOKENS)),
        router=Router(weight, config.routing, config.top_k, bias=bias),
    )
    world.warmup(layer)
    return layer


def measure(world: Any, layer: Any, tokens: int) -> dict[str, Any]:
    x = torch.randn(tokens, layer.config.input_size, device=world.device).to(torch.bfloat16)
    stepped = callable(world.step)

    def calls(number: int, spent: list[float]) -> None:
        torch.cuda.synchronize()
        world.barrier()
        with world.step(tokens) if stepped else nullcontext():
            for _ in range(number):
                start = time.perf_counter()
                layer(x) if stepped else layer(x, tokens_per_rank=tokens)
                spent.append((time.perf_counter() - start) * 1e6)

    calls(20, [])
    alone, in_a_row, phases = list[float](), list[float](), defaultdict[str, list[float]](list)
    for _ in range(60):
        calls(1, alone)
    for _ in range(10):
        calls(10, in_a_row)

    @contextmanager
    def clock(phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        phases[phase].append((time.perf_counter() - start) * 1e6)

    before, layer.observe = layer.observe, clock
    for _ in range(10):
        calls(10, [])
    layer.observe = before
    found = {"alone_us": median(alone), "in_a_row_us": median(in_a_row)}
    if DISPATCHERS[layer.plan.dispatcher].graph_safe and EXECUTORS[layer.plan.executor].graph_safe:
        found["graph_us"] = slowest_graph(world, lambda: layer(x, tokens_per_rank=tokens))
    return {name: round(us, 1) for name, us in found.items()} | {
        "phases": {phase: round(median(us), 1) for phase, us in phases.items()}
    }


def slowest_graph(world: Any, call: Callable[[], object]) -> float:
    ranks: list[Any] = [None] * world.size
    mine = median(samples(world, call, graph=True, rounds=20, repeats=5))
    torch.distributed.all_gather_object(ranks, mine)
    return max(ranks)


def main(label: str, path: Path, cases: list[str]) -> None:
    world = eprt.World.from_env(timeout_s=600)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for case in cases:
        model, _, pair = case.rpartition(":")
        config = shape_config(MODELS[model or "gpt-oss"])
        try:
            with torch.no_grad():
                layer = layer_of(world, config, *pair.split("+"))
                found = [{"tokens": n, **measure(world, layer, n)} for n in TOKENS]
                layer.close()
        except eprt.EprtError as error:
            found = [{"refused": str(error).splitlines()[0]}]
        rows += [{"tree": label, "model": model or "gpt-oss", "pair": pair, **row} for row in found]
        if world.rank == 0:
            path.write_text(json.dumps(rows, indent=1) + "\n")
    world.barrier()
    world.close()
    os._exit(0)  # older trees wait for libraries that don't end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
