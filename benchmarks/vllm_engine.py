"""One vLLM engine of vllm_duel.py, a process for each data-parallel rank: started, measured, ended."""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LEAST_STEPS = 8  # of all sequences at once, for a mean
PREFILL, MIXED, MIXED_OUT = 1024, 512, 64  # tokens of a prompt; and of an answer
UNMEASURED, PROMPT_ROUNDS = 3, 5  # times that a prompt is sent first, and for each of --rounds
ALONE = 12  # sequences of a batch that are run again, each alone


def shares(a: argparse.Namespace) -> bool:
    """Returns whether several engines of vllm_invariant.py share the GPU. Their batches have few tokens at once, for
    which few kernels have to be compiled."""
    return a.turns is not None


def from_files(a: argparse.Namespace) -> bool:
    return a.model.startswith("gpt-oss") or shares(a)


def most_tokens(a: argparse.Namespace) -> int:
    """vLLM's max_num_batched_tokens."""
    if a.tiny or shares(a):
        return 256
    return 8192 if a.prefill or a.mixed else 2048


def engine(measure: Callable[..., None], log: Path, environment: dict[str, str], *arguments: Any) -> None:
    """Runs `measure(log, *arguments)` as this whole process, its output into `log`."""
    os.setsid()
    os.environ.update(environment)
    with log.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    try:
        measure(log, *arguments)
    except BaseException:  # noqa: BLE001  (told, and the process ends)
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for the engine's own processes, which wait for each other


def measure(log: Path, a: argparse.Namespace, folder: Path, rank: int, meet: Any) -> None:
    """Starts vLLM, measures every load, writes `log`.json."""
    if a.dp > 1:
        os.environ.update(VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank))
    started = time.perf_counter()
    from vllm import LLM

    llm = LLM(model=str(folder), **settings_of(a))
    if not from_files(a):
        llm.collective_rpc(lively())  # not apply_model: that pickles its function as an argument
    ready = time.perf_counter() - started
    loads = Loads(llm, rank, a, meet)
    rows = loads.alone(a.alone)
    rows += [row for length in a.prompts for row in first_tokens(length, a.rounds, loads.first_token)]
    wait_for_engines(a)
    for batch in a.batches:
        with in_turn(a):
            rows += loads.steps(batch)
    rows += loads.whole("prefill", a.prefill, PREFILL, 1) + loads.whole("mixed", a.mixed, MIXED, MIXED_OUT)
    log.with_suffix(".json").write_text(json.dumps({"ready_s": ready, "rows": rows}))
    meet.wait(a.timeout)
    llm.llm_engine.engine_core.shutdown()


def wait_for_engines(a: argparse.Namespace) -> None:
    """Where engines share a GPU: waits until all have started, or failed to."""
    if not shares(a):
        return
    started, engines, _ = a.turns
    with started.get_lock():
        started.value += 1
    deadline = time.monotonic() + a.patience
    while started.value < engines and time.monotonic() < deadline:
        time.sleep(0.05)


@contextmanager
def in_turn(a: argparse.Namespace) -> Iterator[None]:
    """Where engines share a GPU: lets one measure at a time. They take turns from batch to batch, as the GPU's clock
    and what else the host does change within minutes."""
    if not shares(a):
        yield
        return
    with a.turns[2]:
        yield
    time.sleep(0.2)  # those who wait come first


