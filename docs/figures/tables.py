"""Writes the tables of numbers in docs/, and the pictures beside them, from benchmarks/results.

`python docs/figures/tables.py` (extra `plot`). On a page a table lies between `<!-- NAME: python docs/figures/tables.py
-->` and `<!-- end of NAME -->`; tests/unit/test_tables.py fails where a page shows anything else than this writes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
OURS = "triton_grouped"
REGION = re.compile(r"(<!-- (\w+): python docs/figures/tables\.py -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
Rows = list[dict[str, Any]]
Times = dict[tuple[str, int], dict[str, Any]]  # (backend, tokens) -> its row


@cache
def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(heading: Sequence[object], lines: Iterable[Sequence[object]]) -> str:
    cells = [[str(cell) for cell in line] for line in (heading, ["---"] * len(heading), *lines)]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def micro(us: float) -> str:
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def ratio(over: float, under: float) -> str:
    return f"{over / under:.2f}"


def devices(machine: list[str]) -> str:
    """["cuda:0: NVIDIA H200, sm90, ..", ..] -> 2 x NVIDIA H200."""
    return f"{len(machine)} x {machine[0].partition(': ')[2].split(',')[0]}"


def source(name: str) -> str:
    """One click to the file, and what its numbers can't be understood without. Links are as seen from the root."""
    found = result(name)
    machine, day = devices(found["machine"]), found["time"].partition("T")[0]
    told = f"{machine}, torch {found['versions']['torch']}, commit {found['commit'][:7]}, {day}"
    return f"[{name}.json](benchmarks/results/{name}.json): {told}."


# ---- transport ------------------------------------------------------------------------------------------------------

TRANSPORTS = {
    "`symm`": "symm",
    "FlashInfer one-sided": "flashinfer",
    "DeepEP low latency": "deepep",
    "`none`, on NCCL": "none",
    "`torch`, not in a graph": "torch",
}
DIRECT = {
    "FlashInfer / called directly": ("flashinfer", "flashinfer by hand"),
    "DeepEP / called directly": ("deepep", "deepep by hand"),
    "`none` / collectives called directly": ("none", "collectives by hand"),
}
SIZES = ((7168, 8), (2880, 4))


def times(name: str, hidden: int, routing: str = "uniform", payload: str = "bf16") -> Times:
    """(transport, tokens per rank) -> its row."""
    rows = [r for r in result(name)["rows"] if (r["hidden"], r["routing"], r["payload"]) == (hidden, routing, payload)]
    return {(r["transport"], r["tokens"]): r for r in rows}


def line(label: str, tokens: Iterable[int], cell: Callable[[int], str]) -> list[str]:
    """Empty where a row is missing."""
    found = []
    for n in tokens:
        try:
            found.append(cell(n))
        except KeyError:
            found.append("")
    return [label, *found]


def dispatch(name: str) -> str:
    tokens = sorted({r["tokens"] for r in result(name)["rows"]})
    lines = [row for sizes in SIZES for row in dispatch_lines(name, tokens, *sizes)]
    heading = [f"tokens per rank, {result(name)['rows'][0]['ranks']} GPUs", *tokens]
    return f"{table(heading, lines)}\n\n{source(name)}"


def dispatch_lines(name: str, tokens: list[int], hidden: int, top_k: int) -> list[list[str]]:
    uniform, hot = times(name, hidden), times(name, hidden, "hot_expert")

    def time(label: str, transport: str) -> list[str]:
        return line(label, tokens, lambda n: micro(uniform[transport, n]["p50_us"]))

    def over(label: str, one: str, other: str, of: Times = uniform) -> list[str]:
        return line(label, tokens, lambda n: ratio(of[one, n]["p50_us"], of[other, n]["p50_us"]))

    found = [time(*pair) for pair in TRANSPORTS.items()]
    found[0][0] = f"hidden {hidden}, top-k {top_k}: {found[0][0]}"
    return [
        *found,
        line("floor", tokens, lambda n: micro(uniform["symm", n]["floor_us"])),
        line("floor / `symm`", tokens, lambda n: f"{uniform['symm', n]['floor_share']:.2f}"),
        over("`symm` / FlashInfer", "symm", "flashinfer"),
        over("`symm` / FlashInfer, a hot expert", "symm", "flashinfer", hot),
        *(over(label, *pair) for label, pair in DIRECT.items()),
    ]


