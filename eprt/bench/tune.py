"""Measures rows of one model on this machine for the plan: every dispatcher and executor that works here."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from eprt.bench.dispatch import DispatchCase, DispatchTimes
from eprt.bench.experts import random_experts, sampled_tokens
from eprt.bench.report import percentile, provenance, slowest
from eprt.bench.timing import reason_of, world_of
from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS, DispatcherSpec
from eprt.errors import EprtError
from eprt.experts import EXECUTORS, ExecutorSpec, executor_spec, make_executor
from eprt.placement import ExpertPlacement
from eprt.plan.measured import sizes_of_experts
from eprt.ranks.process import RankContext
from eprt.rounding import ceil_div
from eprt.support import Device, Requirement
from eprt.timing import device_microseconds, host_stopwatch

WALL_CALLS = 5  # of an executor on a CPU; the middle one counts


@dataclass(frozen=True)
class ExpertTimes:
    """One rank's microseconds by number of all ranks' tokens, or why there are none.

    Numbers for which no time was left are missing.
    """

    us: dict[int, float]
    refused: str = ""


def measure_experts(
    context: RankContext, name: str, config: MoEConfig, tokens: Sequence[int], seconds: float = math.inf
) -> ExpertTimes:
    """Measures this rank's experts by one executor, on all ranks at once. A job for `WorldPool.run`.

    Args:
        seconds: after which no number of tokens is begun.
    """
    world, start = world_of(context), time.monotonic()
    device, spec, runtime = Device.of(world.device), executor_spec(name), RuntimeConfig()
    kept = replace(config, weight_format="bf16") if config.weight_format in spec.decodes else config
    if not (verdict := spec.supports(kept, world.parallel, runtime, device, "bf16")):
        return ExpertTimes({}, verdict.reason)
    try:
        shard = ExpertPlacement(kept.num_experts, world.parallel).shard(world.rank)
        weights = random_experts(kept, shard.num_local_experts, world.device)
        executor = make_executor(name, kept, shard, weights, world.device, runtime, token_format="flat")
        del weights
        executor.warmup(max(tokens))
        begun = (count for count in tokens if time.monotonic() - start < seconds)
        return ExpertTimes({count: _time(executor, kept, count, world.device) for count in begun})
    except EprtError as error:
        return ExpertTimes({}, reason_of(error))


def _time(executor: Callable[..., torch.Tensor], config: MoEConfig, count: int, device: torch.device) -> float:
    flat = sampled_tokens(config, count, device)
    out = torch.empty_like(flat.hidden.data)
    if device.type == "cuda":
        return device_microseconds(lambda: executor(flat, out))
    taken: list[float] = []
    for _ in range(1 + WALL_CALLS):
        with host_stopwatch(taken):
            executor(flat, out)
    return median(taken[1:])


@dataclass(frozen=True)
class Measurement:
    """One part of `eprt tune`: an executor at all numbers of tokens, or a dispatcher at one."""

    name: str
    case: DispatchCase | None = None

    def __str__(self) -> str:
        return f"experts by {self.name}" if self.case is None else f"{self.name}, {self.case.tokens} tokens a rank"


def parts(config: MoEConfig, tokens: Sequence[int], ranks: int, device: str) -> list[Measurement]:
    """Lists what to measure for a model on `ranks` devices of a kind, the reference executor aside.

    Backends of torch come first, then those that compile a library's kernels and may take minutes; among them the
    preferred ones.
    """
    specs: list[ExecutorSpec | DispatcherSpec] = [spec for spec in EXECUTORS.values() if not spec.witness]
    specs += DISPATCHERS.values() if ranks > 1 else ()
    found: list[Measurement] = []
    for spec in sorted(specs, key=lambda each: (_compiles(each.requirement), -each.preference)):
        if device in spec.devices and isinstance(spec, ExecutorSpec):
            found.append(Measurement(spec.name))
        elif device in spec.devices:
            cases = [DispatchCase(spec.name, config.hidden_size, config.top_k, count) for count in tokens]
            found += [Measurement(spec.name, case) for case in cases]
    return found


def _compiles(requirement: Requirement | None) -> bool:
    return requirement is not None and requirement.module != "triton"


def generation(context: RankContext) -> int:
    """Returns the SM of this rank's GPU, 0 for a CPU. A job for `WorldPool.run`."""
    return Device.of(world_of(context).device).sm


def elapsed(context: RankContext, since: float) -> float:
    """Returns seconds since a moment of this rank's monotonic clock, the machine's. A job for `WorldPool.run`."""
    return time.monotonic() - since


def dispatch_table(sm: int, ranks: int, found: Sequence[tuple[DispatchCase, list[DispatchTimes]]]) -> dict[str, Any]:
    """Returns rows of the plan, by the slowest rank's median round."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for case, by_rank in found:
        if all(rank.samples for rank in by_rank):
            sizes = {"payload": case.payload, "ranks": ranks, "hidden": case.hidden, "top_k": case.top_k}
            row = rows.setdefault((*sizes.values(), case.tokens), {**sizes, "tokens": case.tokens, "us": {}})
            row["us"][case.transport] = round(percentile(slowest([rank.samples for rank in by_rank]), 50), 2)
    return {"kind": "dispatch", "sm": sm, "source": _source(), "rows": list(rows.values())}


def experts_table(sm: int, config: MoEConfig, ranks: int, found: dict[str, list[ExpertTimes]]) -> dict[str, Any]:
    """Returns rows of the plan, by the slowest rank."""
    sizes = sizes_of_experts(config, ceil_div(config.num_experts, ranks))
    rows: dict[int, dict[str, Any]] = {}
    for name, by_rank in found.items():
        everywhere = set(by_rank[0].us).intersection(*(rank.us for rank in by_rank))
        for count in sorted(everywhere) if not any(rank.refused for rank in by_rank) else ():
            row = rows.setdefault(count, {**sizes, "tokens": count, "us": {}})
            row["us"][name] = round(max(rank.us[count] for rank in by_rank), 2)
    return {"kind": "experts", "sm": sm, "source": _source(), "rows": list(rows.values())}


def _source() -> str:
    machine = provenance()
    return f"eprt tune, {machine['time'][:10]}, {machine['machine'][0] if machine['machine'] else 'cpu'}"
