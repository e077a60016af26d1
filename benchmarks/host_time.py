"""Measure what a layer call costs, R being known: of this tree, or of an older one put before it on the path.

    python -m torch.distributed.run --nproc-per-node 2 benchmarks/host_time.py NEW FILE gpt-oss:symm+humming ...
    PYTHONPATH=OLDER_TREE python -m torch.distributed.run ... benchmarks/host_time.py OLD FILE gpt-oss:symm+humming ...

A layer of a model's sizes, random weights, one rank a GPU. Appends rows to FILE: the host's microseconds of an eager
call behind a sync (`alone`) and of ten in a row, medians, and of each phase; the device's in a CUDA graph
(`graph_us`, the slowest rank's median), where the pair can be captured. TOKENS in the environment: tokens a rank,
"1 32" if unset.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

import eprt
from eprt.bench.layer import graph_safe, random_layer, shape_config
from eprt.bench.timing import clocked_phases, samples, settle
from eprt.config import RuntimeConfig
from eprt.timing import host_stopwatch
from eprt.world.wire import gather_values

MODELS = {"gpt-oss": "gpt-oss-120b", "qwen3": "qwen3-30b-a3b", "deepseek-v3": "deepseek-v3-fp8"}
TOKENS = tuple(int(count) for count in os.environ.get("TOKENS", "1 32").split())


def measure(world: Any, layer: Any, tokens: int) -> dict[str, Any]:
    x = torch.randn(tokens, layer.config.input_size, device=world.device).to(torch.bfloat16)

    def calls(number: int, turns: int) -> list[float]:
        """Returns the times of `number` calls in a row, `turns` times."""
        spent: list[float] = []
        for _ in range(turns):
            settle(world)
            world.barrier()
            with world.step(tokens):
                for _ in range(number):
                    with host_stopwatch(spent):
                        layer(x)
        return spent

    calls(20, 1)
    found = {"alone_us": median(calls(1, 60)), "in_a_row_us": median(calls(10, 10))}
    with clocked_phases([layer]) as phases:
        calls(10, 10)
    if graph_safe(layer):
        times = samples(world, lambda: layer(x, tokens_per_rank=tokens), graph=True, rounds=20, repeats=5)
        found["graph_us"] = max(gather_values(world, median(times)))
    return {name: round(us, 1) for name, us in found.items()} | {
        "phases": {phase: round(median(us), 1) for phase, us in phases.items()}
    }


def main(label: str, path: Path, cases: list[str]) -> None:
    world = eprt.World.from_env(timeout_s=600)
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for case in cases:
        model, _, pair = case.rpartition(":")
        dispatcher, executor = pair.split("+")
        runtime = RuntimeConfig(dispatcher=dispatcher, executor=executor, max_tokens_per_rank=max(128, *TOKENS))
        try:
            with torch.no_grad():
                layer = random_layer(shape_config(MODELS[model or "gpt-oss"]), world, runtime)
                world.warmup(layer)
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
