"""Runs `eprt tune`: measures this machine for one model, stores the rows for the plan, and shows what changed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from eprt.bench import tune as bench
from eprt.bench.dispatch import measure_dispatch
from eprt.bench.report import Report
from eprt.cli.bench import require_tokens
from eprt.cli.explain import kinds_of_layers
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal, columns
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.files import write_whole
from eprt.models.published import model_config
from eprt.plan import make_plan
from eprt.plan.measured import own_path, own_tables
from eprt.ranks.stacks import WorldFailed
from eprt.support import Device

if TYPE_CHECKING:
    from eprt.cli.arguments import Tune

Found = list[tuple[bench.Measurement, list[Any]]]  # what each part's ranks have measured
SHARE = 0.5  # of the seconds left, what a part may take while others wait
LEAST_S = 2.0  # left of the budget for a part to be begun
CHOICES = columns("phase | before | now | us before = us_before:.0f | us now = us_now:.0f")


def tune(arguments: Tune, terminal: Terminal) -> int:
    """Measures and stores rows. Returns 0."""
    require_tokens(arguments.tokens, 1)
    if arguments.budget_s <= 0:
        raise ConfigError(f"--budget-s {arguments.budget_s:g}: expected seconds, more than 0")
    start, path = time.monotonic(), own_path()
    config = kinds_of_layers(model_config(arguments.model))[0][0]
    with ranks(arguments.world, arguments.device) as workers:
        sm, tables, cut = _measure(workers, config, arguments, terminal, start)
    device, size, most = Device("cuda" if sm else "cpu", sm), workers.size, max(arguments.tokens)
    before = _choices(config, size, most, device)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_whole(path, json.dumps(_merged(own_tables(), tables), indent=1) + "\n")
    after = _choices(config, size, most, device)
    plans = {phase: {"before": before[phase][0], "now": now} for phase, (now, _) in after.items()}
    rows = [{"phase": phase, **pairs} for phase, pairs in plans.items()]
    title = f"Pairs that are chosen for {arguments.model} on {size} x {device}, at most {most} tokens per rank"
    us = [{"us_before": before[phase][1], "us_now": after[phase][1]} for phase in plans]
    terminal.table(title, CHOICES, [row | times for row, times in zip(rows, us, strict=True)])
    _say_rows(terminal, sum(len(table["rows"]) for table in tables), cut, arguments.budget_s)
    terminal.result({"model": str(arguments.model), "path": str(path), "tables": tables, "plans": plans, "cut": cut})
    if arguments.output is not None and terminal.speaks:
        facts = {"seconds": round(time.monotonic() - start, 1), "budget_s": arguments.budget_s}
        Report("tune", rows, facts, cut).write(arguments.output)
    return 0


def _say_rows(terminal: Terminal, rows: int, cut: list[str], budget_s: float) -> None:
    terminal.say(
        f"\n{rows} rows written to {own_path()}; explain and every layer built here go by them first. "
        "To undo: remove it",
        *(f"cut: {line}" for line in cut),
    )
    if cut:
        terminal.say(f"measuring may take {budget_s:g} s (--budget-s); compiled kernels are kept for the next time")


def _measure(
    workers: Ranks, config: MoEConfig, arguments: Tune, terminal: Terminal, start: float
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Returns (SM, tables of rows, notes on what was cut). Each part gets at most half of the seconds that are left,
    the last part all of them."""
    size, todo = workers.size, bench.parts(config, arguments.tokens, workers.size, workers.device)
    counts = tuple(count * size for count in arguments.tokens)
    found: Found = []
    cut: dict[str, str] = {}
    sm: int = workers.run(bench.generation)[0]
    with terminal.progress("tune", len(todo)) as advance:
        for part in todo:
            # Ranks of torchrun must decide alike, so the slowest one's clock counts for all.
            left = arguments.budget_s - max(workers.run(bench.elapsed, since=start))
            limit = left if part is todo[-1] else SHARE * left
            if part.name not in cut:
                cut |= _attempt(workers, part, config, counts, left, limit, found)
            advance(str(part))
    times = {part.name: by_rank for part, by_rank in found if part.case is None}
    carried = [(part.case, by_rank) for part, by_rank in found if part.case is not None]
    tables = [bench.experts_table(sm, config, size, times), bench.dispatch_table(sm, size, carried)]
    return sm, [table for table in tables if table["rows"]], list(cut.values())


def _attempt(
    workers: Ranks,
    part: bench.Measurement,
    config: MoEConfig,
    tokens: tuple[int, ...],
    left_s: float,
    limit_s: float,
    found: Found,
) -> dict[str, str]:
    """Adds what the ranks measure to `found`. Returns a note, by name, if the part was cut."""
    if left_s <= LEAST_S:
        return {part.name: f"{part}: not begun, the time was over"}
    try:
        if part.case is not None:
            found.append((part, workers.run(measure_dispatch, within_s=limit_s, case=part.case)))
            return {}
        wanted = {"name": part.name, "config": config, "tokens": tokens, "seconds": 0.8 * limit_s}
        by_rank = workers.run(bench.measure_experts, within_s=limit_s, **wanted)
    except WorldFailed as failed:
        if not failed.late:
            raise
        return {part.name: f"{part}: ended after {limit_s:.0f} s"}
    found.append((part, by_rank))
    return _missing(part, by_rank, len(tokens))


def _missing(part: bench.Measurement, by_rank: list[Any], wanted: int) -> dict[str, str]:
    """Returns a note, by name, if an executor had no time for all numbers of tokens."""
    had = min(len(rank.us) for rank in by_rank)
    if had == wanted or any(rank.refused for rank in by_rank):
        return {}
    return {part.name: f"{part}: {had} of {wanted} numbers of tokens"}


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