def dispatch_runs() -> str:
    """What differs from run to run, on four GPUs."""
    names = ("dispatch_h200_x4", "dispatch_earlier_h200_x4", "dispatch_floor_h200_x4")
    tokens = sorted({r["tokens"] for r in result(names[0])["rows"]})

    def run(hidden: int, name: str) -> list[str]:
        of, label = times(name, hidden), f"hidden {hidden}: [{name}.json](benchmarks/results/{name}.json)"
        return line(label, tokens, lambda n: ratio(of["symm", n]["p50_us"], of["flashinfer", n]["p50_us"]))

    lines = [run(hidden, name) for hidden, _ in SIZES for name in names]
    return table(["`symm` / FlashInfer, tokens per rank", *tokens], lines)


def dispatch_fp8() -> str:
    """Packed tokens beside bf16 ones of the same machine."""
    tokens, lines, sources = (128, 1024, 2048, 4096), [], []
    for ranks, packed, plain in ((2, "dispatch_fp8_h200_x2", "dispatch_h200_x2"), (4, *["dispatch_fp8_h200_x4"] * 2)):
        sources.append(source(packed))
        for hidden, _ in SIZES:
            fp8, bf16 = times(packed, hidden, payload="fp8_block"), times(plain, hidden)
            where = f"{ranks} GPUs, hidden {hidden}"
            lines += fp8_lines(where, tokens, fp8, bf16)
    return f"{table(['tokens per rank', *tokens], lines)}\n\n" + "\n".join(sources)


def fp8_lines(where: str, tokens: Sequence[int], fp8: Times, bf16: Times) -> list[list[str]]:
    def over(label: str, column: str, other: tuple[Times, str]) -> list[str]:
        of, transport = other
        return line(f"{where}: {label}", tokens, lambda n: ratio(fp8["symm", n][column], of[transport, n][column]))

    return [
        over("dispatch alone, FP8 / bf16", "dispatch_us", (bf16, "symm")),
        over("there and back, FP8 / bf16", "p50_us", (bf16, "symm")),
        over("there and back, FP8: `symm` / FlashInfer", "p50_us", (fp8, "flashinfer")),
    ]


# ---- router, experts, steps -----------------------------------------------------------------------------------------


def router() -> str:
    rows: Rows = result("router_h200")["rows"]
    tokens = sorted({r["tokens"] for r in rows})
    lines = []
    for shape in dict.fromkeys(r["shape"] for r in rows):
        for label, kind in (("kernels", "eprt"), ("plain torch", "torch")):
            of = {r["tokens"]: r for r in rows if (r["shape"], r["router"]) == (shape, kind)}
            host = f"{median(r['host_us'] for r in of.values()):.0f}"
            lines.append([shape if kind == "eprt" else "", label, *(micro(of[n]["us"]) for n in tokens), host])
    return f"{table(['router', 'tokens', *tokens, 'host'], lines)}\n\n{source('router_h200')}"


STEPS = "step_h200_x2"


def step() -> str:
    """Of each model: milliseconds, and the step graph over transformers' own."""
    rows: Rows = result(STEPS)["rows"]
    tokens, lines = sorted({r["tokens"] for r in rows}), list[list[str]]()
    for model in dict.fromkeys(r["model"] for r in rows):
        of = {(r["path"], r["tokens"]): r["step_p50_us"] / 1e3 for r in rows if r["model"] == model}
        for path in dict.fromkeys(path for path, _ in of):
            whose = path if path.startswith("transformers") else f"eprt, {path}"
            lines.append(line(f"{model}: {whose}", tokens, lambda n, of=of, path=path: f"{of[path, n]:.2f}"))
        for one, other in (("step graph", "transformers graph"), ("in a step", "transformers")):
            over = line(f"eprt, {one} / {other}", tokens, lambda n, of=of, a=one, b=other: ratio(of[a, n], of[b, n]))
            lines.append(over)
    return f"{table(['step, tokens per rank', *tokens], lines)}\n\n{source(STEPS)}"


EXPERTS = ("experts_grouped_h200", "experts_fp8_activations_h200", "experts_h200")
BASELINES = "experts_peers_h200"
DECODES = ("torch_grouped",)  # computes with bf16 weights, whatever they came in


