"""`eprt plan-experts`: where replicas of experts should lie, what that brings, and when it doesn't pay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from eprt.balance.costs import Verdict, expert_bytes, modelled, weigh
from eprt.balance.counts import Counts, read_counts, zipf
from eprt.balance.moving import transfers
from eprt.balance.planner import plan_placement
from eprt.balance.report import Balance, report
from eprt.cli.arguments import PlanExperts
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.checkpoint import read_config
from eprt.placement import EMPTY, ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.support import Device


def plan_experts(arguments: PlanExperts, terminal: Terminal) -> int:
    """The command. Returns 0, also where replicas don't pay."""
    configs = _configs(arguments)
    counts = _counts(arguments, configs)
    parallel = ParallelConfig(arguments.world, 1, arguments.moe_tp, arguments.ranks_per_host)
    before = _before(arguments, counts, parallel)
    after: dict[int, ExpertPlacement] = {}
    with terminal.progress("plan", len(counts)) as progress:
        for layer, row in counts.items():
            current = before[layer] if before[layer].num_slots == arguments.slots else None
            after[layer] = plan_placement(
                row, parallel, arguments.slots, current=current, domain_size=arguments.domain_size
            )
            progress.advance(f"layer {layer}")
    spread = [
        report(list(counts.values()), [placed[layer] for layer in counts], list(counts)) for placed in (before, after)
    ]
    moved = {layer: _moved(before[layer], after[layer]) for layer in counts}
    executors = {layer: _executor(arguments, config, parallel) for layer, config in configs.items() if layer in counts}
    device = Device.parse(arguments.device)
    times = {layer: modelled(configs[layer], parallel, name, device) for layer, name in executors.items()}
    verdicts = {
        layer: weigh(
            configs[layer],
            row,
            before[layer],
            after[layer],
            arguments.tokens,
            one_replica=arguments.phase == "decode",
            time=times[layer],
        )
        for layer, row in counts.items()
        if layer in configs
    }
    _say(terminal, arguments, spread, after, moved, verdicts)
    if verdicts:
        needless = not any(map(_replicas, after.values()))
        _judge(terminal, arguments, verdicts, configs, sorted(set(executors.values())), needless=needless)
    else:
        terminal.say("Whether it pays depends on the experts' sizes: name the model with --model")
    if arguments.out is not None and terminal.speaks:
        placed: dict[int | None, ExpertPlacement] = {**after}
        PlacementFile.of_placements(placed).write(arguments.out)
        terminal.say(f"wrote {arguments.out}")
    terminal.result(_as_json(arguments, spread, after, moved, verdicts))
    return 0


def _configs(arguments: PlanExperts) -> dict[int, MoEConfig]:
    """The maths of each MoE layer of the model, by number; none without a model."""
    if arguments.model is None:
        return {}
    hf = read_config(arguments.model)
    family = family_for(hf)
    return {layer: family.moe_config(hf, layer) for layer in family.moe_layers(hf)}


def _executor(arguments: PlanExperts, config: MoEConfig, parallel: ParallelConfig) -> str:
    """What the plan would compute this layer with."""
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


def _before(arguments: PlanExperts, counts: Counts, parallel: ParallelConfig) -> dict[int, ExpertPlacement]:
    """What holds now: a file's placements, or experts in order."""
    if arguments.current is None:
        return {layer: ExpertPlacement(len(row), parallel) for layer, row in counts.items()}
    now = PlacementFile.read(arguments.current)
    return {layer: now.placement(layer, len(row), parallel) for layer, row in counts.items()}


def _moved(before: ExpertPlacement, after: ExpertPlacement) -> int | None:
    """Experts that travel; None where the number of slots changes, so that the model is loaded again."""
    return len(transfers(before, after)) if before.num_slots == after.num_slots else None


