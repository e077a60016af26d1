"""One SGLang engine of sglang_duel.py: a process that starts it with all its ranks, measures, and ends it."""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing as mp
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import vllm_engine

FOLDER = Path(__file__).resolve().parent
DECODED = re.compile(
    r"Decode batch, #running-req: (\d+), #(?:full )?token: (\d+),.*gen throughput \(token/s\): ([\d.]+)"
)
MEMORY = ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits", "-lms", "100"]
OTHER_RANK = re.compile(r" DP[1-9]\d*| TP[1-9]\d*")


def most_tokens(a: argparse.Namespace) -> int:
    """SGLang's chunked_prefill_size."""
    return 256 if a.tiny else 2048


def measure(log: Path, a: argparse.Namespace, folder: Path) -> None:
    """Starts SGLang, measures every batch, writes `log`.json."""
    started = time.perf_counter()
    import sglang
    import torch

    llm = sglang.Engine(model_path=str(folder), **settings_of(a))
    if not a.model.startswith("gpt-oss"):
        changed = llm.update_weights_from_tensor([("none", torch.zeros(1))], load_format=f"{__name__}.lively")
        if not changed[0]:
            raise RuntimeError(f"routers keep their dummy weights: {changed}")
    found: dict[str, Any] = {"ready_s": time.perf_counter() - started, "rows": []}
    answer = functools.partial(first_token, llm)
    found["rows"] += [row for length in a.prompts for row in vllm_engine.first_tokens(length, a.rounds, answer)]
    for batch in a.batches:
        found["rows"] += steps(llm, a, batch, log)
        log.with_suffix(".json").write_text(json.dumps(found))  # kept if a later batch runs out of time
    if a.profile:
        llm.start_profile(
            output_dir=str(log.with_suffix(".trace")),
            activities=["GPU" if a.device == "cuda" else "CPU"],
            with_stack=False,
        )
        answered(llm, a, a.profile, 32)
        llm.stop_profile()
    llm.shutdown()


