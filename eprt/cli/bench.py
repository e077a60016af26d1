"""`eprt bench layer | dispatch | experts | router | exchange | step`: measure, print, store, plot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from eprt.bench.report import Report
from eprt.cli.arguments import BenchDispatch, BenchExchange, BenchExperts, BenchLayer, BenchRouter, BenchStep
from eprt.cli.ranks import ranks
from eprt.cli.terminal import Terminal
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError

AnyBench = BenchLayer | BenchDispatch | BenchExperts | BenchRouter | BenchStep
SIZES = {"h2880k4": (2880, 4), "h7168k8": (7168, 8)}


def bench_layer(arguments: BenchLayer, terminal: Terminal) -> int:
    """The command. Returns 1 if a placement changed a layer's sums, else 0."""
    from eprt.bench.layer import LayerCase, layer_report, measure_layer, pairs_here, shape_config

    if arguments.routing is not None or arguments.replicas is not None or arguments.placement is not None:
        from eprt.cli.bench_placed import bench_placed, say_wrong

        report = bench_placed(arguments, terminal, _keep(arguments, terminal))
        _say_notes(report, terminal)
        wrong = say_wrong(report, terminal)
        return _finish(report, arguments, terminal) or wrong
    _require_tokens(arguments.tokens, 0)
    for shape in arguments.shapes:
        shape_config(shape)
    with ranks(arguments.world, arguments.device) as workers:
        asked = [
            LayerCase(
                shape,
                arguments.tokens,
                arguments.dispatcher,
                arguments.executor,
                low_precision_activations=arguments.low_precision_activations,
            )
            for shape in arguments.shapes
        ]
        cases, notes = asked, list[str]()
        if arguments.every_pair:
            found = [workers.run(pairs_here, case=case)[0] for case in asked]
            cases = [pair for pairs, _ in found for pair in pairs]
            notes = [f"{case.shape}, {line}" for case, (_, lines) in zip(asked, found, strict=True) for line in lines]
        with terminal.progress("bench layer", len(cases)) as progress:

            def run(case: LayerCase) -> list[Any]:
                times = workers.run(measure_layer, case=case)
                progress.advance(f"{case.shape}, {case.dispatcher} + {case.executor}")
                return times

            report = layer_report(cases, run, _keep(arguments, terminal), notes)
        what = f"{workers.size} x {workers.device}"
    for shape in arguments.shapes:
        _say_layer(shape, [row for row in report.rows if row["shape"] == shape], what, terminal)
    _say_notes(report, terminal)
    return _finish(report, arguments, terminal)


def _say_layer(shape: str, rows: list[dict[str, Any]], what: str, terminal: Terminal) -> None:
    from eprt.layer import PHASES

    rows = sorted(rows, key=lambda row: row["tokens"])
    terminal.table(
        f"Phases of one layer call, microseconds, p50/p99 of the slowest rank ({shape}, {what})",
        ["tokens", "rows an expert", "pair", *PHASES],
        [
            [row["tokens"], row["rows_per_expert"], row["pair"], *(_both(row, phase) for phase in PHASES)]
            for row in rows
        ],
    )
    terminal.table(
        "Host time of one call: ExpertParallelMoE beside the same steps by hand (no checks, no header exchange)",
        ["tokens", "pair", "layer", "by hand", "overhead", "layer in a graph", "by hand in a graph", "ratio"],
        [
            [
                row["tokens"],
                row["pair"],
                _both(row, "layer"),
                _both(row, "by_hand"),
                row["overhead_us"],
                _both(row, "layer_graph"),
                _both(row, "by_hand_graph"),
                row.get("graph_ratio", "-"),
            ]
            for row in rows
        ],
    )


def bench_dispatch(arguments: BenchDispatch, terminal: Terminal) -> int:
    """The command. Returns 1 if a transport's sums were wrong, else 0."""
    from eprt.bench.dispatch import CHECK_TOLERANCE, DispatchCase, dispatch_report, measure_dispatch, transports
    from eprt.bench.push import push_rate

    _require_tokens(arguments.tokens, 1)
    if arguments.simulate:
        from eprt.cli.bench_simulate import simulate

        report = simulate(arguments, terminal, _keep(arguments, terminal))
        _say_notes(report, terminal)
        return _finish(report, arguments, terminal)
    with ranks(arguments.world, arguments.device) as workers:
        if workers.size == 1:
            raise ConfigError("bench dispatch in a world of one: nothing would travel; use --world 2 or more")
        known = transports(workers.device)
        if unknown := [name for name in arguments.transports if name not in known]:
            raise ConfigError(f"--transports {unknown[0]!r}: on {workers.device} there are {', '.join(known)}")
        cases = [
            DispatchCase(name, *SIZES[shape], tokens, routing, arguments.payload)
            for shape in arguments.shapes
            for routing in arguments.routings
            for tokens in arguments.tokens
            for name in arguments.transports or known
        ]
        rate = min(workers.run(push_rate))
        with terminal.progress("bench dispatch", len(cases)) as progress:

            def run(case: DispatchCase) -> list[Any]:
                found = workers.run(measure_dispatch, case=case)
                progress.advance(f"{case.transport}, hidden {case.hidden}, {case.tokens} tokens a rank")
                return found

            report = dispatch_report(cases, run, rate, _keep(arguments, terminal))
        what = f"{workers.size} x {workers.device}, {arguments.payload}"
    _say_dispatch(report, what, terminal)
    wrong = [row for row in report.rows if row["error"] is not None and not row["error"] <= CHECK_TOLERANCE]
    for row in wrong:
        terminal.say(
            f"FAIL: {row['transport']} at {row['tokens']} tokens returned wrong sums, error {row['error']:.1e}"
        )
    _finish(report, arguments, terminal)
    return 1 if wrong else 0


