"""Runs `eprt tune`: measures this machine for one model, stores the rows for the plan, and shows what changed."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from eprt.bench.dispatch import DispatchCase, DispatchTimes, measure_dispatch
from eprt.bench.experts import random_experts
from eprt.bench.report import Report, percentile, provenance, slowest
from eprt.bench.routings import sampled_tokens
from eprt.bench.timing import or_reason, world_of
from eprt.cli.arguments import Tune
from eprt.cli.bench import require_tokens
from eprt.cli.explain import kinds_of_layers
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal, columns, counted
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS, DispatcherSpec
from eprt.errors import ConfigError, UnsupportedError
from eprt.experts import EXECUTORS, ExecutorSpec, executor_spec, make_executor
from eprt.files import write_whole
from eprt.models.published import model_config
from eprt.placement import ExpertPlacement
from eprt.plan import make_plan
from eprt.plan.measured import own_path, own_tables, sizes_of_experts
from eprt.ranks.process import RankContext
from eprt.ranks.stacks import WorldFailed
from eprt.support import Device
from eprt.timing import device_microseconds, host_stopwatch

SHARE = 0.5  # of the seconds left, what a part may take while others wait
LEAST_S = 2.0  # left of the budget for a part to be begun
WALL_CALLS = 5  # of an executor on a CPU; the middle one counts
CHOICES = columns("phase | before | now | us before = us_before:.0f | us now = us_now:.0f")


def tune(arguments: Tune, terminal: Terminal) -> int:
    require_tokens(arguments.tokens, 1)
    if not arguments.budget_s > 0:  # NaN, too
        raise ConfigError(f"--budget-s {arguments.budget_s:g}: expected seconds, more than 0")
    start, path = time.monotonic(), own_path()
    config = kinds_of_layers(model_config(arguments.model))[0][0]
    _store(path, own_tables())  # before minutes of measuring: a file that can't be read, or written
    with ranks(arguments.world, arguments.device) as workers:
        config = ExpertPlacement(config.num_experts, ParallelConfig(workers.size)).in_slots(config)  # as the plan asks
        sm, tables, cut = _measure(workers, config, arguments, terminal, start)
    device, size, most = Device("cuda" if sm else "cpu", sm), workers.size, max(arguments.tokens)
    before = _choices(config, size, most, device)
    _store(path, _merged(own_tables(), tables))
    after = _choices(config, size, most, device)
    plans = {phase: {"before": before[phase][0], "now": now} for phase, (now, _) in after.items()}
    rows = [{"phase": phase, **pairs} for phase, pairs in plans.items()]
    title = f"Pairs that are chosen for {arguments.model} on {size} x {device}, at most {most} tokens per rank"
    us = [{"us_before": before[phase][1], "us_now": after[phase][1]} for phase in plans]
    terminal.table(title, CHOICES, [row | times for row, times in zip(rows, us, strict=True)])
    terminal.say(
        f"\n{counted(sum(len(table['rows']) for table in tables), 'row')} written to {path}; explain and every layer "
        "built here go by them first. To undo: remove it",
        *(f"cut: {line}" for line in cut),
    )
    if cut:
        terminal.say(
            f"measuring may take {arguments.budget_s:g} s (--budget-s); compiled kernels are kept for the next time"
        )
    terminal.result({"model": str(arguments.model), "path": str(path), "tables": tables, "plans": plans, "cut": cut})
    if arguments.output is not None and terminal.speaks:
        facts = {"seconds": round(time.monotonic() - start, 1), "budget_s": arguments.budget_s}
        Report("tune", rows, facts, cut).write(arguments.output)
    return 0


def _measure(
    workers: Ranks, config: MoEConfig, arguments: Tune, terminal: Terminal, start: float
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Returns (SM, tables of rows, notes on what was cut). Each part gets at most half of the seconds that are left,
    the last part all of them."""
    size, todo = workers.size, parts(config, arguments.tokens, workers.size, workers.device)
    counts = tuple(count * size for count in arguments.tokens)
    found: list[tuple[Part, list[Any]]] = []
    cut: dict[str, str] = {}  # a note on each part that took too long, by its name
    with terminal.progress("tune", len(todo)) as advance:
        for part in todo:
            # Ranks of torchrun must decide alike, so the slowest one's clock counts for all.
            left = arguments.budget_s - max(workers.run(elapsed, since=start))
            limit = left if part is todo[-1] else SHARE * left
            if part.name not in cut:
                by_rank, note = _attempt(workers, part, config, counts, left, limit)
                found += [(part, by_rank)] if by_rank else []
                cut |= {part.name: note} if note else {}
            advance(str(part))
    sm = Device.here(workers.device).sm
    tables = [
        _table("experts", sm, (time for part in found for time in _experts_times(config, size, *part))),
        _table("dispatch", sm, (time for part in found for time in _dispatch_times(size, *part))),
    ]
    return sm, [table for table in tables if table["rows"]], list(cut.values())


