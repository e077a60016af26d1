"""Runs `eprt tune`: measures this machine for one model, stores the rows for the plan, and shows what changed."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Any

from eprt.bench.report import Report, write_whole
from eprt.cli.bench import require_tokens
from eprt.cli.explain import kinds_of_layers
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Column, Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.models.published import model_config
from eprt.plan import Plan, make_plan
from eprt.plan.measured import own_path, own_tables
from eprt.ranks.stacks import WorldFailed
from eprt.support import Device

if TYPE_CHECKING:
    from eprt.bench.tune import Measurement
    from eprt.cli.arguments import Tune

PHASES = ("decode", "prefill")
SHARE = 0.5  # of the seconds left, what a part may take while others wait
LEAST_S = 2.0  # left of the budget for a part to be begun


def tune(arguments: Tune, terminal: Terminal) -> int:
    """Measures and stores rows. Returns 0."""
    require_tokens(arguments.tokens, 1)
    if arguments.budget_s <= 0:
        raise ConfigError(f"--budget-s {arguments.budget_s:g}: expected seconds, more than 0")
    start = time.monotonic()
    config = kinds_of_layers(model_config(arguments.model))[0][0]
    with ranks(arguments.world, arguments.device) as workers:
        sm, tables, cut = _measure(workers, config, arguments, terminal, start)
        parallel = ParallelConfig(workers.size)
    device, most, path = Device("cuda" if sm else "cpu", sm), max(arguments.tokens), own_path()
    before = [_plan(config, parallel, phase, most, device) for phase in PHASES]
    if os.environ.get("LOCAL_RANK", "0") == "0":
        write_whole(path, json.dumps(_merged(own_tables(), tables), indent=1) + "\n")
    after = [_plan(config, parallel, phase, most, device) for phase in PHASES]
    where = f"{parallel.world_size} x {device}, at most {most} tokens per rank"
    plans = list(zip(PHASES, before, after, strict=True))
    terminal.table(f"Pairs that are chosen for {arguments.model} on {where}", CHOICES, plans)
    rows = sum(len(table["rows"]) for table in tables)
    terminal.say(
        f"\n{rows} rows written to {path}; explain and every layer built here go by them first. To undo: remove it"
    )
    for line in cut:
        terminal.say(f"cut: {line}")
    if cut:
        budget = f"{arguments.budget_s:g} s (--budget-s)"
        terminal.say(f"measuring may take {budget}; compiled kernels are kept for the next time")
    changed = {phase: {"before": _pair(old), "now": _pair(new)} for phase, old, new in plans}
    terminal.result({"model": str(arguments.model), "path": str(path), "tables": tables, "plans": changed, "cut": cut})
    if arguments.output is not None and terminal.speaks:
        facts = {"seconds": round(time.monotonic() - start, 1), "budget_s": arguments.budget_s}
        found = [{"phase": phase, **pairs} for phase, pairs in changed.items()]
        Report("tune", found, facts, cut).write(arguments.output)
    return 0


def _measure(
    workers: Ranks, config: MoEConfig, arguments: Tune, terminal: Terminal, start: float
) -> tuple[int, list[dict[str, Any]], list[str]]:
    """Returns (SM, tables of rows, notes on what was cut). Each part gets at most half of the seconds that are left,
    the last part all of them."""
    from eprt.bench import tune as bench
    from eprt.bench.dispatch import measure_dispatch

    todo = bench.parts(config, arguments.tokens, workers.size, workers.device)
    counts = tuple(count * workers.size for count in arguments.tokens)
    times: dict[str, list[Any]] = {}
    carried: list[tuple[Any, list[Any]]] = []
    cut: dict[str, str] = {}
    sm: int = workers.run(bench.generation)[0]
    with terminal.progress("tune", len(todo)) as advance:
        for part in todo:
            # Ranks of torchrun must decide alike, so the slowest one's clock counts for all.
            left = arguments.budget_s - max(workers.run(bench.elapsed, since=start))
            limit = left if part is todo[-1] else SHARE * left
            if part.name not in cut and left <= LEAST_S:
                cut[part.name] = f"{part}: not begun, the time was over"
            try:
                if part.name in cut:
                    pass
                elif part.case is not None:
                    carried.append((part.case, workers.run(measure_dispatch, within_s=limit, case=part.case)))
                else:
                    wanted = {"name": part.name, "config": config, "tokens": counts, "seconds": 0.8 * limit}
                    times[part.name] = workers.run(bench.measure_experts, within_s=limit, **wanted)
                    cut |= _missing(part, times[part.name], len(counts))
            except WorldFailed as failed:
                if not failed.late:
                    raise
                cut[part.name] = f"{part}: ended after {limit:.0f} s"
            advance(str(part))
    tables = [bench.experts_table(sm, config, workers.size, times), bench.dispatch_table(sm, workers.size, carried)]
    return sm, [table for table in tables if table["rows"]], list(cut.values())


def _missing(part: Measurement, by_rank: list[Any], wanted: int) -> dict[str, str]:
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


def _plan(config: MoEConfig, parallel: ParallelConfig, phase: Any, most: int, device: Device) -> Plan | None:
    try:
        return make_plan(config, parallel, RuntimeConfig(phase=phase, max_tokens_per_rank=most), device)
    except UnsupportedError:
        return None


def _pair(plan: Plan | None) -> str:
    return "nothing" if plan is None else f"{plan.dispatcher} + {plan.executor}"


def _us(plan: Plan | None) -> str | None:
    return None if plan is None or plan.chosen.us is None else f"{plan.chosen.us:.0f}"


CHOICES: dict[str, Column] = {
    "phase": lambda row: row[0],
    "before": lambda row: _pair(row[1]),
    "now": lambda row: _pair(row[2]),
    "us before": lambda row: _us(row[1]),
    "us now": lambda row: _us(row[2]),
}
