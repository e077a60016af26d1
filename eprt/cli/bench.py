"""Runs `eprt bench experts | router | exchange | step`; holds what all benches share: progress, stored results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from eprt.bench.plot import plot
from eprt.bench.report import Report, Row
from eprt.cli.arguments import Bench, BenchExchange, BenchExperts, BenchRouter, BenchStep, PlottedBench
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal, columns, counted
from eprt.config import RuntimeConfig
from eprt.errors import ConfigError
from eprt.plan import backends_of
from eprt.rounding import round_up

MOST_TOKENS = 1 << 20  # far above any batch, and of a size that a host can hold


def lower_bound(row: Row) -> float:
    """Returns the larger of the times that memory traffic and arithmetic alone take, in microseconds."""
    return max(row["weights_us"], row["flops_us"])


EXPERTS = columns(
    "executor | weights = weight_format | tokens in = tokens | rows per expert = rows_per_expert | eprt = us | "
    "by hand = by_hand_us | bare library = library_us | floor | eprt/floor = ratio | host time = host_us",
    floor=lower_bound,
)
STEP = columns(
    "tokens | path | step p50/p99 = step_p50_us/step_p99_us:.1f | of eager = of_eager | of graph = of_graph | "
    "host = host_us | host per layer = host_us_per_layer | host in an MoE block = moe_host_us"
)
ROUTER = columns(
    "tokens | eprt = us | plain torch = torch_us | floor | host time = host_us | of torch = torch_host_us",
    floor=lower_bound,
)


def bench_experts(arguments: BenchExperts, terminal: Terminal) -> int:
    from eprt.bench.experts import experts_report
    from eprt.bench.shapes import SHAPES

    require_tokens(arguments.tokens, 1)
    terminal.say("bench experts: weights are prepared and kernels tuned first, which takes minutes without a cache")
    report = experts_report(
        arguments.shapes or SHAPES,
        arguments.executors or None,
        tokens=arguments.tokens,
        runtime=RuntimeConfig(low_precision_activations=arguments.low_precision_activations),
        libraries=arguments.libraries,
        routing=arguments.routing,
        keep=keep(arguments, terminal),
    )
    for shape, rows in groups(report, "shape"):
        title = f"{shape}: microseconds of one call in a CUDA graph, permute and un-permute included"
        terminal.table(title, EXPERTS, rows)
    return finish(report, arguments, terminal)


def bench_exchange(arguments: BenchExchange, terminal: Terminal) -> int:
    from eprt.bench.dispatch import exchange_report, measure_exchange

    if arguments.rounds < 1:
        raise ConfigError(f"--rounds {arguments.rounds}: expected at least one")
    with ranks(arguments.world, arguments.device) as workers:
        require_peers(workers, "bench exchange", "nobody to agree with")
        report = exchange_report(workers.run(measure_exchange, rounds=arguments.rounds), arguments.rounds)
    what = f"{workers}, {report.rows[0]['words']} words per rank"
    terminal.table(
        f"Agreement of the ranks, microseconds of the slowest rank ({what})",
        columns("exchange | p50 = p50_us | p99 = p99_us"),
        report.rows,
    )
    return finish(report, arguments, terminal)


def bench_router(arguments: BenchRouter, terminal: Terminal) -> int:
    from eprt.bench.router import SHAPES, router_report

    require_tokens(arguments.tokens, 1)
    report = router_report(arguments.shapes or SHAPES, tokens=arguments.tokens, keep=keep(arguments, terminal))
    for shape, rows in groups(report, "shape"):
        torch_rows = {row["tokens"]: row for row in rows if row["router"] == "torch"}
        pairs = [(row, torch_rows[row["tokens"]]) for row in rows if row["router"] == "eprt"]
        terminal.table(
            f"{shape}: microseconds of one call in a CUDA graph that reads each weight from memory",
            ROUTER,
            [{**ours, "torch_us": theirs["us"], "torch_host_us": theirs["host_us"]} for ours, theirs in pairs],
        )
    return finish(report, arguments, terminal)


def bench_step(arguments: BenchStep, terminal: Terminal) -> int:
    from eprt.bench.step import StepCase, measure_step, step_rows

    require_tokens(arguments.tokens, 1)
    require_names("--models", arguments.models)
    asked = RuntimeConfig(arguments.dispatcher, arguments.executor)
    backends_of(asked)
    if arguments.layers < 1 or arguments.rounds < 1:
        raise ConfigError(f"--layers {arguments.layers} --rounds {arguments.rounds}: must be at least 1")
    sizes = arguments.layers, arguments.tokens, asked, arguments.rounds
    cases = [StepCase(model, *sizes) for model in arguments.models]
    with ranks(arguments.world, arguments.device) as workers:
        report = measured(Report("step", []), cases, measure_step, step_rows, workers, arguments, terminal)
    layers = counted(arguments.layers, "layer")
    for model, rows in groups(report, "model"):
        terminal.table(
            f"One step of {layers} of {model}, microseconds ({workers}; {rows[-1]['pair']})",
            STEP,
            sorted(rows, key=lambda row: row["tokens"]),
        )
    terminal.say("\nof eager, of graph: the step's time over transformers' own, eager and in a CUDA graph")
    return finish(report, arguments, terminal)


# ---- shared by all benches --------------------------------------------------------------------------------------


def measured(
    report: Report,
    cases: Sequence[Any],
    job: Callable[..., Any],
    rows_of: Callable[[Any, list[Any]], Iterable[Row | str]],
    workers: Ranks,
    arguments: Bench,
    terminal: Terminal,
) -> Report:
    """Fills a report case by case by `job(context, case=...)` on all ranks, stores it after each, and shows progress.

    Args:
        rows_of: the rows and notes of a case, from the ranks' results; not asked where one says why not (`or_reason`).
    """
    store = keep(arguments, terminal)
    with terminal.progress(f"bench {report.bench}", len(cases)) as advance:
        for case in cases:
            by_rank = workers.run(job, case=case)
            reason = next((rank for rank in by_rank if isinstance(rank, str)), "")
            report.add([f"{case.what}: {reason}"] if reason else rows_of(case, by_rank))
            store(report)
            advance(str(case))
    return report


def groups(report: Report, *keys: str) -> list[tuple[Any, list[Row]]]:
    """Returns the rows of each value of `keys` (a tuple of values for more than one key), in order of appearance."""
    found: dict[Any, list[Row]] = {}
    for row in report.rows:
        values = tuple(row[key] for key in keys)
        found.setdefault(values if len(keys) > 1 else values[0], []).append(row)
    return list(found.items())


def require_tokens(tokens: Sequence[int], least: int) -> None:
    """Raises ConfigError unless `tokens` has numbers, each from `least` to `MOST_TOKENS`."""
    if not tokens or min(tokens) < least or max(tokens) > MOST_TOKENS:
        said = " ".join(map(str, tokens))
        raise ConfigError(f"--tokens {said}: expected at least one number, none below {least} or above {MOST_TOKENS}")


def require_names(option: str, names: Sequence[str]) -> None:
    """Raises ConfigError where a list of what to measure is empty."""
    if not names:
        raise ConfigError(f"{option}: expected at least one name; leave the flag out for its default")


def say_more_replicas(replicas: int, num_experts: int, ranks: int, terminal: Terminal) -> None:
    """Says how many slots `--replicas` stands for where it is more than asked for: ranks have as many slots each."""
    if (found := round_up(num_experts + replicas, ranks) - num_experts) != replicas:
        terminal.say(
            f"--replicas {replicas}: {counted(found, 'slot')} beyond the {num_experts} experts, so that each of "
            f"{ranks} ranks has as many"
        )


def require_peers(workers: Ranks, what: str, why: str) -> None:
    """Raises ConfigError in a world of one rank."""
    if workers.size == 1:
        raise ConfigError(f"{what} in a world of one: {why}; use --world 2 or more")


def keep(arguments: Bench, terminal: Terminal) -> Callable[[Report], None]:
    """Returns a function that stores a report after each case: a bench that is stopped leaves what it found. A pipe
    gets the last one alone."""
    path = arguments.output
    if path is None or not terminal.speaks or (path.exists() and not path.is_file()):
        return lambda report: None
    return lambda report: report.write(path)


def finish(report: Report, arguments: Bench, terminal: Terminal, wrong: Sequence[str] = ()) -> int:
    """Prints what was left out and what is wrong, stores and plots the report. Returns 1 if anything is wrong, and 2 if
    nothing at all could be measured."""
    terminal.say(*(f"left out: {note}" for note in report.notes), *(f"FAIL: {text}" for text in wrong))
    if terminal.speaks:
        terminal.result(report.as_dict())
        if arguments.output is not None:
            report.write(arguments.output)  # also where nothing could be measured
            terminal.say(f"\nwrote {arguments.output}")
        if isinstance(arguments, PlottedBench) and arguments.plot is not None:
            plot(report, arguments.plot)
            terminal.say(f"wrote {arguments.plot}")
    if not report.rows:
        terminal.error("nothing could be measured: what was left out says why")
        return ConfigError.exit_code
    return int(bool(wrong))