def _attempt(
    workers: Ranks, part: Part, config: MoEConfig, tokens: tuple[int, ...], left_s: float, limit_s: float
) -> tuple[list[Any], str]:
    """Returns what the ranks measure, nothing where one refuses it, and a note if the part was cut."""
    if left_s <= LEAST_S:
        return [], f"{part}: not begun, the time was over"
    job, wanted = measure_dispatch, {"case": part.case}
    if part.case is None:
        job, wanted = measure_experts, {"name": part.name, "config": config, "tokens": tokens, "seconds": 0.8 * limit_s}
    try:
        by_rank = workers.run(job, within_s=limit_s, **wanted)
    except WorldFailed as failed:
        if not failed.late:
            raise
        return [], f"{part}: ended after {limit_s:.0f} s"
    if any(isinstance(rank, str) for rank in by_rank):
        return [], ""
    return by_rank, "" if part.case is not None else _missing(part, by_rank, len(tokens))


def _missing(part: Part, by_rank: list[ExpertTimes], wanted: int) -> str:
    """Returns a note if an executor had no time for all numbers of tokens."""
    had = min(map(len, by_rank))
    return "" if had == wanted else f"{part}: {had} of {wanted} numbers of tokens"


# ---- rows of the plan -------------------------------------------------------------------------------------------

Time = tuple[dict[str, Any], str, float]  # the sizes that identify a row, a backend's name, its microseconds
ExpertTimes = dict[int, float]  # microseconds by number of all ranks' tokens


