"""What batch invariance and new weights cost a layer on one GPU.

    python benchmarks/layer_modes.py FILE [--models gpt-oss-20b Qwen3-30B-A3B] [--tokens 1 16 64 256]

Layers of published widths with random weights, a World of one. A row of FILE is either a number of tokens, with the
device's time of a layer's call in a CUDA graph with `RuntimeConfig(batch_invariant=True)` and without, their rounds in
turn, or a load of all experts: the time that preparing them for the first time takes, the time of `load_experts`, and
the most memory that each has taken beside what was there. `--tiny --device cpu` rehearses it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eprt.bench.experts import random_experts
from eprt.bench.layer import random_layer
from eprt.bench.report import Report
from eprt.config import MoEConfig, RuntimeConfig
from eprt.experts import make_executor
from eprt.models.published import published_layer
from eprt.placement import ExpertPlacement
from eprt.ranks.launcher import launch
from eprt.ranks.process import RankContext
from eprt.timing import device_microseconds, host_microseconds, host_stopwatch

LAYERS = 4  # each reads weights of its own, so L2 is as cold as in a model
ROUNDS = 4
MODES = {"ordinary": False, "invariant": True}


def measure(context: RankContext, model: str, tokens: list[int], tiny: bool) -> list[dict[str, Any]]:
    """Returns the rows of one model. A job for `launch`."""
    config = replace(published_layer(model), shared=None)
    if tiny:
        config = replace(config, hidden_size=256, intermediate_size=128, num_experts=8, top_k=2)
    world = context.world(timeout_s=600.0)
    rows = [{"model": model, **row} for row in _reloads(context, config)]
    layers = {
        mode: [
            random_layer(config, world, RuntimeConfig(batch_invariant=on, max_tokens_per_rank=max(tokens)), number)
            for number in range(LAYERS)
        ]
        for mode, on in MODES.items()
    }
    for own in layers.values():
        world.warmup(*own)
    for count in tokens:
        x = [torch.randn(count, config.hidden_size).to(world.device, torch.bfloat16) for _ in range(LAYERS)]
        calls = {mode: [partial(layer, x[i]) for i, layer in enumerate(own)] for mode, own in layers.items()}
        rows.append({"model": model, "tokens": count, **_in_turn(world.device, calls)})
    return rows


@torch.no_grad()
def _in_turn(device: torch.device, calls: dict[str, list[Callable[[], object]]]) -> dict[str, float]:
    """Returns the least time of each mode's calls and the ratio."""
    least = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for mode, own in calls.items():
            found = device_microseconds(*own) if device.type == "cuda" else host_microseconds(own[0])
            least[mode] = min(least[mode], found)
    ratio = least["invariant"] / least["ordinary"]
    return {f"{mode}_us": round(us, 1) for mode, us in least.items()} | {"ratio": round(ratio, 3)}


def _reloads(context: RankContext, config: MoEConfig) -> list[dict[str, Any]]:
    """Returns one row for each of three preparations and loads; the first one's libraries are loaded in it."""
    world = context.world()
    placement = ExpertPlacement(config.num_experts, world.parallel)
    experts = partial(random_experts, config, placement.num_local_experts, world.device)
    rows: list[dict[str, Any]] = []
    for turn in range(3):
        first, second = experts(), experts()
        layer = random_layer(config, world, RuntimeConfig())
        name, shard = layer.plan.executor, placement.shard(world.rank)
        prepare = partial(make_executor, name, config, shard, first, world.device, RuntimeConfig(), "flat")
        first_s, first_bytes = _clocked(world.device, prepare)
        load_s, load_bytes = _clocked(world.device, partial(layer.load_experts, second))
        held = sum(tensor.nbytes for tensor in layer.executor.slot_tensors().values())
        layer.close()
        row = {"turn": turn, "executor": name, "prepare_s": first_s, "load_s": load_s}
        row |= {"prepare_bytes": first_bytes, "load_bytes": load_bytes, "held_bytes": held}
        rows.append(row | {"ratio": round(load_s / first_s, 3)})
    return rows


def _clocked(device: torch.device, work: Callable[[], object]) -> tuple[float, int]:
    """Returns the seconds of some work, and the most memory of the device that it took beside what was in use."""
    cuda, found, before = device.type == "cuda", list[float](), 0
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with host_stopwatch(found):
        held = work()
        if cuda:
            torch.cuda.synchronize()
    del held
    return round(found[0] / 1e6, 5), torch.cuda.max_memory_allocated() - before if cuda else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--models", nargs="+", default=["gpt-oss-20b", "Qwen3-30B-A3B"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    a = parser.parse_args()
    report = Report("layer modes", [], command=f"python benchmarks/layer_modes.py {a.file.name}")
    for model in a.models:
        began = time.monotonic()
        [rows] = launch(measure, 1, a.device, 600.0, model=model, tokens=a.tokens, tiny=a.tiny)
        report.rows.extend(rows)
        report.write(a.file)
        sys.stdout.write("".join(f"{row}\n" for row in rows) + f"{model}: {time.monotonic() - began:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
