"""The part that vllm_duel.py and sglang_duel.py share: what is run in which turn, and what the rows say.

An engine's own modules know how it is started and measured: `run(side, arguments, model folder, logs, start) -> rows`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_models import LAYERS, MODELS, make_model

from eprt.bench.report import Report

READY_S = 60.0  # of a start, seconds beyond the engine's own
Limit = Callable[..., float]
Most = Callable[[argparse.Namespace], int]
Run = Callable[[str, argparse.Namespace, Path, Path, int], list[dict[str, Any]]]


def parser(doc: str, engine: str) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = found.add_argument
    add("--models", "--model", choices=MODELS, nargs="+", default=["gpt-oss"], help="one after the other")
    add("--layers", type=int, help="how many; default by model")
    add("--batches", type=int, nargs="+", default=[1, 32, 128], help="sequences a rank")
    add("--plugins", nargs="+", default=["none", "eprt"], help="plugin of each engine; or none:BACKEND")
    add("--starts", type=int, default=2, help="how often each engine is started")
    add("--rounds", type=int, default=3, help="measurements of each batch in a start")
    add("--tokens", type=int, default=96, help="of each sequence")
    add("--prompts", type=int, nargs="*", default=[], help="also: prompts of these lengths, one by one")
    add("--warm", choices=("first", "only", "no"), default="first", help=f"compile and tune before {engine}")
    add("--resume", action="store_true", help="leave out engines whose rows --json has")
    add("--dp", type=int, default=2, help="data-parallel ranks; experts are parallel if several")
    add("--tp", type=int, default=1, help="tensor-parallel ranks in each")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--options", help='eprt\'s RuntimeConfig fields as JSON, such as \'{"dispatcher": "symm"}\'')
    add("--tiny", action="store_true", help="tiny widths, for rehearsals")
    add("--timeout", type=float, default=420.0, help="seconds for one engine, start included")
    add("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    add("--logs", type=Path, help="folder for the engines' logs; default a temporary one")
    add("--json", type=Path)
    return found


def warm(a: argparse.Namespace, folder: Path, most: int) -> str:
    """Compiles and tunes for the plugin's layers, in ranks of their own. Returns what was warmed up, or why nothing."""
    from eprt.errors import EprtError
    from eprt.ranks.launcher import WorldPool

    options = json.loads(a.options) if a.options else {}
    options = {name: value for name, value in options.items() if name not in ("placement", "all_to_all", "strict")}
    begin = time.monotonic()
    try:
        with WorldPool(a.dp, a.device, timeout_s=a.timeout) as pool:
            found = pool.run(warm_layer, config=str(folder), most=max(most, *a.batches), tp=a.tp, options=options)
    except EprtError as error:
        return f"no warm-up: {error}"
    return f"{found[0]}, warm after {time.monotonic() - begin:.0f} s"


def warm_layer(context: Any, config: str, most: int, tp: int, options: dict[str, Any]) -> str:
    """Builds one rank's share of a layer as the plugin would."""
    from dataclasses import replace

    import torch

    from eprt.bench.experts import random_experts
    from eprt.config import Routing, RuntimeConfig
    from eprt.integrations.engine.settings import choose, with_low_precision
    from eprt.layer import ExpertParallelMoE
    from eprt.models import family_for
    from eprt.placement import ExpertPlacement
    from eprt.support import Device

    world = context.world(timeout_s=2400.0)
    hf = json.loads((Path(config) / "config.json").read_text())
    family = family_for(hf)
    found = family.moe_config(hf, family.moe_layers(hf)[-1])
    moe = replace(found, routing=Routing(), shared=None, intermediate_size=found.intermediate_size // tp)
    runtime = with_low_precision(moe, RuntimeConfig(max_tokens_per_rank=most, **options), options)
    device = Device.of(world.device)
    plan, runtime = choose(moe, world.parallel, runtime, device, captured=device.kind == "cuda")
    torch.manual_seed(0)
    local = ExpertPlacement(moe.num_experts, world.parallel).num_local_experts
    layer = ExpertParallelMoE(moe, world, random_experts(moe, local, world.device), runtime=runtime)
    world.warmup(layer)
    layer.close()
    return f"{plan.dispatcher} + {plan.executor}"


def findable(folder: Path, group: str, hook: str) -> None:
    """Engines find plugins by a package's entry points; where eprt is only on the path, say so in a folder."""
    if any(point.name == "eprt" for point in entry_points(group=group)):
        return
    info = folder / "eprt-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eprt\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\neprt = {hook}\n")
    root = str(Path(__file__).resolve().parents[1])
    sys.path[:0] = [str(folder), root]  # a spawned process has its parent's path, not the variable's
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), root, os.environ.get("PYTHONPATH", "")]))