def _say(
    terminal: Terminal,
    arguments: PlanExperts,
    spread: list[Balance],
    after: dict[int, ExpertPlacement],
    moved: dict[int, int | None],
    verdicts: dict[int, Verdict],
) -> None:
    terminal.table(
        f"{arguments.slots} slots on {arguments.world} ranks; max/mean of the rows that ranks get",
        ["layer", "before", "after", "replicas", "experts that move", "experts' us before", "after", "gain"],
        [
            [
                old.layer,
                f"{old.imbalance:.3f}",
                f"{new.imbalance:.3f}",
                _replicas(after[old.layer]),
                "-" if moved[old.layer] is None else moved[old.layer],
                *_times(verdicts.get(old.layer)),
            ]
            for old, new in zip(spread[0].layers, spread[1].layers, strict=True)
        ],
    )
    terminal.say(f"\nmax/mean on average: {spread[0].mean:.3f} before, {spread[1].mean:.3f} after")
    if empty := min(placement.slots.count(EMPTY) for placement in after.values()):
        terminal.say(f"{empty} slots or more stay empty in each layer: a replica there would cool no rank that matters")


def _replicas(placement: ExpertPlacement) -> int:
    return placement.num_slots - placement.slots.count(EMPTY) - placement.num_experts


def _times(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["-", "-", "-"]
    return [f"{verdict.before_s * 1e6:.1f}", f"{verdict.after_s * 1e6:.1f}", f"{verdict.gain:.1%}"]


def _judge(
    terminal: Terminal,
    arguments: PlanExperts,
    verdicts: dict[int, Verdict],
    configs: dict[int, MoEConfig],
    executors: list[str],
    *,
    needless: bool,
) -> None:
    """What it costs and whether it pays, in words. `needless`: no layer's plan has a replica."""
    total = _total(list(verdicts.values()))
    size = max(expert_bytes(configs[layer], arguments.moe_tp) for layer in verdicts)
    terminal.say(
        f"memory: {total.more_bytes / 1e9:.2f} GB more a rank ({size / 1e6:.1f} MB an expert); moving: "
        f"{total.move_s * 1e3:.1f} ms of NVLink where nothing has to be loaded"
    )
    where = f"at {arguments.tokens} tokens a rank, {arguments.phase}"
    if total.pays:
        terminal.say(
            f"It pays {where}: the slowest rank's experts take {total.gain:.1%} less (by the plan's model of "
            f"{', '.join(executors)} on {arguments.device}, without transport); the moving is paid for after "
            f"{total.break_even_calls:.0f} forwards"
        )
    elif needless:
        terminal.say(f"It does not pay {where}: without replicas the ranks are as even as with them")
    elif total.gain < 0:
        terminal.say(
            f"It does not pay {where}: more experts a rank are read from memory than before ({-total.gain:.1%} slower)"
        )
    else:
        terminal.say(
            f"It does not pay {where}: {total.gain:.1%} of the experts' time, which the weights' bytes set more than "
            "the rows do"
        )


def _total(verdicts: list[Verdict]) -> Verdict:
    """All layers as one."""
    return Verdict(
        imbalance_before=sum(v.imbalance_before for v in verdicts) / len(verdicts),
        imbalance_after=sum(v.imbalance_after for v in verdicts) / len(verdicts),
        before_s=sum(v.before_s for v in verdicts),
        after_s=sum(v.after_s for v in verdicts),
        more_bytes=sum(v.more_bytes for v in verdicts),
        move_s=sum(v.move_s for v in verdicts),
    )


def _as_json(
    arguments: PlanExperts,
    spread: list[Balance],
    after: dict[int, ExpertPlacement],
    moved: dict[int, int | None],
    verdicts: dict[int, Verdict],
) -> dict[str, Any]:
    total = _total(list(verdicts.values())) if verdicts else None
    return {
        "slots": arguments.slots,
        "ranks": arguments.world,
        "tokens": arguments.tokens,
        "phase": arguments.phase,
        "mean_before": spread[0].mean,
        "mean_after": spread[1].mean,
        "pays": None if total is None else total.pays,
        "gain": None if total is None else total.gain,
        "layers": [
            {
                "layer": old.layer,
                "before": old.imbalance,
                "after": new.imbalance,
                "moved": moved[old.layer],
                "empty_slots": after[old.layer].slots.count(EMPTY),
                "slots": list(after[old.layer].slots),
                "estimate": None if old.layer not in verdicts else asdict(verdicts[old.layer]),
            }
            for old, new in zip(spread[0].layers, spread[1].layers, strict=True)
        ],
    }