def settings_of(a: argparse.Namespace) -> dict[str, Any]:
    """Returns SGLang's arguments: the same for both sides, but for the runner of SGLang's own experts."""
    ranks = a.dp * a.tp
    settings: dict[str, Any] = {"tp_size": ranks, "mem_fraction_static": 0.8, "attention_backend": a.attention}
    if a.device == "cpu":
        settings |= {"attention_backend": "intel_amx", "mem_fraction_static": 0.3, "max_total_tokens": 4096}
    else:
        settings |= {"cuda_graph_bs_decode": sorted({1, *a.batches}), "cuda_graph_max_bs_decode": max(a.batches)}
    if a.dp > 1:
        settings |= {"dp_size": a.dp, "ep_size": ranks, "enable_dp_attention": True, "enable_dp_lm_head": True}
    if a.backend:
        settings["moe_runner_backend"] = a.backend
    settings |= {
        "device": a.device,
        "skip_tokenizer_init": True,
        "load_format": "auto" if a.model.startswith("gpt-oss") else "dummy",
        "custom_weight_loader": [f"{__name__}.lively"],
        "dtype": "bfloat16",
        "context_length": 256 if a.tiny else 2048,
        "max_running_requests": max(a.batches) * a.dp,
        "chunked_prefill_size": most_tokens(a) * a.dp,  # SGLang divides it among the ranks
        "disable_radix_cache": True,
        "disable_prefill_cuda_graph": not a.prompts,  # they take half a minute of a start
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "log_level": "info",
        "decode_log_interval": max(1, a.tokens // 6),
    }
    return settings | a.engine


def steps(llm: Any, a: argparse.Namespace, batch: int, log: Path) -> list[dict[str, Any]]:
    """Measures decode steps of so many sequences a rank; first unmeasured, as SGLang compiles kernels then."""
    answered(llm, a, batch, a.tokens // 3)
    begin = log.stat().st_size
    distinct = [answered(llm, a, batch, a.tokens) for _ in range(a.rounds)][-1]
    found = decode_ms(log.read_bytes()[begin:].decode(errors="replace"), batch)
    if not found:
        raise RuntimeError(f"no stretch of decode steps of {batch} sequences alone: give more --tokens")
    return [{"batch": batch, "round": n, "step_ms": ms, "distinct": distinct} for n, ms in enumerate(found)]


def first_token(llm: Any, length: int) -> float:
    """Returns seconds until the first token of a prompt."""
    # Of 400 tokens, so that each layer's experts are visited as by a text.
    prompt = [7 + (17 * at * at + at) % 400 for at in range(length)]
    begin = time.perf_counter()
    llm.generate(input_ids=prompt, sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True})
    return time.perf_counter() - begin


def decode_ms(log: str, batch: int) -> list[float]:
    """Returns ms a step of each stretch in which rank 0 only decoded `batch` sequences, by SGLang's own counter.

    A stretch goes from one of its lines to the next. The first after a prefill counts that, the last of a batch, which
    has no tokens left, what SGLang does beside.
    """
    found, decoding = list[float](), False
    for line in log.splitlines():
        if OTHER_RANK.search(line):
            continue
        if match := DECODED.search(line):
            running, tokens, rate = int(match[1]), int(match[2]), float(match[3])
            if decoding and running == batch and tokens and rate:
                found.append(batch / rate * 1e3)
            decoding = running == batch
        elif "Prefill batch" in line:
            decoding = False
    return found


def answered(llm: Any, a: argparse.Namespace, batch: int, added: int) -> int:
    """Has so many sequences a rank answered; returns how many different tokens the first answer has."""
    # With dummy weights the last token alone says which experts are next: each sequence has its own.
    prompts = [[7 + i % 400, 11, 12, 7 + i % 400] for i in range(batch * a.dp)]
    outputs = llm.generate(
        input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": added, "ignore_eos": True}
    )
    return len(set(outputs[0]["output_ids"]))


def lively(model: Any, _: Any) -> None:
    """Changes dummy weights as under vLLM; SGLang calls this in each rank, by its dotted name."""
    vllm_engine.lively()(SimpleNamespace(get_model=lambda: model))


def run(side: str, a: argparse.Namespace, folder: Path, logs: Path, start: int) -> list[dict[str, Any]]:
    """Rows of one engine. Raises RuntimeError with the end of the log if it failed.

    Args:
        side: "eprt" or "none", and after a colon the runner of SGLang's own experts.
    """
    plugin, _, a.backend = side.partition(":")
    environment = {"SGLANG_PLUGINS": plugin, "EPRT_LOG": "INFO", "EPRT_SGLANG": a.options or ""}
    environment["PYTHONPATH"] = os.pathsep.join([*sys.path[:1], str(FOLDER), os.environ.get("PYTHONPATH", "")])
    if a.device == "cpu":
        environment |= {"SGLANG_PLUGINS": f"cpu,{plugin}", "SGLANG_USE_CPU_ENGINE": "1"}
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(a.dp * a.tp))
    if plugin != "eprt":
        environment["EPRT_SGLANG"] = ""
    log = logs / f"{a.model}-{side.replace(':', '-')}-{start}.log"
    done = log.with_suffix(".json")
    done.unlink(missing_ok=True)  # of an earlier run into the same folder
    process = mp.get_context("spawn").Process(target=vllm_engine.engine, args=(measure, log, environment, a, folder))
    with watched_memory(a.device == "cuda") as peaks:
        try:
            process.start()
            process.join(a.timeout)
        finally:  # also when this is interrupted: the ranks hold the GPUs' memory
            vllm_engine.end(process)
    text = log.read_text(errors="replace") if log.exists() else ""
    if not done.exists():
        raise RuntimeError(f"{side}: no result; its log ends with\n{text[-4000:]}")
    plan = vllm_engine.plan_of(text, side)
    found = json.loads(done.read_text())
    about = {"ready_s": round(found["ready_s"], 1), "plan": plan}
    if peaks:
        about["memory"] = {"weights_gb": weights(text), "peak_gib": [round(mib / 1024, 1) for mib in peaks]}
    return [
        {"plugin": side, "start": start, **row, "step_ms": round(row["step_ms"], 4), **about} for row in found["rows"]
    ]


@contextmanager
def watched_memory(on: bool) -> Iterator[list[int]]:
    """Yields a list that has, when the block has ended, the most MiB of each GPU that all processes together had in
    use; it stays empty where `on` is false."""
    peaks: list[int] = []
    if not on:
        yield peaks
        return
    with subprocess.Popen(MEMORY, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        thread = threading.Thread(target=highest, args=(reader.stdout, peaks), daemon=True)
        thread.start()
        try:
            yield peaks
        finally:
            reader.kill()
            thread.join()


def highest(lines: Iterable[str], peaks: list[int]) -> None:
    """Raises `peaks` to the largest value of each GPU in lines of "index, MiB"."""
    for line in lines:
        index, used = (int(cell) for cell in line.split(","))
        peaks.extend([0] * (index + 1 - len(peaks)))
        peaks[index] = max(peaks[index], used)


def weights(log: str) -> list[float]:
    """Returns what each rank's memory had less after loading, as SGLang says."""
    return [float(gb) for gb in re.findall(r"Load weight end\..* mem usage=([\d.]+) GB", log)]