def experts() -> str:
    """A call that has no row of a local expert is no measurement of experts."""
    rows = [r for name in EXPERTS for r in result(name)["rows"] if r["local_rows"]]
    tokens = sorted({r["tokens"] for r in rows})
    shapes = dict.fromkeys(r["shape"] for r in rows)
    lines = [row for shape in shapes for row in expert_lines([r for r in rows if r["shape"] == shape], tokens)]
    return f"{table(['experts, tokens of all ranks', *tokens], lines)}\n\n" + "\n".join(map(source, EXPERTS))


def models() -> str:
    """Ours / vLLM's by model and number format."""
    name = "experts_models_h200"
    rows = result(name)["rows"]
    tokens, lines = sorted({r["tokens"] for r in rows}), list[list[str]]()
    for model, form in dict.fromkeys((r["model"], r["weight_format"]) for r in rows):
        own = [r for r in rows if (r["model"], r["weight_format"]) == (model, form)]
        ours, theirs = [
            {r["tokens"]: r["us"] for r in own if (r["executor"] == OURS) is mine} for mine in (True, False)
        ]
        lines.append([form, *line(model, tokens, lambda n, ours=ours, theirs=theirs: ratio(ours[n], theirs[n]))])
    return f"{table(['weights', 'model, tokens', *tokens], lines)}\n\n{source(name)}"


def expert_lines(rows: Rows, tokens: list[int]) -> list[list[str]]:
    """Of one shape: every executor's times, the fastest in all first, and the floor."""

    def label(row: dict[str, Any]) -> str:
        quantised = row["executor"] == OURS and row.get("activations") == "fp8"
        return f"`{row['executor']}`{', FP8 activations' if quantised else ''}"

    of = {(label(r), r["tokens"]): r for r in rows}
    names = sorted({name for name, _ in of}, key=lambda name: (OURS not in name, of[name, 128]["us"]))
    found = [line(name, tokens, lambda n, name=name: micro(of[name, n]["us"])) for name in names]
    kept = next((r["weight_format"] for r in rows if r["executor"] not in DECODES), "bf16")
    found[0][0] = f"{rows[0]['shape']}, {kept}: {found[0][0]}"
    first = names[0]
    floor = line("floor", tokens, lambda n: micro(max(of[first, n][c] for c in ("weights_us", "flops_us"))))
    return [*found, floor, line(f"{first} / floor", tokens, lambda n: f"{of[first, n]['ratio']:.2f}")]


NEW_FORMATS_H100 = ("experts_int4_h100", "experts_fp8_channel_h100")


def peers(names: Sequence[str], *, floor: bool) -> str:
    """Whole experts of engines and libraries beside ours. `floor`: and beside the lower bounds of the same run."""
    rows: Rows = [row for name in names for row in result(name)["rows"]]
    tokens, lines = sorted({r["tokens"] for r in rows}), list[list[str]]()
    for shape in dict.fromkeys(r["shape"] for r in rows):
        of = {(r["executor"], r["tokens"]): r["us"] for r in rows if r["shape"] == shape}
        others = [name for name in dict.fromkeys(name for name, _ in of) if name != OURS]
        for name in (OURS, *others):
            label = f"{shape}: `{OURS}`" if name == OURS else name
            lines.append(line(label, tokens, lambda n, of=of, name=name: micro(of[name, n])))
        best = line(
            "ours / the best of them", tokens, lambda n, of=of, o=others: ratio(of[OURS, n], min(of[x, n] for x in o))
        )
        lines.append(best)
        if floor:
            bounds = {r["tokens"]: max(r["weights_us"], r["flops_us"]) for r in rows if r["shape"] == shape}
            lines.append(line("floor", tokens, lambda n, b=bounds: micro(b[n])))
            lines.append(line(f"`{OURS}` / floor", tokens, lambda n, b=bounds, of=of: ratio(of[OURS, n], b[n])))
    return f"{table(['experts, tokens of all ranks', *tokens], lines)}\n\n" + "\n".join(map(source, names))


