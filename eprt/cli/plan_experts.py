"""Runs `eprt plan-experts`: plans where replicas of experts should lie, and says what that brings or that it doesn't
pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, astuple
from typing import Any

from eprt.balance.costs import Verdict, expert_bytes, modelled, weigh
from eprt.balance.counts import Counts, read_counts, zipf
from eprt.balance.moving import transfers
from eprt.balance.planner import imbalance, plan_placement, rank_loads
from eprt.cli.arguments import PlanExperts
from eprt.cli.explain import kinds_of_layers
from eprt.cli.parsing import changed
from eprt.cli.terminal import Terminal, columns
from eprt.config import MAX_TOKENS, MoEConfig, ParallelConfig, RuntimeConfig, require_size
from eprt.errors import ConfigError
from eprt.files import write_whole
from eprt.models.published import model_config
from eprt.placement import EMPTY, ExpertPlacement
from eprt.placement.file import PlacementFile
from eprt.plan import make_plan
from eprt.support import Device

LAYERS = columns(
    "layer | before = before:.3f | after = after:.3f | replicas | experts that move = moved | "
    "experts' us before = us_before | experts' us after = us_after | gain",
    us_before=lambda row: row["verdict"] and f"{row['verdict'].before_s * 1e6:.1f}",
    us_after=lambda row: row["verdict"] and f"{row['verdict'].after_s * 1e6:.1f}",
    gain=lambda row: row["verdict"] and f"{row['verdict'].gain:.1%}",
)


def plan_experts(arguments: PlanExperts, terminal: Terminal) -> int:
    """Plans placements of all layers. Returns 0, also where replicas don't pay."""
    _require_model_for_estimate(arguments)
    require_size("--tokens", arguments.tokens, MAX_TOKENS)
    configs: dict[int, MoEConfig] = {}  # by layer; none without a model
    if arguments.model is not None:
        kinds = kinds_of_layers(model_config(arguments.model))
        configs = {layer: config for config, layers in kinds for layer in layers}
    counts = _counts(arguments, configs)
    rows = _rows(arguments, configs, counts, terminal)
    means = {f"mean_{when}": sum(row[when] for row in rows) / len(rows) for when in ("before", "after")}
    title = f"{arguments.slots} slots on {arguments.world} ranks; max/mean of the rows that ranks get"
    terminal.table(title, LAYERS, rows)
    terminal.say(f"\nmax/mean on average: {means['mean_before']:.3f} before, {means['mean_after']:.3f} after")
    if empty := min(row["empty_slots"] for row in rows):
        terminal.say(
            f"{empty} slots or more stay empty in each layer: a replica there would relieve no rank that matters"
        )
    total = _total([row["verdict"] for row in rows if row["verdict"] is not None])
    size = max((expert_bytes(configs[layer], arguments.moe_tp) for layer in counts if layer in configs), default=0)
    terminal.say(_judged(arguments, total, size, rows))
    if arguments.out is not None and terminal.speaks:
        planned = PlacementFile.of_placements({row["layer"]: row["placement"] for row in rows})
        write_whole(arguments.out, planned.content)  # whose OSError a full disk is, not an option that can't work
        terminal.say(f"wrote {arguments.out}")
    asked = {"slots": arguments.slots, "ranks": arguments.world, "tokens": arguments.tokens, "phase": arguments.phase}
    pays = {"pays": total and total.pays, "gain": total and total.gain}
    shown = ("layer", "before", "after", "moved", "empty_slots", "slots")
    found = [{**{k: row[k] for k in shown}, "estimate": row["verdict"] and asdict(row["verdict"])} for row in rows]
    terminal.result({**asked, **means, **pays, "layers": found})
    return 0


def _require_model_for_estimate(arguments: PlanExperts) -> None:
    """Raises ConfigError for options of the estimate where nothing is estimated: they would do nothing."""
    given = changed(arguments, ("tokens", "device", "phase"))
    asked = " ".join(f"{flag} {value}" for flag, value in given.items())
    if arguments.model is None and asked:
        raise ConfigError(
            f"{asked}: of the estimate of what a placement brings, which depends on the experts' sizes: name the model "
            "with --model, or leave them out"
        )