def _table(kind: str, sm: int, times: Iterable[Time]) -> dict[str, Any]:
    """Returns a table of rows as the plan reads them; backends that were measured at the same sizes share a row."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for sizes, name, us in times:
        rows.setdefault(tuple(sizes.values()), {**sizes, "us": {}})["us"][name] = round(us, 2)
    machine = provenance()
    source = f"eprt tune, {machine['time'][:10]}, {machine['machine'][0] if machine['machine'] else 'cpu'}"
    return {"kind": kind, "sm": sm, "source": source, "rows": list(rows.values())}


def _dispatch_times(ranks: int, part: Part, by_rank: list[DispatchTimes]) -> Iterator[Time]:
    """Yields a dispatcher's time, the slowest rank's median round."""
    if (case := part.case) is not None:
        sizes = {"payload": case.payload, "ranks": ranks, "hidden": case.hidden, "top_k": case.top_k}
        us = percentile(slowest([rank.samples for rank in by_rank]), 50)
        yield {**sizes, "tokens": case.tokens}, part.name, us


def _experts_times(config: MoEConfig, ranks: int, part: Part, by_rank: list[ExpertTimes]) -> Iterator[Time]:
    """Yields an executor's times, the slowest rank's."""
    if part.case is None:
        sizes = sizes_of_experts(config, config.num_experts // ranks)
        for count in sorted(set(by_rank[0]).intersection(*by_rank)):
            yield {**sizes, "tokens": count}, part.name, max(us[count] for us in by_rank)


def _store(path: Path, tables: list[dict[str, Any]]) -> None:
    """Writes the file, once a host. Raises ConfigError where that can't be."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            write_whole(path, json.dumps(tables, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}; EPRT_PLAN_ROWS names another") from error


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the new tables, then the old ones without rows whose sizes were measured again."""
    again = {(table["kind"], table["sm"], _sizes(row)) for table in new for row in table["rows"]}
    kept = [
        {**table, "rows": [row for row in table["rows"] if (table["kind"], table["sm"], _sizes(row)) not in again]}
        for table in old
    ]
    return new + [table for table in kept if table["rows"]]


def _sizes(row: dict[str, Any]) -> str:
    return json.dumps({name: value for name, value in row.items() if name != "us"}, sort_keys=True)


def _choices(config: MoEConfig, size: int, most: int, device: Device) -> dict[str, tuple[str, float | None]]:
    """Returns the pair that the plan chooses for each phase, and its microseconds."""
    found: dict[str, tuple[str, float | None]] = {"decode": ("nothing", None), "prefill": ("nothing", None)}
    for phase in ("decode", "prefill"):
        with suppress(UnsupportedError):
            runtime = RuntimeConfig(phase=phase, max_tokens_per_rank=most)
            plan = make_plan(config, ParallelConfig(size), runtime, device)
            found[phase] = f"{plan.dispatcher} + {plan.executor}", plan.chosen.us
    return found


# ---- what is measured -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """One part of the work: an executor at all numbers of tokens, or a dispatcher at one."""

    name: str
    case: DispatchCase | None = None

    def __str__(self) -> str:
        return f"experts by {self.name}" if self.case is None else f"{self.name}, {self.case.tokens} tokens a rank"


def parts(config: MoEConfig, tokens: Sequence[int], ranks: int, device: str) -> list[Part]:
    """Lists what to measure for a model on `ranks` devices of a kind, the reference executor aside.

    Backends of torch come first, then those that compile a library's kernels and may take minutes; among them the
    preferred ones.
    """
    specs: list[ExecutorSpec | DispatcherSpec] = [spec for spec in EXECUTORS.values() if not spec.witness]
    specs += DISPATCHERS.values() if ranks > 1 else ()
    found: list[Part] = []

    def order(spec: ExecutorSpec | DispatcherSpec) -> tuple[bool, int]:
        return spec.requirement is not None and spec.requirement.module != "triton", -spec.preference

    for spec in sorted(specs, key=order):
        if device in spec.devices and isinstance(spec, ExecutorSpec):
            found.append(Part(spec.name))
        elif device in spec.devices:
            cases = [DispatchCase(spec.name, config.hidden_size, config.top_k, count) for count in tokens]
            found += [Part(spec.name, case) for case in cases]
    return found


def elapsed(context: RankContext, since: float) -> float:
    """Returns seconds since a moment of this rank's monotonic clock, the machine's. A job for `WorldPool.run`."""
    return time.monotonic() - since


@or_reason
def measure_experts(
    context: RankContext, name: str, config: MoEConfig, tokens: Sequence[int], seconds: float = math.inf
) -> ExpertTimes:
    """Measures this rank's experts by one executor, on all ranks at once. A job for `WorldPool.run`.

    Args:
        seconds: after which no number of tokens is begun, and is missing in the result.
    """
    world, start = world_of(context), time.monotonic()
    device, spec, runtime = Device.of(world.device), executor_spec(name), RuntimeConfig()
    kept = replace(config, weight_format="bf16") if config.weight_format in spec.decodes else config
    if not (verdict := spec.supports(kept, world.parallel, runtime, device, "bf16")):
        raise UnsupportedError(verdict.reason)
    shard = ExpertPlacement(kept.num_experts, world.parallel).shard(world.rank)
    weights = random_experts(kept, shard.num_local_experts, world.device)
    executor = make_executor(name, kept, shard, weights, world.device, runtime, token_format="flat")
    del weights
    executor.warmup(max(tokens))
    begun = (count for count in tokens if time.monotonic() - start < seconds)
    return {count: _time(executor, kept, count, world.device) for count in begun}


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
