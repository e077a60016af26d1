"""How long a launch takes on the device, without the host's share; and tokens to try it on."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise

import torch

from eprt.config import MoEConfig
from eprt.tokens import FlatTokens, Payload

SLEEP_CYCLES = 2_000_000  # about 1 ms at Hopper clocks: longer than queueing a few calls takes


def device_microseconds(*calls: Callable[[], object], repeats: int = 5, rounds: int = 3) -> float:
    """Fastest round of a CUDA graph of the calls, `repeats` times one after another, per call.

    Each is first made eagerly, so compilation and module loading stay out. Calls that read different weights keep
    the L2 cache as cold as it is in a model.
    """
    for call in calls:
        call()
    gc.collect()  # what is freed by chance during the capture could end it
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            for call in calls:
                call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(rounds):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3 / (repeats * len(calls)))
    return best


def eager_microseconds(call: Callable[[], object], repeats: int = 4) -> float:
    """Fastest of a few eager calls between events, queued ahead so that the host isn't in it: coarse, but cheap
    enough for a hundred candidates. The first call isn't timed."""
    call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda._sleep(SLEEP_CYCLES)  # keeps the device busy while the host queues
    for mark in marks[:-1]:
        mark.record()
        call()
    marks[-1].record()
    torch.cuda.synchronize()
    return min(start.elapsed_time(end) for start, end in pairwise(marks)) * 1e3


def even_tokens(
    config: MoEConfig, rows: int, slots: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> FlatTokens:
    """Zeros for a warm-up: [rows, H], experts taken in turn, slots beyond the model's top-k hold none."""
    ids = torch.arange(rows * slots, device=device, dtype=torch.int32).view(rows, slots) % config.num_experts
    ids[:, config.top_k :] = config.num_experts
    hidden = torch.zeros((rows, config.hidden_size), dtype=dtype, device=device)
    return FlatTokens(Payload.plain(hidden), ids, torch.ones(ids.shape, device=device), config.num_experts)


def sample_ids(num_rows: int, top_k: int, num_experts: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """[num_rows, top_k] int32: distinct experts of each row, uniform over all, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(num_rows, num_experts, generator=generator)
    return scores.topk(top_k, dim=1).indices.to(device, torch.int32)
