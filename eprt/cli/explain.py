"""`eprt explain`: what would run a model, and why everything else would not. No GPU, no kernel library, no weights."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from eprt.cli.arguments import Explain
from eprt.cli.terminal import Terminal
from eprt.config import MoEConfig, ParallelConfig, Routing, RuntimeConfig
from eprt.errors import ConfigError
from eprt.models import family_for
from eprt.models.checkpoint import read_config
from eprt.models.hf_config import where
from eprt.plan import Candidate, Plan, make_plan
from eprt.support import Device


def explain(arguments: Explain, terminal: Terminal) -> int:
    """The command. Returns 0; a model that nothing can run raises UnsupportedError with the same table."""
    hf = read_config(arguments.model)
    parallel = ParallelConfig(arguments.world, arguments.attention_tp, arguments.moe_tp, arguments.ranks_per_host)
    runtime = RuntimeConfig(
        dispatcher=arguments.dispatcher,
        executor=arguments.executor,
        max_tokens_per_rank=arguments.max_tokens,
        phase=arguments.phase,
    )
    device = Device.parse(arguments.device)
    shown: list[dict[str, Any]] = []
    for config, layers in _kinds_of_layers(hf):
        plan = make_plan(config, parallel, runtime, device)
        _say(terminal, config, layers, parallel, arguments, plan)
        shown.append({"layers": layers, "config": asdict(config), **_as_json(plan)})
    terminal.result({"model": str(arguments.model), "device": str(device), "phase": runtime.phase, "plans": shown})
    return 0


def _kinds_of_layers(hf: dict[str, Any]) -> list[tuple[MoEConfig, list[int]]]:
    """Each kind of layer that a plan tells apart (routing doesn't matter to it): its first config, its numbers."""
    family = family_for(hf)
    kinds: dict[MoEConfig, tuple[MoEConfig, list[int]]] = {}
    for layer in family.moe_layers(hf):
        config = family.moe_config(hf, layer)
        kinds.setdefault(replace(config, routing=Routing()), (config, []))[1].append(layer)
    if not kinds:
        raise ConfigError(f"{where(hf)}: the {hf.get('model_type')} model has no MoE layers")
    return list(kinds.values())


def _say(
    terminal: Terminal,
    config: MoEConfig,
    layers: list[int],
    parallel: ParallelConfig,
    arguments: Explain,
    plan: Plan,
) -> None:
    terminal.say(
        f"layers {_ranges(layers)}: {config.num_experts} experts in {config.weight_format}, top-{config.top_k}, "
        f"hidden {config.hidden_size}, intermediate {config.intermediate_size}, {config.activation.kind}"
    )
    terminal.say(
        f"world of {parallel.world_size} x {arguments.device}: {parallel.dp_size} data-parallel x "
        f"{parallel.attention_tp_size} attention-TP, {parallel.ep_size} expert-parallel x {parallel.moe_tp_size} "
        f"MoE-TP; {arguments.phase}, up to {arguments.max_tokens} tokens a rank"
    )
    chosen = (plan.dispatcher, plan.executor, plan.token_format)
    terminal.table(
        "Candidates (-> chosen, ok possible, no refused)",
        ["", "dispatcher", "executor", "tokens", "reason"],
        [[_mark(c, chosen), c.dispatcher, c.executor, c.token_format, c.support.reason] for c in plan.candidates],
    )
    terminal.say(f"\nChoice: dispatcher {plan.dispatcher}, executor {plan.executor}, {plan.token_format} tokens")
    terminal.say(f"  why: {plan.reason}\n")


def _mark(candidate: Candidate, chosen: tuple[str, str, str]) -> str:
    if (candidate.dispatcher, candidate.executor, candidate.token_format) == chosen:
        return "->"
    return "ok" if candidate.support else "no"


def _as_json(plan: Plan) -> dict[str, Any]:
    return {
        "dispatcher": plan.dispatcher,
        "executor": plan.executor,
        "tokens": plan.token_format,
        "payload": plan.payload,
        "reason": plan.reason,
        "candidates": [
            {
                "dispatcher": c.dispatcher,
                "executor": c.executor,
                "tokens": c.token_format,
                "adapted": c.adapted,
                "ok": c.support.ok,
                "reason": c.support.reason,
            }
            for c in plan.candidates
        ],
    }


def _ranges(numbers: list[int]) -> str:
    """ "0-2, 5": consecutive numbers as ranges."""
    parts: list[str] = []
    start = previous = numbers[0]
    for number in [*numbers[1:], None]:
        if number is not None and number == previous + 1:
            previous = number
            continue
        parts.append(str(start) if start == previous else f"{start}-{previous}")
        start = previous = number if number is not None else 0
    return ", ".join(parts)