def bench_experts(arguments: BenchExperts, terminal: Terminal) -> int:
    """The command. Returns 0."""
    from eprt.bench.experts import SHAPES, experts_report

    _require_tokens(arguments.tokens, 1)
    terminal.say("bench experts: weights are prepared and kernels tuned first, which takes minutes without a cache")
    report = experts_report(
        arguments.shapes or SHAPES,
        arguments.executors or None,
        tokens=arguments.tokens,
        runtime=RuntimeConfig(low_precision_activations=arguments.low_precision_activations),
        libraries=arguments.libraries,
        keep=_keep(arguments, terminal),
    )
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in report.rows:
        groups[row["shape"]].append(row)
    for shape, some in groups.items():
        terminal.table(
            f"{shape}: microseconds of one call in a CUDA graph, permute and un-permute included",
            [
                "executor",
                "weights",
                "tokens in",
                "rows an expert",
                "eprt",
                "by hand",
                "bare library",
                "floor",
                "eprt/floor",
                "host time",
            ],
            [
                [
                    row["executor"],
                    row["weight_format"],
                    row["tokens"],
                    row["rows_per_expert"],
                    row["us"],
                    *("-" if row[name] is None else row[name] for name in ("by_hand_us", "library_us")),
                    _floor(row),
                    row["ratio"],
                    row["host_us"],
                ]
                for row in some
            ],
        )
    _say_notes(report, terminal)
    return _finish(report, arguments, terminal)


def bench_exchange(arguments: BenchExchange, terminal: Terminal) -> int:
    """The command. Returns 0."""
    from eprt.bench.exchange import exchange_report, measure_exchange

    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: expected at least one")
    with ranks(arguments.world, arguments.device) as workers:
        if workers.size == 1:
            raise ConfigError("bench exchange in a world of one: nobody to agree with; use --world 2 or more")
        report = exchange_report(workers.run(measure_exchange, rounds=arguments.rounds), arguments.rounds)
        what = f"{workers.size} x {workers.device}"
    terminal.table(
        f"Agreement of the ranks, microseconds of the slowest rank ({what}, {report.rows[0]['words']} words a rank)",
        ["exchange", "p50", "p99"],
        [[row["exchange"], row["p50_us"], row["p99_us"]] for row in report.rows],
    )
    return _finish(report, arguments, terminal)


def bench_router(arguments: BenchRouter, terminal: Terminal) -> int:
    """The command. Returns 0."""
    from eprt.bench.router import SHAPES, router_report

    _require_tokens(arguments.tokens, 1)
    report = router_report(arguments.shapes or SHAPES, tokens=arguments.tokens, keep=_keep(arguments, terminal))
    found = {(row["shape"], row["tokens"], row["router"]): row for row in report.rows}
    for shape in dict.fromkeys(row["shape"] for row in report.rows):
        pairs = [(found[shape, tokens, "eprt"], found[shape, tokens, "torch"]) for tokens in arguments.tokens]
        terminal.table(
            f"{shape}: microseconds of one call in a CUDA graph that reads each weight from memory",
            ["tokens", "eprt", "plain torch", "floor", "host time", "of torch"],
            [
                [ours["tokens"], ours["us"], theirs["us"], _floor(ours), ours["host_us"], theirs["host_us"]]
                for ours, theirs in pairs
            ],
        )
    return _finish(report, arguments, terminal)


def _floor(row: dict[str, Any]) -> float:
    return max(row["weights_us"], row["flops_us"])