def settings_of(a: argparse.Namespace) -> dict[str, Any]:
    """Returns vLLM's arguments: the same for both sides, but for the backend of vLLM's own experts."""
    settings: dict[str, Any] = {"gpu_memory_utilization": 0.1, "enforce_eager": True}
    if a.device == "cuda":
        # Prompts are padded to vLLM's own sizes, which take it a minute to capture.
        sizes = {} if a.prompts else {"cudagraph_capture_sizes": sorted({1, *a.batches, max(1, a.alone)})}
        settings = {"gpu_memory_utilization": 0.85 if a.dp == a.tp == 1 else 0.8, "compilation_config": sizes}
    if shares(a) and a.device == "cuda":
        settings |= {"gpu_memory_utilization": 0.2, "kv_cache_memory_bytes": 3 << 30}
    if a.all2all:
        settings["all2all_backend"] = a.all2all
    if a.attention:
        settings["attention_backend"] = a.attention
    if a.backend:
        settings["moe_backend"] = a.backend
    if a.options:
        settings["additional_config"] = {"eprt": json.loads(a.options)}
    return settings | {
        "skip_tokenizer_init": True,
        "load_format": "auto" if from_files(a) else "dummy",
        "dtype": "bfloat16",
        "max_model_len": 256 if a.tiny else 2048,
        "max_num_seqs": max([*a.batches, a.mixed, a.alone]),
        "max_num_batched_tokens": most_tokens(a),
        "tensor_parallel_size": a.tp,
        "enable_expert_parallel": a.dp > 1 and not a.without_ep,
        "enable_prefix_caching": False,
    }


def first_tokens(length: int, rounds: int, answer: Callable[[int], float]) -> list[dict[str, Any]]:
    """Measures how long a prompt of so many tokens, alone, waits for its first one: `answer` says it in seconds."""
    taken = [answer(length) for _ in range(UNMEASURED + PROMPT_ROUNDS * rounds)][UNMEASURED:]
    what = {"what": "prompt", "batch": length, "unit": "tokens"}
    return [what | {"round": number, "step_ms": seconds * 1e3} for number, seconds in enumerate(taken)]


