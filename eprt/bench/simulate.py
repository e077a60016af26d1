"""Simulates a layer: sampled or recorded choices, sent through each dispatcher's bytes and the cost model.

Nothing is measured here: a row is what `eprt.plan.skew` makes of the choices, for machines that nobody has to own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from eprt.bench.report import Report, Row
from eprt.bench.routings import RoutedLayer, demand_of, read_routing
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import ConfigError, UnsupportedError
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.plan.skew import Demand, LayerTime, layer_time
from eprt.support import Device

DRAWN = 1 << 18  # tokens drawn at most; the world's batch where that is smaller, so that its chance is in the times
IN_ORDER = "in order"


@dataclass(frozen=True)
class SimulatedWorld:
    """A layer to simulate on a world of GPUs of one kind: its routing, and the experts' placement.

    Attributes:
        config: of the layer, in experts.
        replicas: slots beyond what experts need, at least; 0: experts in order.
        one_replica: of a planned placement: each expert's tokens go to one of its replicas, as decode does; else they
            are shared.
    """

    config: MoEConfig
    parallel: ParallelConfig
    device: Device
    routing: str
    replicas: int = 0
    one_replica: bool = False

    @property
    def placed(self) -> str:
        planned = "planned, one replica an expert" if self.one_replica else "planned, replicas share"
        return planned if self.replicas else IN_ORDER


def simulated(world: SimulatedWorld, tokens: int, names: Sequence[str] = ()) -> Iterator[Row | str]:
    """Yields rows of one world at `tokens` per rank, one per dispatcher, or a text with the reason why not.

    Raises:
        ConfigError: a routing that can't be read, or slots that can't be planned.
    """
    config, parallel = world.config, world.parallel
    layers = read_routing(world.routing, config.num_experts, config.top_k)
    demands = [_demand(world, layer, tokens) for layer in layers]
    for name in names or DISPATCHERS:
        where = f"{name}, {parallel.world_size} ranks of {world.device}"
        runtime = RuntimeConfig(dispatcher=name, phase="prefill", max_tokens_per_rank=tokens)
        try:
            plan = make_plan(config, parallel, runtime, world.device)
        except UnsupportedError:
            spec = DISPATCHERS[name]
            verdict = spec.supports(config, parallel, replace(runtime, max_tokens_per_rank=1), world.device)
            yield f"{where}: {verdict.reason or 'no executor can follow it'}"
            continue
        found = [layer_time(plan, config, parallel, world.device, demand) for demand in demands]
        times = [time for time in found if time is not None]
        known = len(times) == len(demands)
        yield _row(world, tokens, plan, demands, times) if known else f"{where}: nothing is known of its times there"


def _demand(world: SimulatedWorld, layer: RoutedLayer, tokens: int) -> Demand:
    in_order = ExpertPlacement(world.config.num_experts, world.parallel)
    placement = layer.planned(world.parallel, world.replicas) if world.replicas else in_order
    ids = layer.draw(min(tokens * world.parallel.world_size, DRAWN), world.config.top_k, seed=0)
    return demand_of([ids], placement, world.one_replica)


def _row(world: SimulatedWorld, tokens: int, plan: Plan, demands: Sequence[Demand], times: Sequence[LayerTime]) -> Row:
    """Returns one row, of means over the routing's layers."""
    parallel = world.parallel
    row: Row = {"device": str(world.device), "ranks": parallel.world_size, "ranks_per_host": parallel.ranks_per_host}
    row |= {"tokens": tokens, "routing": world.routing, "layers": len(times)}
    row |= {"slots": demands[0].placement.num_slots, "placement": world.placed}
    row["imbalance"] = _mean([demand.imbalance for demand in demands], 3)
    row["ranks_of_a_token"] = _mean([sum(demand.ranks) for demand in demands], 2)
    row |= {"transport": plan.dispatcher, "executor": plan.executor}
    row |= {name: _mean([getattr(time, name) for time in times], 3) for name in ("received_mb", "hottest_mb")}
    for name in ("dispatch", "experts", "mean_experts"):
        row[f"{name}_us"] = _mean([getattr(time, name) for time in times])
    row["us"] = _mean([time.us for time in times])
    row["basis"] = max((time.basis for time in times), key=("measured", "modelled", "assumed").index)
    return row


def _mean(values: Sequence[float], digits: int = 1) -> float:
    return round(sum(values) / len(values), digits)


def simulation_report(
    worlds: Sequence[SimulatedWorld],
    tokens: Sequence[int],
    names: Sequence[str] = (),
    keep: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Simulates every world at every number of tokens. `keep` sees what was found so far.

    A row's `gain` is the same transport's time with experts in order, where the worlds include that, over its own.

    Raises:
        ConfigError: see `simulated`, or no GPU: nothing is known of the times of others.
    """
    if not worlds or any(world.device.kind != "cuda" for world in worlds):
        raise ConfigError("--simulate needs a GPU's generation (sm90, ...): nothing is known of a CPU's times")
    report = Report("simulation", [])
    for world in worlds:
        for count in tokens:
            report.add(simulated(world, count, names))
        keep(report)
    sizes = itemgetter("device", "ranks", "ranks_per_host", "tokens", "routing", "transport")
    in_order = {sizes(row): row["us"] for row in report.rows if row["placement"] == IN_ORDER}
    for row in report.rows:
        row["gain"] = round(in_order[sizes(row)] / row["us"], 3) if sizes(row) in in_order else None
    return report