def play(
    options: argparse.ArgumentParser, engine: str, entry: tuple[str, str], run: Run, most_tokens: Most, limit: Limit
) -> int:
    """Runs every engine in turn. Returns the exit status.

    Args:
        engine: its name; and, in small letters, that of the report.
        entry: the plugin's group and hook.
        most_tokens: returns the largest batch of tokens.
        limit: (model, what, batch, one_gpu=) -> the most that eprt's time may be of the engine's own.
    """
    a = options.parse_args()
    if a.resume and not a.json:
        options.error("--resume needs --json")
    scratch = Path(tempfile.mkdtemp(prefix=f"{engine.lower()}-duel-"))
    logs: Path = a.logs or scratch / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    findable(scratch / "plugin", *entry)
    report = Report(engine.lower(), [], command=shlex.join(["python", *sys.argv]))
    if a.resume and a.json.exists():
        earlier = json.loads(a.json.read_text())
        report.rows.extend(earlier["rows"])
        report.notes.extend(note for note in earlier["notes"] if "(at most " not in note)  # verdicts are made anew
        report.notes.append(f"resumed: {earlier['command']}")
    failed = False
    for model in a.models:
        one = argparse.Namespace(**vars(a), model=model)
        one.layers = a.layers or LAYERS[model]
        failed |= not duel(one, report, logs, run, most_tokens(one))
    if a.warm != "only":
        verdicts = compare(report.rows, engine, limit)
        report.notes.extend(verdicts)
        if a.json:
            report.write(a.json)
    shutil.rmtree(scratch, ignore_errors=True) if a.logs else say(f"logs: {logs}")
    return 1 if failed else 0


def duel(a: argparse.Namespace, report: Report, logs: Path, run: Run, most: int) -> bool:
    """Runs all engines of one model, their rows into the report. Returns whether every engine ran."""
    begin = time.monotonic()
    folder = make_model(a.model, a.layers, a.models_in, tiny=a.tiny)
    say(f"{folder} ready after {time.monotonic() - begin:.0f} s")
    there = {(row["model"], row["start"], row["plugin"]) for row in report.rows}
    turns = [(start, plugin) for start in range(a.starts) for plugin in a.plugins]
    turns = [(start, plugin) for start, plugin in turns if (a.model, start, plugin) not in there]
    if a.warm != "no" and any(plugin == "eprt" for _, plugin in turns):
        say(f"{a.model}: {warm(a, folder, most)}")
    graphs = "on" if a.device == "cuda" else "off"
    report.add([f"{a.model}: {a.layers} layers, random weights, greedy, CUDA graphs {graphs}"])
    good = True
    for start, plugin in [] if a.warm == "only" else turns:
        begin = time.monotonic()
        try:
            rows = run(plugin, a, folder, logs, start)
        except RuntimeError as error:
            say(f"FAIL {error}")
            report.notes.append(f"{a.model}, {plugin}, start {start}: {str(error).splitlines()[0]}")
            good = False
            continue
        report.rows.extend({"model": a.model, "layers": a.layers, "dp": a.dp, "tp": a.tp, **row} for row in rows)
        say(f"{plugin}: ready after {rows[0]['ready_s']} s, whole engine {time.monotonic() - begin:.0f} s")
        for line in rows[0]["plan"]:
            say(f"  {line}")
        if "memory" in rows[0]:
            say(f"  memory: {rows[0]['memory']}")
        for row in rows:
            what = f"{row['what']} of" if "what" in row else "a step,"
            say(f"  {row['step_ms']:9.3f} ms {what} {row['batch']} {row.get('unit', 'sequences')}")
        if a.json:
            report.write(a.json)
    return good


def compare(rows: list[dict[str, Any]], engine: str, limit: Limit) -> list[str]:
    """Returns what the medians of all starts and rounds say, a line per model and batch, and for the last start."""
    said: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        for what, batch in dict.fromkeys((row.get("what", "batch"), row["batch"]) for row in of_model):
            of_load = [row for row in of_model if (row.get("what", "batch"), row["batch"]) == (what, batch)]
            names = dict.fromkeys(row["plugin"] for row in of_load)
            sides = {side: _values(of_load, side, "step_ms") for side in names}
            ours = sides.pop("eprt", [])
            if sides and ours:
                best = min(sides, key=lambda side: statistics.median(sides[side]))  # the engine's quickest backend
                name = engine if best == "none" else f"{engine} ({best.partition(':')[2]})"
                ratio = statistics.median(ours) / statistics.median(sides[best])
                most = limit(model, what, batch, one_gpu=of_model[0].get("dp", 2) * of_model[0].get("tp", 1) == 1)
                said.append(
                    f"{model}, {what} {batch}: {name} {_spread(sides[best])} ms, eprt {_spread(ours)} ms, "
                    f"ratio {ratio:.3f}, {'met' if ratio <= most else 'MISSED'} (at most {most:.3g})"
                )
        last = max(row["start"] for row in of_model)
        own, ours = (_values(of_model, plugin, "ready_s", start=last) for plugin in ("none", "eprt"))
        if own and ours and last:
            more = ours[0] - own[0]
            verdict = "met" if more <= READY_S else "MISSED"
            said.append(
                f"{model}, start {last + 1}: ready after {own[0]:.1f} s with {engine}'s own, {ours[0]:.1f} s with eprt"
                f", {more:+.1f} s, {verdict} (at most {READY_S:.0f})"
            )
    for line in said:
        say(line)
    return said


def _values(rows: list[dict[str, Any]], plugin: str, name: str, **where: object) -> list[float]:
    return [row[name] for row in rows if row["plugin"] == plugin and all(row[key] == at for key, at in where.items())]


def _spread(values: list[float]) -> str:
    """Median, and the extremes of how many."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f} of {len(values)})"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's own output
