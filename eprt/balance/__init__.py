"""Replicates experts: counts what each expert gets, plans where replicas lie, moves them between two steps.

    runtime = RuntimeConfig(count_load=True)
    layer = ExpertParallelMoE(..., placement=one_with_spare_slots, runtime=runtime)
    counts = gather_load(world, layers)                              # [layers, E]; collective
    print(report(counts, [layer.placement for layer in layers]))     # max/mean of the ranks
    plans = [plan_placement(row.tolist(), world.parallel, S, current=layer.placement) for row, layer in ...]
    rebalance(world, layers, plans)                                  # between two steps; collective

Outputs don't depend on the placement; only times do.
"""

from __future__ import annotations

from eprt.balance.costs import Verdict, weigh
from eprt.balance.counts import gather_load, read_counts, write_counts, zipf
from eprt.balance.moving import Moved, rebalance
from eprt.balance.planner import imbalance, plan_placement, rank_loads
from eprt.balance.report import Balance, LayerBalance, report, report_layers

__all__ = [
    "Balance",
    "LayerBalance",
    "Moved",
    "Verdict",
    "gather_load",
    "imbalance",
    "plan_placement",
    "rank_loads",
    "read_counts",
    "rebalance",
    "report",
    "report_layers",
    "weigh",
    "write_counts",
    "zipf",
]
