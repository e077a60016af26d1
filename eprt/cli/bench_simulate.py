"""`eprt bench dispatch --simulate`: layers of worlds that needn't be here."""

from __future__ import annotations

from collections.abc import Callable

from eprt.bench.report import Report
from eprt.bench.simulate import SimulatedWorld, simulation_report
from eprt.cli.arguments import BenchDispatch
from eprt.cli.explain import kinds_of_layers
from eprt.cli.terminal import Terminal
from eprt.config import ParallelConfig
from eprt.errors import ConfigError
from eprt.models.published import model_config
from eprt.support import Device


def simulate(arguments: BenchDispatch, terminal: Terminal, keep: Callable[[Report], None]) -> Report:
    """Print the tables; what was found, to be kept."""
    asked = arguments.simulation
    if arguments.plot is not None:
        raise ConfigError("--plot draws what was measured: a simulation has tables, and --output FILE")
    if min(asked.ranks, default=0) < 2 or asked.ranks_per_host < 1 or asked.replicas < 0:
        raise ConfigError(
            f"--ranks {' '.join(map(str, asked.ranks))} --ranks-per-host {asked.ranks_per_host} --replicas "
            f"{asked.replicas}: expected worlds of two ranks or more, one a host or more, replicas from 0 on"
        )
    config, device = kinds_of_layers(model_config(asked.model))[0][0], Device.parse(asked.gpu)
    worlds = [
        SimulatedWorld(config, ranks, asked.ranks_per_host, device, routing, *placed)
        for ranks in asked.ranks
        for routing in asked.routing
        for placed in ((0, False), *(((asked.replicas, one) for one in (False, True)) if asked.replicas else ()))
    ]
    for world in worlds:
        ParallelConfig(world.ranks, ranks_per_host=min(world.ranks, world.ranks_per_host))  # refuses odd sizes at once
    report = simulation_report(worlds, arguments.tokens, arguments.transports, keep)
    for ranks in asked.ranks:
        rows = [row for row in report.rows if row["ranks"] == ranks]
        terminal.table(
            f"Simulated, not measured: {ranks} x {device}, {asked.ranks_per_host} a host, one layer of {asked.model}; "
            "the hottest rank sets the pace",
            [
                "tokens",
                "routing",
                "experts lie",
                "max/mean",
                "transport",
                "ranks a token",
                "MB in, mean",
                "hottest",
                "dispatch us",
                "experts us",
                "of mean rank",
                "layer us",
                "gain",
            ],
            [
                [
                    row["tokens"],
                    row["routing"],
                    row["placement"],
                    row["imbalance"],
                    row["transport"],
                    row["ranks_of_a_token"],
                    f"{row['received_mb']:.1f}",
                    f"{row['hottest_mb']:.1f}",
                    f"{row['dispatch_us']:.0f}",
                    f"{row['experts_us']:.0f}",
                    f"{row['mean_experts_us']:.0f}",
                    f"{row['us']:.0f}",
                    "-" if row["gain"] is None else f"{row['gain']:.2f}",
                ]
                for row in rows
            ],
        )
    return report