def _counts(arguments: PlanExperts, configs: dict[int, MoEConfig]) -> Counts:
    if arguments.experts is not None and (arguments.model is not None or arguments.counts is not None):
        where = "--counts" if arguments.model is None else "--model"
        raise ConfigError(f"--experts {arguments.experts}: {where} says how many there are; leave one of them out")
    if arguments.counts is not None and arguments.zipf != PlanExperts.zipf:
        raise ConfigError(f"--zipf {arguments.zipf} stands for counts, and --counts names them: leave one of them out")
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
        return {layer: zipf(configs[layer].num_experts, arguments.zipf) for layer in sorted(configs)}
    if arguments.experts is None:
        raise ConfigError("nothing to plan for: give --counts FILE, or --model, or --experts and --zipf")
    return {0: zipf(arguments.experts, arguments.zipf)}


def _rows(
    arguments: PlanExperts, configs: dict[int, MoEConfig], counts: Counts, terminal: Terminal
) -> list[dict[str, Any]]:
    """Plans each layer from the placement that holds now: a file's, or experts in order."""
    parallel = ParallelConfig(arguments.world, 1, arguments.moe_tp, arguments.ranks_per_host)
    file = None if arguments.current is None else PlacementFile.read(arguments.current)
    rows: list[dict[str, Any]] = []
    with terminal.progress("plan", len(counts)) as advance:
        for layer, row in counts.items():
            experts, domain = len(row), arguments.domain_size
            now = ExpertPlacement(experts, parallel) if file is None else file.placement(layer, experts, parallel)
            current = now if now.num_slots == arguments.slots else None
            new = plan_placement(row, parallel, arguments.slots, current=current, domain_size=domain)
            executor, verdict = None, None
            if layer in configs:
                executor, verdict = _weighed(arguments, configs[layer], row, now, new)
            even = {when: imbalance(rank_loads(row, place)) for when, place in (("before", now), ("after", new))}
            # Experts that travel; None where the number of slots changes, so that the model is loaded again.
            moved = None if current is None else len(transfers(now, new))
            empty = new.slots.count(EMPTY)
            slots = {"slots": list(new.slots), "empty_slots": empty, "replicas": len(new.slots) - empty - experts}
            found = {"placement": new, "executor": executor, "verdict": verdict}
            rows.append({"layer": layer, **even, "moved": moved, **slots, **found})
            advance(f"layer {layer}")
    return rows


def _weighed(
    arguments: PlanExperts, config: MoEConfig, counts: Sequence[int], now: ExpertPlacement, new: ExpertPlacement
) -> tuple[str, Verdict]:
    """Returns the executor that the plan chooses for a layer, and what the new placement means for its time."""
    device, parallel = Device.parse(arguments.device), now.parallel
    runtime = RuntimeConfig(phase=arguments.phase, max_tokens_per_rank=arguments.tokens)
    executor = make_plan(config, parallel, runtime, device).executor
    time = modelled(config, parallel, executor, device)
    decode = arguments.phase == "decode"
    return executor, weigh(config, counts, now, new, arguments.tokens, one_replica=decode, time=time)


def _judged(arguments: PlanExperts, total: Verdict | None, size: int, rows: list[dict[str, Any]]) -> str:
    """Says what the placements cost, whether they pay, and why; `size` is an expert's bytes."""
    if total is None:
        return "Whether it pays depends on the experts' sizes: name the model with --model"
    where = f"at {arguments.tokens} tokens per rank, {arguments.phase}"
    costs = (
        f"memory: {total.more_bytes / 1e9:.2f} GB more per rank ({size / 1e6:.1f} MB per expert); moving: "
        f"{total.move_s * 1e3:.1f} ms of NVLink where nothing has to be loaded\n"
    )
    if total.pays:
        executors = sorted({row["executor"] for row in rows})
        return (
            f"{costs}It pays {where}: the slowest rank's experts take {total.gain:.1%} less (by the plan's model of "
            f"{', '.join(executors)} on {arguments.device}, without transport); the moving is paid for after "
            f"{total.break_even_calls:.0f} forwards"
        )
    if not any(row["replicas"] for row in rows):
        why = "without replicas the ranks are as even as with them"
    elif total.gain < 0:
        why = f"more experts per rank are read than before ({-total.gain:.1%} slower)"
    else:
        why = f"{total.gain:.1%} of the experts' time, which the weights' bytes set more than the rows do"
    return f"{costs}It does not pay {where}: {why}"


def _total(verdicts: list[Verdict]) -> Verdict | None:
    """Adds all layers up to one, with the mean of their imbalances; None without a model."""
    if not verdicts:
        return None
    before, after, *sums = (sum(column) for column in zip(*map(astuple, verdicts), strict=True))
    return Verdict(before / len(verdicts), after / len(verdicts), *sums)
