"""Runs `eprt bench dispatch`: measures the transports, or with --simulate layers of worlds that needn't be here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from eprt.bench.baselines import MISSING, baselines
from eprt.bench.dispatch import CHECK_TOLERANCE, DispatchCase, dispatch_rows, measure_dispatch, push_rate, transports
from eprt.bench.report import Report
from eprt.bench.simulate import SimulatedWorld, simulation_report
from eprt.cli.arguments import BenchDispatch
from eprt.cli.bench import (
    finish,
    groups,
    keep,
    measured,
    require_names,
    require_peers,
    require_tokens,
    say_more_replicas,
)
from eprt.cli.explain import kinds_of_layers
from eprt.cli.parsing import changed
from eprt.cli.ranks import ranks
from eprt.cli.terminal import Column, Terminal, columns
from eprt.config import ParallelConfig
from eprt.errors import ConfigError
from eprt.models.published import model_config
from eprt.support import Device

SIZES = {"h2880k4": (2880, 4), "h7168k8": (7168, 8)}
MEASURED = ("world", "device", "shapes", "routings", "payload")  # flags that a simulation has no use for
SIMULATED = columns(
    "tokens | routing | experts lie = placement | max/mean = imbalance | transport | "
    "ranks per token = ranks_of_a_token | MB in, mean = received_mb:.1f | hottest = hottest_mb:.1f | "
    "dispatch us = dispatch_us:.0f | experts us = experts_us:.0f | of mean rank = mean_experts_us:.0f | "
    "layer us = us:.0f | gain = gain:.2f"
)


def bench_dispatch(arguments: BenchDispatch, terminal: Terminal) -> int:
    """Measures transports. Returns 1 if a transport's sums were wrong, else 0."""
    require_tokens(arguments.tokens, 1)
    _require_one_kind(arguments)
    if arguments.simulate:
        return finish(_simulate(arguments, terminal), arguments, terminal)
    with ranks(arguments.world, arguments.device) as workers:
        require_peers(workers, "bench dispatch", "nothing would travel")
        cases = _cases(arguments, workers.device)
        rate = min(workers.run(push_rate))
        limits, notes = {"push_gb_per_s": round(rate / 1e3, 2)}, [] if baselines() else [MISSING]
        report, rows_of = Report("dispatch", [], limits, notes), partial(dispatch_rows, bytes_per_us=rate)
        measured(report, cases, measure_dispatch, rows_of, workers, arguments, terminal)
    _say(report, f"{workers}, {arguments.payload}", terminal)
    wrong = [
        f"{row['transport']} at {row['tokens']} tokens returned wrong sums, error {row['error']:.1e}"
        for row in report.rows
        if row["error"] is not None and not row["error"] <= CHECK_TOLERANCE
    ]
    return finish(report, arguments, terminal, wrong)


def _require_one_kind(arguments: BenchDispatch) -> None:
    """Raises ConfigError for flags that would do nothing: a simulation's without --simulate, or a measurement's with
    it; and for lists of nothing."""
    asked = arguments.simulation
    if not arguments.simulate and asked != BenchDispatch().simulation:
        of_simulations = ", ".join(f"--{field.name.replace('_', '-')}" for field in fields(asked))
        raise ConfigError(f"{of_simulations} are of worlds that are simulated: add --simulate")
    if arguments.simulate and changed(arguments, MEASURED):
        raise ConfigError(f"--{', --'.join(MEASURED)} are of what is measured: --simulate takes --ranks and --routing")
    require_names("--shapes", arguments.shapes)
    require_names("--routings", arguments.routings)
    require_names("--routing", asked.routing)


def _cases(arguments: BenchDispatch, device: str) -> list[DispatchCase]:
    known = transports(device)
    if unknown := [name for name in arguments.transports if name not in known]:
        raise ConfigError(f"--transports {unknown[0]!r}: on {device} there are {', '.join(known)}")
    return [
        DispatchCase(name, *SIZES[shape], tokens, routing, arguments.payload)
        for shape in arguments.shapes
        for routing in arguments.routings
        for tokens in arguments.tokens
        for name in arguments.transports or known
    ]


def _say(report: Report, what: str, terminal: Terminal) -> None:
    """Prints two tables for each shape and routing, one line for each size: the round trip, then dispatch alone."""
    for (hidden, top_k, routing), rows in groups(report, "hidden", "top_k", "routing"):
        case = f"hidden {hidden}, top-{top_k}, {routing} ({what})"
        facts: dict[str, Column] = {
            "remote MB": lambda row: f"{row['remote_bytes'] / 1e6:.2f}",
            "floor": "floor_us:.1f",
        }
        title = f"Dispatch + combine, {case}: microseconds, p50/p99 of the slowest rank"
        terminal.table(title, *_by_size(rows, facts, lambda row: f"{row['p50_us']:.1f}/{row['p99_us']:.1f}"))
        if alone := [row for row in rows if row["dispatch_us"] is not None]:
            title = f"Dispatch alone, {case}: microseconds, p50 of the slowest rank"
            facts = {"floor": "dispatch_floor_us:.1f"}
            terminal.table(title, *_by_size(alone, facts, lambda row: f"{row['dispatch_us']:.1f}"))
    terminal.say(f"\nfloor: bytes that must move at the {report.limits['push_gb_per_s']} GB/s measured in this run")


def _by_size(
    rows: list[dict[str, Any]], facts: dict[str, Column], time: Callable[[dict[str, Any]], str]
) -> tuple[dict[str, Column], list[dict[str, Any]]]:
    """Returns the columns and rows of a table: one row for each number of tokens, with each transport's time."""
    names = {row["transport"]: f"time of {row['transport']}" for row in rows}
    lines: dict[int, dict[str, Any]] = {}
    for row in rows:
        lines.setdefault(row["tokens"], dict(row))[names[row["transport"]]] = time(row)
    return {"tokens": "tokens", **facts, **names}, list(lines.values())


def _simulate(arguments: BenchDispatch, terminal: Terminal) -> Report:
    asked = arguments.simulation
    if arguments.plot is not None:
        raise ConfigError("--plot draws what was measured: a simulation has tables, and --output FILE")
    if min(asked.ranks, default=0) < 2 or asked.ranks_per_host < 1 or asked.replicas < 0:
        raise ConfigError(
            f"--ranks {' '.join(map(str, asked.ranks))} --ranks-per-host {asked.ranks_per_host} --replicas "
            f"{asked.replicas}: expected worlds of two ranks or more, at least one rank per host, replicas from 0 on"
        )
    config, device = kinds_of_layers(model_config(asked.model))[0][0], Device.parse(asked.gpu)
    placements = [(0, False), *(((asked.replicas, one) for one in (False, True)) if asked.replicas else ())]
    worlds = [
        SimulatedWorld(config, parallel, device, routing, *placed)
        for parallel in [ParallelConfig(size, ranks_per_host=min(size, asked.ranks_per_host)) for size in asked.ranks]
        for routing in asked.routing
        for placed in placements
    ]
    report = simulation_report(worlds, arguments.tokens, arguments.transports, keep(arguments, terminal))
    for size, rows in groups(report, "ranks"):
        if asked.replicas:
            say_more_replicas(asked.replicas, config.num_experts, size, terminal)
        what = f"{size} x {device}, {asked.ranks_per_host} per host, one layer of {asked.model}"
        terminal.table(f"Simulated, not measured: {what}; the hottest rank sets the pace", SIMULATED, rows)
    return report
