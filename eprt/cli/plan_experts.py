"""Runs `eprt plan-experts`: plans where replicas of experts should lie, and says what that brings or that it doesn't
pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import TYPE_CHECKING, Any

from eprt.balance.costs import Verdict, expert_bytes, modelled, weigh
from eprt.balance.counts import Counts, read_counts, zipf
from eprt.balance.moving import transfers
from eprt.balance.planner import plan_placement
from eprt.balance.report import report
from eprt.cli.terminal import Column, Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.checkpoint import read_config
from eprt.placement import EMPTY, ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.support import Device

if TYPE_CHECKING:
    from eprt.cli.arguments import PlanExperts

Placements = dict[int, ExpertPlacement]  # by layer
Placed = tuple[Sequence[int], ExpertPlacement, ExpertPlacement]  # a layer's counts, and its placement before and after
LAYERS: dict[str, Column] = {
    "layer": "layer",
    "before": "before:.3f",
    "after": "after:.3f",
    "replicas": lambda row: len(row["slots"]) - row["empty_slots"] - row["experts"],
    "experts that move": "moved",
    "experts' us before": lambda row: row["verdict"] and f"{row['verdict'].before_s * 1e6:.1f}",
    "experts' us after": lambda row: row["verdict"] and f"{row['verdict'].after_s * 1e6:.1f}",
    "gain": lambda row: row["verdict"] and f"{row['verdict'].gain:.1%}",
}


def plan_experts(arguments: PlanExperts, terminal: Terminal) -> int:
    """Plans placements of all layers. Returns 0, also where replicas don't pay."""
    configs = _configs(arguments)
    counts = _counts(arguments, configs)
    parallel = ParallelConfig(arguments.world, 1, arguments.moe_tp, arguments.ranks_per_host)
    before = _before(arguments, counts, parallel)
    after = _planned(arguments, counts, before, parallel, terminal)
    known = {layer: config for layer, config in configs.items() if layer in counts}
    placed = {layer: (counts[layer], before[layer], after[layer]) for layer in counts}
    verdicts = {layer: _weigh(arguments, config, parallel, placed[layer]) for layer, config in known.items()}
    old, new = (report(list(counts.values()), list(way.values()), list(counts)) for way in (before, after))
    rows = [
        _row(layer, was.imbalance, now.imbalance, placed[layer], verdicts.get(layer, (None, None))[1])
        for layer, was, now in zip(counts, old.layers, new.layers, strict=True)
    ]
    total = _total([verdict for _, verdict in verdicts.values()]) if verdicts else None
    _say(terminal, arguments, rows, (old.mean, new.mean))
    if total is None:
        terminal.say("Whether it pays depends on the experts' sizes: name the model with --model")
    else:
        size = max(expert_bytes(config, arguments.moe_tp) for config in known.values())
        terminal.say(
            f"memory: {total.more_bytes / 1e9:.2f} GB more per rank ({size / 1e6:.1f} MB per expert); moving: "
            f"{total.move_s * 1e3:.1f} ms of NVLink where nothing has to be loaded"
        )
        terminal.say(_judged(arguments, total, sorted({executor for executor, _ in verdicts.values()}), rows))
    if arguments.out is not None and terminal.speaks:
        PlacementFile.of_placements({**after}).write(arguments.out)
        terminal.say(f"wrote {arguments.out}")
    terminal.result(_as_json(arguments, (old.mean, new.mean), total, rows))
    return 0


def _configs(arguments: PlanExperts) -> dict[int, MoEConfig]:
    """Returns the config of each MoE layer of the model, by number; none without a model."""
    if arguments.model is None:
        return {}
    hf = read_config(arguments.model)
    family = family_for(hf)
    return {layer: family.moe_config(hf, layer) for layer in family.moe_layers(hf)}


def _counts(arguments: PlanExperts, configs: dict[int, MoEConfig]) -> Counts:
    if arguments.counts is not None:
        counts = read_counts(arguments.counts)
        for layer, row in counts.items():
            if configs and (layer not in configs or configs[layer].num_experts != len(row)):
                raise ConfigError(
                    f"{arguments.counts}: layer {layer} has counts of {len(row)} experts, which isn't a layer of "
                    f"{arguments.model}"
                )
        return counts
    if configs:
        return {layer: zipf(config.num_experts, arguments.zipf) for layer, config in configs.items()}
    if arguments.experts is None:
        raise ConfigError("nothing to plan for: give --counts FILE, or --model, or --experts and --zipf")
    return {0: zipf(arguments.experts, arguments.zipf)}


