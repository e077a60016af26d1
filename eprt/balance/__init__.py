"""Replicated experts: count what each expert gets, plan where its replicas lie, move them between two steps.

    layer = ExpertParallelMoE(..., placement=with_spare_slots, runtime=RuntimeConfig(count_load=True))
    counts = gather_load(world, layers)                              # [layers, E], collective
    print(report(counts, [layer.placement for layer in layers]))     # max/mean of the ranks
    placements = [plan_placement(row, layer.placement) for row, layer in zip(counts, layers)]
    rebalance(world, layers, placements)                             # between two steps, collective

Outputs don't depend on the placement; only times do.
"""

from __future__ import annotations

from eprt.balance.counts import gather_load, read_counts, write_counts, zipf
from eprt.balance.moving import Moved, rebalance

__all__ = ["Moved", "gather_load", "read_counts", "rebalance", "write_counts", "zipf"]
