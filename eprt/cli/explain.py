"""Runs `eprt explain`: shows what would run a model, and why everything else would not. Needs no GPU, no kernel library
and no weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from eprt.bench.plot import plot
from eprt.bench.report import Report
from eprt.cli.arguments import Explain
from eprt.cli.terminal import Terminal, columns, counted
from eprt.config import MoEConfig, ParallelConfig, Routing, RuntimeConfig
from eprt.engines import ENGINES
from eprt.errors import ConfigError, UnsupportedError
from eprt.models import family_for
from eprt.models.hf_config import where
from eprt.models.published import model_config
from eprt.plan import Candidate, Plan, make_plan
from eprt.plan.layouts import ParallelLayout, layouts
from eprt.plan.machines import linked_ranks, machine_of
from eprt.plan.measured import own_path, own_tables
from eprt.plan.model import roofline_us
from eprt.support import Device

TOKENS = tuple(2**power for power in range(13))  # per rank, of the plot
LAYOUTS = columns(
    "layout = name | pair | weights GB = weights | buffers GB = buffers | us per layer = layer_us:.0f | "
    "tokens/s = tokens_per_s:,.0f | bound by = bound | fits",
    pair=lambda way: "+".join((way.plans[0].dispatcher, way.plans[0].executor)) if way.plans else way.refused,
    weights=lambda way: f"{way.weight_gb:.1f}" if way.plans else None,
    buffers=lambda way: f"{way.buffer_gb:.1f}" if way.plans else None,
    bound=lambda way: way.bound or None,
    fits=lambda way: {True: "yes", False: "no", None: None}[way.fits],
)


def explain(arguments: Explain, terminal: Terminal) -> int:
    """Prints the plans. Returns 0; a model that nothing can run raises UnsupportedError with the same table."""
    parallel, runtime, device = arguments.parallel, arguments.runtime, Device.parse(arguments.device)
    hf = model_config(arguments.model)
    kinds = kinds_of_layers(hf)

    def require_readable(way: ParallelConfig) -> None:
        for _, layers in kinds:
            family_for(hf).require_whole_blocks(hf, layers[0], way.moe_tp_size)

    require_readable(parallel)
    _say_world(terminal, arguments, device)
    shown: list[dict[str, Any]] = []
    for config, layers in kinds:
        plan = make_plan(config, parallel, runtime, device)
        _say(terminal, config, layers, plan)
        shown.append({"layers": layers, "config": asdict(config), **as_json(plan)})
    ways = layouts([(config, len(layers)) for config, layers in kinds], parallel, runtime, device, require_readable)
    if parallel.world_size > 1:
        _say_layouts(terminal, ways, arguments)
    if arguments.plot is not None:
        _plot(kinds[0][0], arguments, device, arguments.plot)
        terminal.say(f"plot written to {arguments.plot}")
    asked = {"model": str(arguments.model), "device": str(device), "phase": runtime.phase}
    sizes = {"parallel": asdict(parallel), "runtime": asdict(runtime)}
    own_rows = str(own_path()) if own_tables() else None
    pairs = [[{"dispatcher": plan.dispatcher, "executor": plan.executor} for plan in way.plans] for way in ways]
    laid_out = [{**asdict(replace(way, plans=())), "plans": plans} for way, plans in zip(ways, pairs, strict=True)]
    terminal.result({**asked, **sizes, "own_rows": own_rows, "plans": shown, "layouts": laid_out})
    return 0


def kinds_of_layers(hf: dict[str, Any]) -> list[tuple[MoEConfig, list[int]]]:
    """Returns the kinds of layers that a plan tells apart (routing doesn't matter to it): the first config of each, and
    its layers' numbers."""
    family = family_for(hf)
    kinds: dict[MoEConfig, tuple[MoEConfig, list[int]]] = {}
    for layer in family.moe_layers(hf):
        config = family.moe_config(hf, layer)
        kinds.setdefault(replace(config, routing=Routing()), (config, []))[1].append(layer)
    if not kinds:
        raise ConfigError(f"{where(hf)}: the {hf.get('model_type')} model has no MoE layers")
    return list(kinds.values())


def _say_world(terminal: Terminal, arguments: Explain, device: Device) -> None:
    parallel, runtime, machine = arguments.parallel, arguments.runtime, machine_of(device)
    hosts = counted(parallel.ranks_per_host or 1, "rank") + " per host"
    hosts += " (--ranks-per-host)" * (arguments.ranks_per_host is None)
    terminal.say(
        f"world of {parallel.world_size} x {device}, {hosts}: {parallel.dp_size} data-parallel x "
        f"{parallel.attention_tp_size} attention-TP, {parallel.ep_size} expert-parallel x {parallel.moe_tp_size} "
        f"MoE-TP; {runtime.phase}, up to {runtime.max_tokens_per_rank} tokens per rank"
    )
    if machine is not None:
        joined = "; hosts taken as one NVLink fabric" * (
            parallel.spans_hosts and linked_ranks(parallel, device) > (parallel.ranks_per_host or 0)
        )
        terminal.say(f"{device} stands for {machine.name}{joined}")
    if own_tables():
        terminal.say(f"rows measured by eprt tune come first: {own_path()}")


def _say(terminal: Terminal, config: MoEConfig, layers: list[int], plan: Plan) -> None:
    terminal.say(
        f"\nlayer{'s' * (len(layers) > 1)} {_ranges(layers)}: {config.num_experts} experts in {config.weight_format}, "
        f"top-{config.top_k}, hidden {config.hidden_size}, "
        f"intermediate {config.intermediate_size}, {config.activation.kind}"
    )
    terminal.table(
        f"Candidates (-> chosen, ok possible, no refused; us: all but routing, {plan.tokens} tokens per rank)",
        columns(
            " = mark | dispatcher | executor | tokens = token_format | us | reason = support.reason",
            mark=lambda c: "->" if c is plan.chosen else "ok" if c.support else "no",
            us=_microseconds,
        ),
        plan.candidates,
    )
    terminal.say(
        f"\nChoice: dispatcher {plan.dispatcher}, executor {plan.executor}, {plan.token_format} tokens",
        f"  why: {plan.reason}",
        "Engines (what does a call: the first that takes it)",
        *(
            f"  {name} ({ENGINES[name].summary}): {'none: ' * (not support)}{support.reason}"
            for name, support in plan.engines.items()
        ),
        "",
    )


def _microseconds(candidate: Candidate) -> str | None:
    if candidate.us is None:
        return None
    halves = [half for half in (candidate.dispatch, candidate.experts) if half is not None]
    return f"{candidate.us:.0f}" + " model" * any(half.basis != "measured" for half in halves)


def _say_layouts(terminal: Terminal, ways: list[ParallelLayout], arguments: Explain) -> None:
    tokens = next((way.plans[0].tokens for way in ways if way.plans), 0)
    title = f"Layouts of these {arguments.world} ranks, {tokens} tokens on each: routed experts of all layers alone"
    terminal.table(title, LAYOUTS, ways)
    best, own = ways[0], replace(arguments.parallel, attention_tp_size=1)  # as all layouts: attention isn't counted
    if best.tokens_per_s is not None and best.fits and best.parallel != own:
        asked = next((way for way in ways if way.parallel == own), None)
        slower = ""
        if asked is not None and asked.tokens_per_s and asked.fits:
            slower = f": {best.tokens_per_s / asked.tokens_per_s:.2f} times the tokens of {asked.name}"
        terminal.say(f"\nBy the times above, {best.name} is the fastest that fits{slower}.")


def as_json(plan: Plan) -> dict[str, Any]:
    return {
        "dispatcher": plan.dispatcher,
        "executor": plan.executor,
        "tokens": plan.token_format,
        "payload": plan.payload,
        "reason": plan.reason,
        "max_tokens_per_rank": plan.max_tokens_per_rank,
        "tokens_per_rank": plan.tokens,
        "engines": [{"name": name, **asdict(support)} for name, support in plan.engines.items()],
        "candidates": [
            {"tokens": found.pop("token_format"), **found.pop("support"), **found}
            for found in map(asdict, plan.candidates)
        ],
    }


def _ranges(numbers: list[int]) -> str:
    """Writes consecutive numbers as ranges: "0-2, 5"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def curves(
    config: MoEConfig, parallel: ParallelConfig, runtime: RuntimeConfig, device: Device
) -> dict[str, dict[int, float]]:
    """Returns microseconds of a call by tokens per rank, for every pair that can run there and for the roofline."""
    found: dict[str, dict[int, float]] = {}
    for tokens in TOKENS:
        sized = replace(runtime, max_tokens_per_rank=tokens, phase="prefill")
        try:
            candidates = make_plan(config, parallel, sized, device).candidates
        except UnsupportedError:
            continue
        for c in candidates:
            if c.support and (us := c.us) is not None:
                line = found.setdefault(f"{c.dispatcher} + {c.executor}", {})
                line[tokens] = min(us, line.get(tokens, us))
        bound = roofline_us(config, parallel, tokens, device)
        if bound is not None and any(tokens in line for line in found.values()):
            found.setdefault("roofline", {})[tokens] = bound
    return found


def _plot(config: MoEConfig, arguments: Explain, device: Device, path: Path) -> None:
    """Draws the time of a layer over tokens per rank, one line for each possible pair.

    Raises ConfigError where nothing is known of any pair's time, or as `eprt.bench.plot.plot`.
    """
    parallel = arguments.parallel
    lines = curves(config, parallel, arguments.runtime, device)
    if not lines:
        raise ConfigError(f"--plot {path}: no time is known on {device}; eprt tune measures this machine's")
    title = f"{parallel.world_size} x {device}, {parallel.ranks_per_host} per host: measured and modelled"
    points = [(name, tokens, us) for name, line in lines.items() for tokens, us in line.items()]
    rows = [{"shape": title, "pair": name, "tokens": tokens, "us": us} for name, tokens, us in points]
    plot(Report("plan", rows), path)
