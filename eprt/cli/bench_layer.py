"""Runs `eprt bench layer`: a layer's phases, or with --routing a planned placement beside experts in order."""

from __future__ import annotations

from functools import partial

from eprt.bench.layer import LayerCase, layer_rows, measure_layer, pairs_here, shape_config
from eprt.bench.placed import TOLERANCE, PlacedCase, measure_placed, placed_rows
from eprt.bench.report import Report
from eprt.bench.routings import read_routing
from eprt.cli.arguments import BenchLayer
from eprt.cli.bench import finish, groups, measured, require_names, require_peers, require_tokens, say_more_replicas
from eprt.cli.ranks import Ranks, ranks
from eprt.cli.terminal import Terminal, columns
from eprt.config import ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError
from eprt.layer import PHASES
from eprt.placement.file import PlacementFile
from eprt.plan import backends_of

_PHASES = " | ".join(f"{phase} = {phase}_p50_us/{phase}_p99_us:.1f" for phase in PHASES)
PHASE_TIMES = columns(f"tokens | rows per expert = rows_per_expert | pair | format = token_format | {_PHASES}")
HOST_TIMES = columns(
    "tokens | pair | format = token_format | layer = layer_p50_us/layer_p99_us:.1f | "
    "by hand = by_hand_p50_us/by_hand_p99_us:.1f | overhead = overhead_us | "
    "layer in a graph = layer_graph_p50_us/layer_graph_p99_us:.1f | "
    "by hand in a graph = by_hand_graph_p50_us/by_hand_graph_p99_us:.1f | ratio = graph_ratio"
)
PLACED = columns(
    "shape | tokens | rows per expert = rows_per_expert | experts lie = placement | slots | max/mean = imbalance | "
    "pair | layer p50/p99 = layer_p50_us/layer_p99_us | gain | model's us = predicted_us | "
    "model's gain = predicted_gain"
)


def bench_layer(arguments: BenchLayer, terminal: Terminal) -> int:
    """Measures layers. Returns 1 if a placement changed a layer's sums, else 0."""
    require_names("--shapes", arguments.shapes)
    precision = arguments.low_precision_activations
    asked = RuntimeConfig(arguments.dispatcher, arguments.executor, low_precision_activations=precision)
    backends_of(asked)
    cases, notes = [LayerCase(shape, arguments.tokens, asked) for shape in arguments.shapes], list[str]()
    if arguments.routing is not None or arguments.replicas is not None or arguments.placement is not None:
        return _bench_placed(arguments, cases, terminal)
    require_tokens(arguments.tokens, 0)
    for shape in arguments.shapes:
        shape_config(shape)
    with ranks(arguments.world, arguments.device) as workers:
        if arguments.every_pair:
            cases, notes = _every_pair(cases, workers)
        report = Report("layer", [], notes=notes)
        measured(report, cases, measure_layer, layer_rows, workers, arguments, terminal)
    for shape, rows in groups(report, "shape"):
        rows = sorted(rows, key=lambda row: row["tokens"])
        title = f"Phases of one layer call, microseconds, p50/p99 of the slowest rank ({shape}, {workers})"
        terminal.table(title, PHASE_TIMES, rows)
        terminal.table(
            "Host time of one call: ExpertParallelMoE beside the same steps by hand (no checks, no header exchange)",
            HOST_TIMES,
            rows,
        )
    return finish(report, arguments, terminal)


def _every_pair(cases: list[LayerCase], workers: Ranks) -> tuple[list[LayerCase], list[str]]:
    """Returns a case for each pair that can run here, and notes on those that can't."""
    found = [workers.run(pairs_here, case=case)[0] for case in cases]
    notes = [f"{case.shape}, {line}" for case, (_, lines) in zip(cases, found, strict=True) for line in lines]
    return [pair for pairs, _ in found for pair in pairs], notes


def _bench_placed(arguments: BenchLayer, asked: list[LayerCase], terminal: Terminal) -> int:
    _require_placed(arguments)
    file = None if arguments.placement is None else PlacementFile.read(arguments.placement)
    with ranks(arguments.world, arguments.device) as workers:
        require_peers(workers, "--routing", "there is no other rank to be hotter than")
        cases = [case for each in asked for case in _placed_cases(each, arguments, workers.size, file)]
        for case in cases[:: len(arguments.tokens)] if file is None else ():
            say_more_replicas(arguments.replicas or 0, case.config.num_experts, workers.size, terminal)
        report = Report("placement", [])
        measured(report, cases, measure_placed, placed_rows, workers, arguments, terminal)
    what = f"{workers}, {arguments.routing}"
    terminal.table(
        f"One layer with its experts in order, and with replicas where they were planned ({what}); microseconds",
        PLACED,
        report.rows,
    )
    wrong = [
        f"{row['shape']}, {row['tokens']} tokens: experts {row['placement']}: sums differ by {row['error']:.1e}, "
        f"at most {TOLERANCE:g} may be rounding"
        for row in report.rows
        if not row["error"] <= TOLERANCE
    ]
    return finish(report, arguments, terminal, wrong)


def _require_placed(arguments: BenchLayer) -> None:
    if arguments.routing is None:
        raise ConfigError(
            "--replicas and --placement measure a placement under uneven choices: say which, --routing ..."
        )
    if arguments.replicas is not None and arguments.placement is not None:
        raise ConfigError("--replicas plans a placement, --placement names one: give one of them")
    if arguments.every_pair:
        raise ConfigError("--every-pair with --routing: name one pair, --dispatcher and --executor")
    if (arguments.replicas or 0) < 0:
        raise ConfigError(f"--replicas {arguments.replicas}: expected replicas from 0 on")
    require_tokens(arguments.tokens, 1)


def _placed_cases(asked: LayerCase, arguments: BenchLayer, size: int, file: PlacementFile | None) -> list[PlacedCase]:
    """Returns one case for each number of tokens, with the choices of the routing's first layer.

    The placement is that of a file, or planned from the routing's own counts.
    """
    config, parallel, routing = asked.config, ParallelConfig(size), arguments.routing or ""
    routed, E = read_routing(routing, config.num_experts, config.top_k)[0], config.num_experts
    placed = file.placement(routed.layer, E, parallel) if file else routed.planned(parallel, arguments.replicas or 0)
    case = partial(PlacedCase, asked=asked.asked, routed=routed, routing=routing, slots=tuple(placed.slots))
    return [case(asked.shape, (tokens,)) for tokens in asked.tokens]
