"""Measure how the symm kernels should cut their work: the source of `TUNING` in eprt/dispatch/symm/launch.py.

    torchrun --nproc_per_node 4 benchmarks/tune_symm.py result.json

For each size, times CUDA-graph replays of dispatch alone and of dispatch + combine (as `eprt bench` does: the median
round, its slowest rank) over the candidates below, and writes every time.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from eprt.bench.timing import samples
from eprt.dispatch.symm.launch import TUNING, Launcher, Tuning
from eprt.dispatch.symm.memory import R_BITS, SymmetricMemory, SymmGeometry
from eprt.tokens import TopK
from eprt.world import World

NUM_EXPERTS = 128
SHAPES = ((7168, 8), (2880, 4))  # hidden size, top-k
TOKENS = (1, 8, 32, 128, 512, 1024, 2048, 4096)
# (bytes of a row at once, warps, most CTAs)
SMALL_DISPATCH = ((2048, 4, 1056), (4096, 4, 1056), (4096, 8, 1056), (16384, 8, 1056))
LARGE_DISPATCH = (
    (4096, 4, 1056),
    (4096, 8, 1056),
    (8192, 4, 1056),
    (16384, 4, 1056),
    (16384, 8, 1056),
    (16384, 8, 528),
)
SMALL_COMBINE = ((1024, 4, 528), (2048, 4, 528), (2048, 8, 528), (4096, 8, 528))
LARGE_COMBINE = (
    (2048, 4, 528),
    (4096, 4, 264),
    (4096, 4, 528),
    (4096, 8, 264),
    (4096, 8, 528),
    (8192, 4, 528),
    (8192, 8, 264),
    (8192, 16, 132),
    (16384, 8, 264),
)
REPEATS, ROUNDS, TIMEOUT_S = 10, 11, 30.0


def microseconds(world: World, call: Callable[[], None]) -> float:
    """Returns the time per call: the median round, its slowest rank."""
    rounds = torch.tensor(samples(world, call, graph=True, rounds=ROUNDS, repeats=REPEATS), device="cuda")
    dist.all_reduce(rounds, op=dist.ReduceOp.MAX)
    return round(float(rounds.median()), 2)


def tune(world: World, memory: SymmetricMemory, tokens: int) -> dict[str, object]:
    """Measures every candidate at one size."""
    H, K, L = memory.geometry.hidden_size, memory.geometry.top_k, NUM_EXPERTS // world.size
    generator = torch.Generator("cuda").manual_seed(world.rank)
    x = torch.randn(tokens, H, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(tokens, NUM_EXPERTS, device="cuda", generator=generator).topk(K, dim=1).indices.int()
    topk, out = TopK(ids, torch.rand(tokens, K, device="cuda", generator=generator)), torch.empty_like(x)

    @cache
    def launcher_of(tuning: Tuning) -> Launcher:
        return Launcher(memory, NUM_EXPERTS, L, 1, TIMEOUT_S, (tuning,))

    def dispatch(tuning: Tuning) -> None:
        launcher_of(tuning).dispatch(0, x, topk, tokens)

    def both(tuning: Tuning) -> None:
        dispatch(tuning)
        launcher_of(tuning).combine(0, out, ids, tokens)

    small = tokens <= TUNING[0].max_rows
    usual = (4096, 8, 264)
    dispatches = {
        cut: microseconds(world, lambda cut=cut: dispatch(Tuning(1 << R_BITS, *cut, *usual)))
        for cut in (SMALL_DISPATCH if small else LARGE_DISPATCH)
    }
    best = min(dispatches, key=lambda cut: dispatches[cut])
    combines = {
        cut: microseconds(world, lambda cut=cut: both(Tuning(1 << R_BITS, *best, *cut)))
        for cut in (SMALL_COMBINE if small else LARGE_COMBINE)
    }
    chosen = next(tuning for tuning in TUNING if tuning.max_rows >= tokens)
    return {
        "hidden": H,
        "top_k": K,
        "tokens": tokens,
        "dispatch_us": {str(cut): time for cut, time in dispatches.items()},
        "dispatch_combine_us": {str(cut): time for cut, time in combines.items()},
        "as_shipped_us": microseconds(world, lambda: both(chosen)),
    }


def main(result: str) -> None:
    with World.from_env("cuda") as world:
        rows: list[dict[str, object]] = []
        for H, K in SHAPES:
            memory = SymmetricMemory.allocate(world, SymmGeometry(world.size, max(TOKENS), H, K, "bf16"))
            rows += [tune(world, memory, tokens) for tokens in TOKENS]
            world.barrier()
            memory.close()
        if world.rank == 0:
            machine = f"{world.size} x {torch.cuda.get_device_name()}"
            found = {"machine": machine, "torch": torch.__version__, "command": " ".join(sys.argv), "rows": rows}
            Path(result).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