class Loads:
    """What one rank's engine is asked for, all ranks beginning together."""

    def __init__(self, llm: Any, rank: int, a: argparse.Namespace, meet: Any) -> None:
        self.llm, self.rank, self.a, self.meet = llm, rank, a, meet

    def steps(self, batch: int) -> list[dict[str, Any]]:
        """Measures decode steps of so many sequences; first unmeasured, as vLLM compiles kernels of its own then."""
        self._decode(batch)
        found = [self._decode(batch) for _ in range(self.a.rounds)]
        return [
            {"batch": batch, "round": number, "step_ms": step * 1e3, "distinct": distinct}
            for number, (step, distinct) in enumerate(found)
        ]

    def whole(self, what: str, count: int, length: int, added: int) -> list[dict[str, Any]]:
        """Measures how long `count` prompts of `length` tokens take with `added` tokens each; first unmeasured."""
        rows: list[dict[str, Any]] = []
        for number in range(-1, self.a.rounds) if count else ():
            seconds, _ = self._answer(count, length // 8 if self.a.tiny else length, added)
            rows.append({"what": what, "batch": count, "round": number, "step_ms": seconds * 1e3})
        return rows[1:]

    def first_token(self, length: int) -> float:
        return self._answer(1, length, 1)[0]

    def alone(self, count: int) -> list[dict[str, Any]]:
        """Compares log-probabilities of some of `count` sequences with those that each has alone."""
        from vllm import SamplingParams

        if not count:
            return []
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
        sampling.logprobs, sampling.prompt_logprobs = 5, 1
        # Prompts of 5 to 74 tokens, so that prefills and decode steps meet in one batch.
        prompts = [{"prompt_token_ids": [(7 * i + 3 * j) % 500 + 2 for j in range(5 + i % 70)]} for i in range(count)]

        def found(some: list[Any]) -> list[Any]:
            outputs = self.llm.generate(some, sampling, use_tqdm=False)
            return [(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

        whole, chosen = found(prompts), range(0, count, max(1, count // ALONE))
        differ = [i for i in chosen if found([prompts[i]]) != [whole[i]]]
        row = {"what": "alone", "batch": count, "compared": len(chosen), "differ": len(differ)}
        sys.stdout.write(f"found: {row}\n")
        sys.stdout.flush()
        return [row]

    def _answer(self, count: int, length: int, added: int) -> tuple[float, list[Any]]:
        from vllm import SamplingParams

        # With dummy weights the last token alone says which experts are next: each sequence has its own.
        own = [(7 + self.rank * count + i) % 500 for i in range(count)]
        prompts = [{"prompt_token_ids": [token, *range(11, 9 + length), token]} for token in own]
        sampling = SamplingParams(temperature=0, max_tokens=added, ignore_eos=True, detokenize=False)
        self.meet.wait(self.a.timeout)
        begin = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - begin, outputs

    def _decode(self, batch: int) -> tuple[float, int]:
        """Returns (seconds a step, how many different tokens one sequence has)."""
        stamps: list[float] = []
        core = self.llm.llm_engine.engine_core
        plain = core.get_output  # LLM.generate asks the step for whole answers only; this has each token

        def get_output() -> Any:
            found = plain()
            if len(found.outputs) == batch:
                stamps.append(time.perf_counter())
            return found

        core.get_output = get_output
        _, outputs = self._answer(batch, 3, self.a.tokens)
        core.get_output = plain
        if len(stamps) <= LEAST_STEPS:
            raise RuntimeError(f"{len(stamps)} steps of all {batch} sequences at once: too few, give more --tokens")
        return (stamps[-1] - stamps[0]) / (len(stamps) - 1), len(set(outputs[0].outputs[0].token_ids))


def lively() -> Callable[[Any], None]:
    """Dummy weights send every token to the same experts. A local function, so that it travels by value."""

    def change(worker: Any) -> None:
        import torch

        torch.manual_seed(0)  # both sides' routers, and those of all ranks, choose alike
        for name, parameter in worker.get_model().named_parameters():
            if parameter.numel() == 0:
                continue  # packed elsewhere: linear layers on CPU, the experts that eprt holds
            if name.endswith("norm.weight"):
                parameter.data.fill_(1.0)
            elif name.endswith("e_score_correction_bias"):
                parameter.data.zero_()
            elif name.endswith((".gate.weight", ".router.proj.weight")):
                parameter.data.normal_(std=parameter.shape[-1] ** -0.5)
            elif "embed_tokens" in name:
                parameter.data.normal_()

    return change


def run(side: str, a: argparse.Namespace, folder: Path, logs: Path, start: int) -> list[dict[str, Any]]:
    """Rows of one engine, slowest rank of each. Raises RuntimeError with the end of the log of what failed.

    Args:
        side: VLLM_PLUGINS, and after a colon the backend of vLLM's own experts.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    plugin, _, a.backend = side.partition(":")
    meeting = {"VLLM_DP_SIZE": str(a.dp), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    environment = (meeting if a.dp > 1 else {}) | {
        "VLLM_PLUGINS": plugin,
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # `lively` travels to our own engine
        "EPRT_LOG": "INFO",
        **a.environment,
    }
    context = mp.get_context("spawn")
    meet = context.Barrier(a.dp)
    paths = [logs / f"{a.model}-{side.replace(':', '-')}-{start}-rank{rank}.log" for rank in range(a.dp)]
    ranks = [
        context.Process(target=engine, args=(measure, path, environment, a, folder, rank, meet))
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
    plan = plan_of(texts[0], side)
    found = [json.loads(path.read_text()) for path in done]
    ready = round(max(each["ready_s"] for each in found), 1)
    rows: list[dict[str, Any]] = []
    for of_all in zip(*(each["rows"] for each in found), strict=True):
        row = {"plugin": side, "start": start, **of_all[0], "ready_s": ready, "plan": plan}
        rows.append(row | {"step_ms": round(max(each["step_ms"] for each in of_all), 4)} if "step_ms" in row else row)
    return rows


def plan_of(log: str, side: str) -> list[str]:
    """Returns what eprt's plugin says in an engine's log. Raises RuntimeError if other experts ran than asked for."""
    if ("eprt: ready" in log) != side.startswith("eprt"):
        raise RuntimeError(f"{side}: the log says that other experts ran than asked for\n{log[-4000:]}")
    return [line.split("eprt: ", 1)[1] for line in log.splitlines() if "eprt: " in line]


def end(rank: Any) -> None:
    """With all that it started."""
    if rank.pid is not None:
        rank.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