def profile() -> str:
    """The GEMMs; other kernels only by their time."""
    name, lines = "profile_grouped_h200", list[list[str]]()
    rows: Rows = result(name)["rows"]
    for shape, tokens in sorted({(r["shape"], r["tokens"]) for r in rows}):
        of = [r for r in rows if (r["shape"], r["tokens"]) == (shape, tokens)]
        gemms = [r for r in of if r["kernel"].startswith("grouped_gemm")]
        for label, r in zip(("gate and up", "down"), gemms, strict=True):
            waits = ", ".join(f"{why.replace('_', ' ')} {percent}" for why, percent in list(r["waits"].items())[:4])
            busy = [f"{r[column]:.0f}" for column in ("tensor", "issue", "dram", "l2")]
            lines.append([shape, str(tokens), label, micro(r["us"]), *busy, str(r["registers"]), waits])
        rest = sum(r["us"] for r in of if r not in gemms)
        lines.append([shape, str(tokens), "list and weighted sum", micro(rest), *[""] * 6])
    heading = ["shape", "tokens", "kernel", "us", "tensor cores", "issue slots", "memory", "L2", "registers", "waits"]
    return f"{table(heading, lines)}\n\n{source(name)}"


def errors() -> str:
    name = "executor_errors_h200"
    rows: Rows = result(name)["rows"]
    lines = []
    for shape, executor in dict.fromkeys((r["shape"], r["executor"]) for r in rows):
        of = {r["tokens"]: r for r in rows if (r["shape"], r["executor"]) == (shape, executor)}
        lines.append([shape, f"`{executor}`", *(f"{of[n]['error']:.2%} ({of[n]['most']:.2%})" for n in sorted(of))])
    tokens = sorted({r["tokens"] for r in rows})
    return f"{table(['shape', 'executor', *(f'{n} tokens' for n in tokens)], lines)}\n\n{source(name)}"


LAYERS = ("layer_h200_x2", "layer_fp8_h200_x2", "layer_fp8_activations_h200_x2")


def layer() -> str:
    lines = []
    rows = [r for name in LAYERS for r in result(name)["rows"]]
    tokens = sorted({r["tokens"] for r in rows})
    for shape, activations in dict.fromkeys((r["shape"], r.get("activations", "bf16")) for r in rows):
        of = {r["tokens"]: r for r in rows if (r["shape"], r.get("activations", "bf16")) == (shape, activations)}
        label = f"{shape}{', FP8 activations' if activations == 'fp8' else ''}, `{next(iter(of.values()))['pair']}`"
        for what, column in (("in a graph", "layer_graph_p50_us"), ("the host, eager", "layer_p50_us")):
            lines.append(line(f"{label}: {what}", tokens, lambda n, of=of, column=column: micro(of[n][column])))
    heading = [f"a layer on {rows[0]['ranks']} GPUs, tokens per rank", *tokens]
    return f"{table(heading, lines)}\n\n" + "\n".join(map(source, LAYERS))


def placed() -> str:
    """What replicas bring under uneven routing, and cost under even routing."""
    names, lines = ("placed_h200_x2", "placed_even_h200_x2"), []
    rows: Rows = [row for name in names for row in result(name)["rows"]]
    in_order = {(r["routing"], r["shape"], r["tokens"]): r for r in rows if r["placement"] == "in order"}
    for row in (r for r in rows if r["placement"] == "planned"):
        before = in_order[row["routing"], row["shape"], row["tokens"]]
        facts = [row["routing"], row["shape"], row["tokens"], f"{before['imbalance']:.2f}", f"{row['imbalance']:.2f}"]
        us = [micro(before["layer_p50_us"]), micro(row["layer_p50_us"])]
        lines.append([*facts, *us, f"{row['gain']:.2f}", f"{row['predicted_gain']:.2f}"])
    heading = ["routing", "shape", "tokens per rank", "max/mean in order", "max/mean planned"]
    heading += ["us in order", "us planned", "gain"]
    return f"{table([*heading, 'by the model'], lines)}\n\n" + "\n".join(map(source, names))


def duel(name: str, engine: str) -> str:
    """Medians of a decode step or of a whole load, and the extremes."""
    lines = list[list[str]]()

    def load(row: dict[str, Any]) -> tuple[str, str]:
        unit = row.get("unit", "sequences") if row["batch"] > 1 else "sequence"
        return row["model"], f"{row.get('what', 'step')} of {row['batch']} {unit}"

    rows: Rows = result(name)["rows"]
    sides = dict.fromkeys(r["plugin"] for r in rows if r["plugin"] != "eprt")
    own = {side: f"{engine}'s {side.partition(':')[2] or 'own experts'}" for side in sides}
    for model, what in dict.fromkeys(map(load, rows)):
        steps = {
            plugin: [r["step_ms"] for r in rows if load(r) == (model, what) and r["plugin"] == plugin]
            for plugin in (*own, "eprt")
        }
        cells = [f"{median(ms):.2f} ({min(ms):.2f} to {max(ms):.2f} of {len(ms)})" for ms in steps.values()]
        cells += [ratio(median(steps["eprt"]), median(steps[side])) for side in own]
        lines.append([model, what, *cells])
    ratios = [f"eprt / {side.partition(':')[2] or engine}" for side in own]
    spread = ", ms (min to max of n)"
    heading = ["model", "load of a rank", *(f"{title}{spread}" for title in own.values()), f"eprt's{spread}", *ratios]
    return f"{table(heading, lines)}\n\n{source(name)}"