def _before(arguments: PlanExperts, counts: Counts, parallel: ParallelConfig) -> Placements:
    """Returns the placements that hold now: a file's, or experts in order."""
    if arguments.current is None:
        return {layer: ExpertPlacement(len(row), parallel) for layer, row in counts.items()}
    now = PlacementFile.read(arguments.current)
    return {layer: now.placement(layer, len(row), parallel) for layer, row in counts.items()}


def _planned(
    arguments: PlanExperts, counts: Counts, before: Placements, parallel: ParallelConfig, terminal: Terminal
) -> Placements:
    after: Placements = {}
    with terminal.progress("plan", len(counts)) as advance:
        for layer, row in counts.items():
            current = before[layer] if before[layer].num_slots == arguments.slots else None
            domain = arguments.domain_size
            after[layer] = plan_placement(row, parallel, arguments.slots, current=current, domain_size=domain)
            advance(f"layer {layer}")
    return after


def _weigh(arguments: PlanExperts, config: MoEConfig, parallel: ParallelConfig, placed: Placed) -> tuple[str, Verdict]:
    """Returns the executor that the plan chooses for a layer, and what (counts, before, after) mean for its time."""
    device = Device.parse(arguments.device)
    runtime = RuntimeConfig(phase=arguments.phase, max_tokens_per_rank=arguments.tokens)
    executor = make_plan(config, parallel, runtime, device).executor
    time = modelled(config, parallel, executor, device)
    return executor, weigh(config, *placed, arguments.tokens, one_replica=arguments.phase == "decode", time=time)


def _row(layer: int, old: float, new: float, placed: Placed, verdict: Verdict | None) -> dict[str, Any]:
    _, before, after = placed
    return {
        "layer": layer,
        "before": old,
        "after": new,
        # Experts that travel; None where the number of slots changes, so that the model is loaded again.
        "moved": len(transfers(before, after)) if before.num_slots == after.num_slots else None,
        "empty_slots": after.slots.count(EMPTY),
        "slots": list(after.slots),
        "experts": after.num_experts,
        "verdict": verdict,
    }


def _say(terminal: Terminal, arguments: PlanExperts, rows: list[dict[str, Any]], means: tuple[float, float]) -> None:
    title = f"{arguments.slots} slots on {arguments.world} ranks; max/mean of the rows that ranks get"
    terminal.table(title, LAYERS, rows)
    terminal.say(f"\nmax/mean on average: {means[0]:.3f} before, {means[1]:.3f} after")
    if empty := min(row["empty_slots"] for row in rows):
        terminal.say(
            f"{empty} slots or more stay empty in each layer: a replica there would relieve no rank that matters"
        )


def _judged(arguments: PlanExperts, total: Verdict, executors: list[str], rows: list[dict[str, Any]]) -> str:
    """Says whether the placements pay, and why."""
    where = f"at {arguments.tokens} tokens per rank, {arguments.phase}"
    if total.pays:
        return (
            f"It pays {where}: the slowest rank's experts take {total.gain:.1%} less (by the plan's model of "
            f"{', '.join(executors)} on {arguments.device}, without transport); the moving is paid for after "
            f"{total.break_even_calls:.0f} forwards"
        )
    if all(len(row["slots"]) - row["empty_slots"] == row["experts"] for row in rows):
        why = "without replicas the ranks are as even as with them"
    elif total.gain < 0:
        why = f"more experts per rank are read than before ({-total.gain:.1%} slower)"
    else:
        why = f"{total.gain:.1%} of the experts' time, which the weights' bytes set more than the rows do"
    return f"It does not pay {where}: {why}"


def _total(verdicts: list[Verdict]) -> Verdict:
    """Adds all layers up to one, with the mean of their imbalances."""
    before, after, *sums = (sum(column) for column in zip(*map(astuple, verdicts), strict=True))
    return Verdict(before / len(verdicts), after / len(verdicts), *sums)


def _as_json(
    arguments: PlanExperts, means: tuple[float, float], total: Verdict | None, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    layers = [{**row, "estimate": row["verdict"] and asdict(row["verdict"])} for row in rows]
    return {
        "slots": arguments.slots,
        "ranks": arguments.world,
        "tokens": arguments.tokens,
        "phase": arguments.phase,
        "mean_before": means[0],
        "mean_after": means[1],
        "pays": total and total.pays,
        "gain": total and total.gain,
        "layers": [{name: row[name] for name in row if name not in ("verdict", "experts")} for row in layers],
    }
