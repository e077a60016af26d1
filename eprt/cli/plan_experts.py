"""Runs `eprt plan-experts`: plans where replicas of experts should lie, and says what that brings or that it doesn't
pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eprt.balance.costs import Verdict, expert_bytes, modelled, weigh
from eprt.balance.counts import Counts, read_counts, zipf
from eprt.balance.moving import transfers
from eprt.balance.planner import plan_placement
from eprt.balance.report import report
from eprt.cli.arguments import PlanExperts
from eprt.cli.terminal import Column, Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.checkpoint import read_config
from eprt.placement import EMPTY, ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.support import Device

Placements = dict[int, ExpertPlacement]  # by layer
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
    executors = {layer: _executor(arguments, config, parallel) for layer, config in configs.items() if layer in counts}
    verdicts = _verdicts(arguments, configs, counts, before, after, executors, parallel)
    placed = [report(list(counts.values()), [way[layer] for layer in counts], list(counts)) for way in (before, after)]
    rows = [
        {
            "layer": old.layer,
            "before": old.imbalance,
            "after": new.imbalance,
            "moved": _moved(before[old.layer], after[old.layer]),
            "empty_slots": after[old.layer].slots.count(EMPTY),
            "slots": list(after[old.layer].slots),
            "experts": after[old.layer].num_experts,
            "verdict": verdicts.get(old.layer),
        }
        for old, new in zip(placed[0].layers, placed[1].layers, strict=True)
    ]
    means, total = (placed[0].mean, placed[1].mean), _total(list(verdicts.values())) if verdicts else None
    _say(terminal, arguments, rows, means)
    if total is None:
        terminal.say("Whether it pays depends on the experts' sizes: name the model with --model")
    else:
        size = max(expert_bytes(configs[layer], arguments.moe_tp) for layer in verdicts)
        _judge(terminal, arguments, total, size, sorted(set(executors.values())), rows)
    if arguments.out is not None and terminal.speaks:
        PlacementFile.of_placements({**after}).write(arguments.out)
        terminal.say(f"wrote {arguments.out}")
    terminal.result(_as_json(arguments, means, total, rows))
    return 0


def _configs(arguments: PlanExperts) -> dict[int, MoEConfig]:
    """Returns the config of each MoE layer of the model, by number; none without a model."""
    if arguments.model is None:
        return {}
    hf = read_config(arguments.model)
    family = family_for(hf)
    return {layer: family.moe_config(hf, layer) for layer in family.moe_layers(hf)}


def _executor(arguments: PlanExperts, config: MoEConfig, parallel: ParallelConfig) -> str:
    """Returns the executor that the plan chooses for this layer."""
    runtime = RuntimeConfig(phase=arguments.phase, max_tokens_per_rank=arguments.tokens)
    return make_plan(config, parallel, runtime, Device.parse(arguments.device)).executor


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


def _verdicts(
    arguments: PlanExperts,
    configs: dict[int, MoEConfig],
    counts: Counts,
    before: Placements,
    after: Placements,
    executors: dict[int, str],
    parallel: ParallelConfig,
) -> dict[int, Verdict]:
    """Weighs each layer whose config is known."""
    device, one = Device.parse(arguments.device), arguments.phase == "decode"
    found: dict[int, Verdict] = {}
    for layer, executor in executors.items():
        config = configs[layer]
        time = modelled(config, parallel, executor, device)
        placed = (counts[layer], before[layer], after[layer])
        found[layer] = weigh(config, *placed, arguments.tokens, one_replica=one, time=time)
    return found


def _moved(before: ExpertPlacement, after: ExpertPlacement) -> int | None:
    """Counts the experts that travel; None where the number of slots changes, so that the model is loaded again."""
    return len(transfers(before, after)) if before.num_slots == after.num_slots else None


def _say(terminal: Terminal, arguments: PlanExperts, rows: list[dict[str, Any]], means: tuple[float, float]) -> None:
    title = f"{arguments.slots} slots on {arguments.world} ranks; max/mean of the rows that ranks get"
    terminal.table(title, LAYERS, rows)
    terminal.say(f"\nmax/mean on average: {means[0]:.3f} before, {means[1]:.3f} after")
    if empty := min(row["empty_slots"] for row in rows):
        terminal.say(
            f"{empty} slots or more stay empty in each layer: a replica there would relieve no rank that matters"
        )


def _judge(
    terminal: Terminal,
    arguments: PlanExperts,
    total: Verdict,
    size: int,
    executors: list[str],
    rows: list[dict[str, Any]],
) -> None:
    """Prints what the placements cost and whether they pay. `size`: bytes of the largest expert."""
    terminal.say(
        f"memory: {total.more_bytes / 1e9:.2f} GB more per rank ({size / 1e6:.1f} MB per expert); moving: "
        f"{total.move_s * 1e3:.1f} ms of NVLink where nothing has to be loaded"
    )
    where = f"at {arguments.tokens} tokens per rank, {arguments.phase}"
    if total.pays:
        terminal.say(
            f"It pays {where}: the slowest rank's experts take {total.gain:.1%} less (by the plan's model of "
            f"{', '.join(executors)} on {arguments.device}, without transport); the moving is paid for after "
            f"{total.break_even_calls:.0f} forwards"
        )
    elif all(len(row["slots"]) - row["empty_slots"] == row["experts"] for row in rows):
        terminal.say(f"It does not pay {where}: without replicas the ranks are as even as with them")
    elif total.gain < 0:
        terminal.say(f"It does not pay {where}: more experts per rank are read than before ({-total.gain:.1%} slower)")
    else:
        terminal.say(
            f"It does not pay {where}: {total.gain:.1%} of the experts' time, which the weights' bytes set more than "
            "the rows do"
        )


def _total(verdicts: list[Verdict]) -> Verdict:
    """Adds all layers up to one."""
    return Verdict(
        imbalance_before=sum(v.imbalance_before for v in verdicts) / len(verdicts),
        imbalance_after=sum(v.imbalance_after for v in verdicts) / len(verdicts),
        before_s=sum(v.before_s for v in verdicts),
        after_s=sum(v.after_s for v in verdicts),
        more_bytes=sum(v.more_bytes for v in verdicts),
        move_s=sum(v.move_s for v in verdicts),
    )


def _as_json(
    arguments: PlanExperts, means: tuple[float, float], total: Verdict | None, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    layers = [{**row, "estimate": None if row["verdict"] is None else asdict(row["verdict"])} for row in rows]
    return {
        "slots": arguments.slots,
        "ranks": arguments.world,
        "tokens": arguments.tokens,
        "phase": arguments.phase,
        "mean_before": means[0],
        "mean_after": means[1],
        "pays": None if total is None else total.pays,
        "gain": None if total is None else total.gain,
        "layers": [{name: row[name] for name in row if name not in ("verdict", "experts")} for row in layers],
    }