def duel_memory(name: str) -> str:
    """Memory a GPU: of the weights as the engine says, and the most in use."""
    found = {row["plugin"]: row["memory"] for row in result(name)["rows"] if "memory" in row}
    names = {"eprt": "eprt", "none": "the engine"}
    lines = [
        [
            names.get(side) or side.partition(":")[2],
            *(" and ".join(map(str, memory[unit])) for unit in ("weights_gb", "peak_gib")),
        ]
        for side, memory in found.items()
    ]
    return f"{table(['experts of', 'weights, GB a GPU', 'most in use, GiB a GPU'], lines)}\n\n{source(name)}"


# ---- tests, faults --------------------------------------------------------------------------------------------------


def gpu_tests() -> str:
    lines = []
    for path in sorted((RESULTS / "tests").glob("*.json")):
        found = json.loads(path.read_text())
        if not found["machine"][0].startswith("cuda"):
            continue
        counts = [sum(r[kind] for r in found["rows"]) for kind in ("passed", "skipped", "failed")]
        name = path.relative_to(RESULTS)
        link = f"[{path.stem}](benchmarks/results/{name})"
        lines.append([link, devices(found["machine"]), *counts, found["commit"][:7], found["time"].partition("T")[0]])
    return table(["tests", "GPUs", "passed", "skipped", "failed", "commit", "day"], lines)


FAULTS = {
    "kill": "is killed",
    "stop": "is stopped",
    "cut off": "is cut off, or its host of two",
    "raise": "raises",
    "leave": "exits with code 0",
    "skip": "skips a step or a phase (`WorldMismatch` on all)",
    "sleep": "sleeps",
}
MEETING = ("meeting", "meeting, with a rank to come", "groups", "control")


def faults(name: str) -> str:
    rows: Rows = result(name)["rows"]
    lines = []
    for fault, words in FAULTS.items():
        for when, meets in (("in a step", False), ("while ranks meet", True)):
            these = [r for r in rows if r["fault"] == fault and (r["moment"] in MEETING) == meets]
            found = [r["seconds"] for r in these if r["ok"]]
            if found:
                lines.append([f"{words}, {when}", len(found), f"{median(found):.2f}", f"{max(found):.2f}"])
            went_on = [r["resumed"] for r in these if r["ok"] and r.get("resumed") is not None]
            if went_on:
                said = f"{words}, {when}: first output without it"
                lines.append([said, len(went_on), f"{median(went_on):.2f}", f"{max(went_on):.2f}"])
    bad, calm = sum(not r["ok"] for r in rows), sum(r["fault"] == "none" for r in rows)
    said = f"{len(rows)} trials, of which {bad} named another rank, were late, gave a wrong output or left something"
    controls = f"; {calm} of them are controls without a fault" if calm else ""
    return f"{table(['a rank', 'trials', 'median', 'most'], lines)}\n\n{said}{controls}. {source(name)}"


def soak() -> str:
    found = result("soak_cpu")
    rows, limits = found["rows"], found["limits"]
    heading = ["steps", "ranks", "seconds", "MB more", "descriptors more", "threads more"]
    more = [f"{limits['more_mb']:.1f}", f"{limits['more_descriptors']:.0f}", f"{limits['more_threads']:.0f}"]
    steps, ranks = max(r["step"] for r in rows) + 1, len({r["rank"] for r in rows})
    lines = [[steps, ranks, f"{limits['seconds']:.0f}", *more]]
    return f"{table(heading, lines)}\n\n{source('soak_cpu')}"


