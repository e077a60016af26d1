"""`eprt tune`: measure this machine for one model, keep the rows where the plan finds them, show what changed."""

from __future__ import annotations

import json
import os
from typing import Any

from eprt.cli.arguments import Tune
from eprt.cli.explain import kinds_of_layers
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UnsupportedError
from eprt.models.published import model_config
from eprt.plan import Plan, make_plan
from eprt.plan.measured import own_path, own_tables
from eprt.support import Device

PHASES = ("decode", "prefill")


def tune(arguments: Tune, terminal: Terminal) -> int:
    """The command. Returns 0."""
    if not arguments.tokens or min(arguments.tokens) < 1:
        raise ConfigError(
            f"--tokens {' '.join(map(str, arguments.tokens))}: expected at least one number, none below 1"
        )
    config = kinds_of_layers(model_config(arguments.model))[0][0]
    with ranks(arguments.world, arguments.device) as workers:
        sm, tables = _measure(workers, config, arguments, terminal)
        parallel = ParallelConfig(workers.size)
    device = Device("cuda" if sm else "cpu", sm)
    most = max(arguments.tokens)
    before = {phase: _plan(config, parallel, phase, most, device) for phase in PHASES}
    path = own_path()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps(_merged(own_tables(), tables), indent=1) + "\n")
        beside.replace(path)  # whoever reads meanwhile sees the old file or the new one
    after = {phase: _plan(config, parallel, phase, most, device) for phase in PHASES}
    terminal.table(
        f"What is chosen for {arguments.model} on {workers.size} x {device}, {most} tokens a rank at most",
        ["phase", "before", "now", "us before", "us now"],
        [[phase, _pair(before[phase]), _pair(after[phase]), _us(before[phase]), _us(after[phase])] for phase in PHASES],
    )
    rows = sum(len(table["rows"]) for table in tables)
    terminal.say(
        f"\n{rows} rows written to {path}; explain and every layer built here go by them first. To undo: remove it"
    )
    changed = {phase: {"before": _pair(before[phase]), "now": _pair(after[phase])} for phase in PHASES}
    terminal.result({"model": str(arguments.model), "path": str(path), "tables": tables, "plans": changed})
    return 0


def _measure(
    workers: Ranks, config: MoEConfig, arguments: Tune, terminal: Terminal
) -> tuple[int, list[dict[str, Any]]]:
    """(SM, tables of rows)."""
    from eprt.bench import tune as bench
    from eprt.bench.dispatch import measure_dispatch

    cases = bench.dispatch_cases(config, arguments.tokens, workers.device) if workers.size > 1 else []
    names = bench.executors_here(workers.device)
    counts = tuple(count * workers.size for count in arguments.tokens)
    with terminal.progress("tune", len(cases) + len(names)) as progress:
        times: dict[str, list[Any]] = {}
        for name in names:
            times[name] = workers.run(bench.measure_experts, name=name, config=config, tokens=counts)
            progress.advance(f"experts by {name}")
        carried: list[tuple[Any, list[Any]]] = []
        for case in cases:
            carried.append((case, workers.run(measure_dispatch, case=case)))
            progress.advance(f"{case.transport}, {case.tokens} tokens a rank")
    experts = bench.experts_table(config, workers.size, times)
    sm: int = experts["sm"]
    tables = [experts, bench.dispatch_table(sm, workers.size, carried)]
    return sm, [table for table in tables if table["rows"]]


def _merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new tables first; of the old ones, rows whose sizes weren't measured again."""
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


def _us(plan: Plan | None) -> str:
    return "-" if plan is None or plan.chosen.us is None else f"{plan.chosen.us:.0f}"