def bench_step(arguments: BenchStep, terminal: Terminal) -> int:
    """The command. Returns 0."""
    from eprt.bench.step import StepCase, measure_step, step_report

    _require_tokens(arguments.tokens, 1)
    if arguments.layers < 1 or arguments.rounds < 1:
        raise ConfigError(f"--layers {arguments.layers} --rounds {arguments.rounds}: must be at least 1")
    cases = [
        StepCase(model, arguments.layers, arguments.tokens, arguments.dispatcher, arguments.executor, arguments.rounds)
        for model in arguments.models
    ]
    with ranks(arguments.world, arguments.device) as workers, terminal.progress("bench step", len(cases)) as progress:

        def run(case: StepCase) -> list[Any]:
            found = workers.run(measure_step, case=case)
            progress.advance(case.model)
            return found

        report = step_report(cases, run, _keep(arguments, terminal))
        what = f"{workers.size} x {workers.device}"
    for model in arguments.models:
        some = [row for row in report.rows if row["model"] == model]
        terminal.table(
            f"One step of {arguments.layers} layers of {model}, microseconds ({what}; {some[-1]['pair']})",
            ["tokens", "path", "step p50/p99", "of eager", "of graph", "host", "host a layer", "host in an MoE block"],
            [
                [
                    row["tokens"],
                    row["path"],
                    _both(row, "step"),
                    *(
                        "-" if row[name] is None else row[name]
                        for name in ("of_eager", "of_graph", "host_us", "host_us_per_layer", "moe_host_us")
                    ),
                ]
                for row in sorted(some, key=lambda row: row["tokens"])
            ],
        )
    terminal.say("\nof eager, of graph: the step's time over transformers' own, eager and in a CUDA graph")
    _say_notes(report, terminal)
    return _finish(report, arguments, terminal)


def _say_dispatch(report: Report, what: str, terminal: Terminal) -> None:
    """Two tables a shape and routing: sizes down, transports across; the round trip, then dispatch alone."""
    groups: dict[tuple[int, int, str], list[dict[str, Any]]] = defaultdict(list)
    for row in report.rows:
        groups[(row["hidden"], row["top_k"], row["routing"])].append(row)
    for (hidden, top_k, routing), rows in groups.items():
        case = f"hidden {hidden}, top-{top_k}, {routing} ({what})"
        terminal.table(
            f"Dispatch + combine, {case}: microseconds, p50/p99 of the slowest rank",
            *_by_size(
                rows,
                {
                    "remote MB": lambda row: f"{row['remote_bytes'] / 1e6:.2f}",
                    "floor": lambda row: f"{row['floor_us']:.1f}",
                },
                lambda row: f"{row['p50_us']:.1f}/{row['p99_us']:.1f}",
            ),
        )
        if alone := [row for row in rows if row["dispatch_us"] is not None]:
            terminal.table(
                f"Dispatch alone, {case}: microseconds, p50 of the slowest rank",
                *_by_size(
                    alone,
                    {"floor": lambda row: f"{row['dispatch_floor_us']:.1f}"},
                    lambda row: f"{row['dispatch_us']:.1f}",
                ),
            )
    terminal.say(f"\nfloor: bytes that must move at the {report.limits['push_gb_per_s']} GB/s measured in this run")
    _say_notes(report, terminal)


def _by_size(
    rows: list[dict[str, Any]], facts: dict[str, Callable[[dict[str, Any]], str]], time: Callable[[dict[str, Any]], str]
) -> tuple[list[str], list[list[object]]]:
    """Heading and lines: a line for each number of tokens, with its facts by name, then each transport's time."""
    names = list(dict.fromkeys(row["transport"] for row in rows))
    lines: list[list[object]] = []
    for tokens in dict.fromkeys(row["tokens"] for row in rows):
        here = {row["transport"]: row for row in rows if row["tokens"] == tokens}
        first = next(iter(here.values()))
        times = [time(here[name]) if name in here else "-" for name in names]
        lines.append([tokens, *(show(first) for show in facts.values()), *times])
    return ["tokens", *facts, *names], lines


def _require_tokens(tokens: Sequence[int], least: int) -> None:
    if not tokens or min(tokens) < least:
        raise ConfigError(f"--tokens {' '.join(map(str, tokens))}: expected at least one number, none below {least}")


def _say_notes(report: Report, terminal: Terminal) -> None:
    for note in report.notes:
        terminal.say(f"left out: {note}")


def _both(row: dict[str, Any], name: str) -> str:
    p50 = row.get(f"{name}_p50_us")
    return "-" if p50 is None else f"{p50:.1f}/{row[f'{name}_p99_us']:.1f}"


def _keep(arguments: AnyBench, terminal: Terminal) -> Callable[[Report], None]:
    """What stores a report after each case: a bench that is stopped leaves what it found."""
    path = arguments.output
    if path is None or not terminal.speaks:
        return lambda report: None
    return lambda report: report.write(path)


def _finish(report: Report, arguments: AnyBench | BenchExchange, terminal: Terminal) -> int:
    """Store and plot, on the rank that speaks."""
    if not terminal.speaks:
        return 0
    terminal.result(report.as_dict())
    if arguments.output is not None:
        report.write(arguments.output)  # also where nothing could be measured
        terminal.say(f"\nwrote {arguments.output}")
    if not isinstance(arguments, BenchExchange) and arguments.plot is not None:
        from eprt.bench.plot import plot

        plot(report, arguments.plot)
        terminal.say(f"wrote {arguments.plot}")
    return 0