def simulated_ep64() -> str:
    """A line a routing, number of tokens and placement."""
    names = {"uniform": "uniform", "zipf:0.6:0": "Zipf 0.6", "zipf:1.1:0": "Zipf 1.1"}
    transports = ("none", "torch", "deepep")
    of = {(r["routing"], r["tokens"], r["placement"], r["transport"]): r for r in result("simulated_ep64")["rows"]}
    cases = sorted(dict.fromkeys(key[:3] for key in of), key=lambda case: (list(names).index(case[0]), case[1]))
    heading = ["routing", "tokens per rank", "experts lie", "max/mean"]
    heading += [f"`{name}`: MB into the hottest rank" for name in transports[1:]]
    heading += [f"`{name}`: us a layer" for name in transports]
    lines = []
    for routing, tokens, placement in cases:
        here = [of[routing, tokens, placement, name] for name in transports]
        moved = [f"{row['hottest_mb']:.0f}" for row in here[1:]]
        facts = [names[routing], tokens, placement, f"{here[0]['imbalance']:.2f}"]
        lines.append([*facts, *moved, *(f"{row['us']:.0f}" for row in here)])
    return f"{table(heading, lines)}\n\nSimulated on a CPU; {source('simulated_ep64')}"


TABLES: dict[str, Callable[[], str]] = {
    "dispatch_h200_x2": lambda: dispatch("dispatch_h200_x2"),
    "dispatch_h200_x4": lambda: dispatch("dispatch_h200_x4"),
    "dispatch_runs": dispatch_runs,
    "dispatch_fp8": dispatch_fp8,
    "router": router,
    "step": step,
    "experts": experts,
    "models": models,
    "peers": lambda: peers((BASELINES,), floor=False),
    "int4": lambda: peers(("experts_int4_h200",), floor=True),
    "geglu": lambda: peers(("experts_gemma4_h200",), floor=True),
    "fp8_channel": lambda: peers(("experts_fp8_channel_h200",), floor=True),
    "new_formats_h100": lambda: peers(NEW_FORMATS_H100, floor=True),
    "mxfp4_one_gpu": lambda: peers(("experts_gpt_oss_20b_h100",), floor=True),
    "fp8_blocks": lambda: peers(("experts_fp8_block_h200",), floor=True),
    "profile": profile,
    "errors": errors,
    "layer": layer,
    "placed": placed,
    "vllm": lambda: duel("vllm_h200_x2", "vLLM"),
    "vllm_one_gpu": lambda: duel("vllm_gpt_oss_20b_h200_x1", "vLLM"),
    "vllm_marlin": lambda: duel("vllm_gpt_oss_20b_marlin_h100_x1", "vLLM"),
    "vllm_qwen3": lambda: duel("vllm_qwen3_h200_x1", "vLLM"),
    "vllm_qwen3_fp8": lambda: duel("vllm_qwen3_30b_fp8_h200_x1", "vLLM"),
    "vllm_prompts": lambda: duel("vllm_prompts_h200_x1", "vLLM"),
    "vllm_gemma4": lambda: duel("vllm_gemma4_h200_x1", "vLLM"),
    "sglang_one_gpu": lambda: duel("sglang_gpt_oss_20b_h200_x1", "SGLang"),
    "sglang_qwen3": lambda: duel("sglang_qwen3_h200_x1", "SGLang"),
    "sglang_glm_air": lambda: duel("sglang_glm_air_h200_x1", "SGLang"),
    "sglang_prompts": lambda: duel("sglang_prompts_h200_x1", "SGLang"),
    "sglang_two_gpus": lambda: duel("sglang_gpt_oss_20b_h100_x2", "SGLang"),
    "sglang_memory": lambda: duel_memory("sglang_gpt_oss_20b_h100_x2"),
    "gpu_tests": gpu_tests,
    "faults_cpu": lambda: faults("faults_cpu"),
    "faults_h200_x2": lambda: faults("faults_h200_x2"),
    "soak": soak,
    "simulated_ep64": simulated_ep64,
}


def written(page: str, text: str) -> str:
    """The page's text with every table as the result files have it."""

    def one(found: re.Match[str]) -> str:
        up = os.path.relpath("benchmarks", Path(page).parent)
        return f"{found[1]}{TABLES[found[2]]().replace('](benchmarks/', f']({up}/')}\n{found[3]}"

    return REGION.sub(one, text)


if __name__ == "__main__":
    import pictures

    for path in ROOT.glob("docs/**/*.md"):
        path.write_text(written(str(path.relative_to(ROOT)), path.read_text()))
    pictures.write()
