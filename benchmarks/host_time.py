"""What an eager layer call costs the host, R being known: of this tree, or of an older one put before it on the path.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/host_time.py LABEL FILE symm+humming ...
    PYTHONPATH=OLDER_TREE python -m torch.distributed.run ... benchmarks/host_time.py OLD FILE symm+humming ...

gpt-oss-120b's layer, random weights, one rank a GPU. Appends rows to FILE: microseconds of a call behind a sync
(`alone`) and of ten in a row, medians, and of each phase. Trees before `World.step` are given R in each call.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

import eprt
from eprt.bench.experts import random_experts
from eprt.config import Activation, MoEConfig, Routing, RuntimeConfig
from eprt.placement import ExpertPlacement
from eprt.routing import Router

CONFIG = MoEConfig(
    128, 4, 2880, 2880, Activation(alpha=1.702, beta=1.0, limit=7.0), Routing("topk_softmax"), True, "mxfp4"
)
TOKENS = (1, 32)


def layer_of(world: Any, dispatcher: str, executor: str) -> Any:
    weight = torch.randn(CONFIG.num_experts, CONFIG.input_size).to(torch.bfloat16)
    bias = torch.zeros(CONFIG.num_experts, dtype=torch.bfloat16)
    local = ExpertPlacement(CONFIG.num_experts, world.parallel).num_local_experts
    layer = eprt.ExpertParallelMoE(
        CONFIG,
        world,
        random_experts(CONFIG, local, world.device),
        runtime=RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=128),
        router=Router(weight, CONFIG.routing, CONFIG.top_k, bias=bias),
    )
    world.warmup(layer)
    return layer


def measure(world: Any, layer: Any, tokens: int) -> dict[str, Any]:
    x = torch.randn(tokens, CONFIG.input_size, device=world.device).to(torch.bfloat16)
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

    layer.observe = clock
    for _ in range(10):
        calls(10, [])
    found = {"alone_us": median(alone), "in_a_row_us": median(in_a_row)}
    return {name: round(us, 1) for name, us in found.items()} | {
        "phases": {phase: round(median(us), 1) for phase, us in phases.items()}
    }


def main(label: str, path: Path, pairs: list[str]) -> None:
    world = eprt.World.from_env(timeout_s=600)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    with torch.no_grad():
        for pair in pairs:
            layer = layer_of(world, *pair.split("+"))
            rows += [{"tree": label, "pair": pair, "tokens": n, **measure(world, layer, n)} for n in TOKENS]
            layer.close()
    if world.rank == 0:
        path.write_text(json.dumps(rows, indent=1) + "\n")
    world.barrier()
    world.close()
    os._exit(0)  # older trees wait for libraries that don't end


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
