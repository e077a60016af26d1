"""`eprt bench layer --routing`: a planned placement beside experts in order, in one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eprt.bench import placed
from eprt.bench.layer import shape_config
from eprt.bench.placed import PlacedCase, measure_placed, placed_report, planned_slots
from eprt.bench.report import Report
from eprt.bench.routings import read_routing
from eprt.cli.arguments import BenchLayer
from eprt.cli.ranks import ranks
from eprt.cli.terminal import Terminal
from eprt.errors import ConfigError
from eprt.placement.file import PlacementFile


def bench_placed(arguments: BenchLayer, terminal: Terminal, keep: Callable[[Report], None]) -> Report:
    """Print the table; what was found, to be kept."""
    if arguments.routing is None:
        raise ConfigError(
            "--replicas and --placement measure a placement under uneven choices: say which, --routing ..."
        )
    if arguments.replicas is not None and arguments.placement is not None:
        raise ConfigError("--replicas plans a placement, --placement names one: give one of them")
    if arguments.every_pair:
        raise ConfigError("--every-pair with --routing: name one pair, --dispatcher and --executor")
    if (arguments.replicas or 0) < 0 or not arguments.tokens or min(arguments.tokens) < 1:
        raise ConfigError(
            f"--replicas {arguments.replicas} --tokens {' '.join(map(str, arguments.tokens))}: expected replicas from "
            "0 on, and tokens from 1 on"
        )
    file = None if arguments.placement is None else PlacementFile.read(arguments.placement)
    with ranks(arguments.world, arguments.device) as workers:
        if workers.size == 1:
            raise ConfigError("--routing in a world of one: there is no other rank to be hotter than; use --world 2")
        cases = [case for shape in arguments.shapes for case in _cases(shape, arguments, workers.size, file)]
        with terminal.progress("bench layer", len(cases)) as progress:

            def run(case: PlacedCase) -> list[Any]:
                found = workers.run(measure_placed, case=case)
                progress.advance(f"{case.shape}, {case.tokens} tokens a rank")
                return found

            report = placed_report(cases, run, keep)
        what = f"{workers.size} x {workers.device}, {arguments.routing}"
    terminal.table(
        f"One layer with its experts in order, and with replicas where they were planned ({what}); microseconds",
        [
            "shape",
            "tokens",
            "rows an expert",
            "experts lie",
            "slots",
            "max/mean",
            "pair",
            "layer p50/p99",
            "gain",
            "model's us",
            "model's gain",
        ],
        [
            [
                row["shape"],
                row["tokens"],
                row["rows_per_expert"],
                row["placement"],
                row["slots"],
                row["imbalance"],
                row["pair"],
                f"{row['layer_p50_us']}/{row['layer_p99_us']}",
                row["gain"],
                *("-" if row[name] is None else row[name] for name in ("predicted_us", "predicted_gain")),
            ]
            for row in report.rows
        ],
    )
    return report


def say_wrong(report: Report, terminal: Terminal) -> int:
    """1, and words, if the two layers' sums differ by more than rounding."""
    wrong = [row for row in report.rows if not row["error"] <= placed.TOLERANCE]
    for row in wrong:
        what = f"{row['shape']}, {row['tokens']} tokens: experts {row['placement']}"
        terminal.say(f"FAIL: {what}: sums differ by {row['error']:.1e}, at most {placed.TOLERANCE:g} may be rounding")
    return int(bool(wrong))


def _cases(shape: str, arguments: BenchLayer, size: int, file: PlacementFile | None) -> list[PlacedCase]:
    """The first layer of the routing's, for each number of tokens."""
    config, routing = shape_config(shape), arguments.routing or ""
    routed = read_routing(routing, config.num_experts, config.top_k)[0]
    slots = planned_slots(config, size, routed, arguments.replicas, file)
    pair = (arguments.dispatcher, arguments.executor)
    return [PlacedCase(shape, tokens, routed, routing, slots, *pair) for tokens in arguments.tokens]
