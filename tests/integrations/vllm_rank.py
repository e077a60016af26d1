"""One rank of vLLM as a program: `python vllm_rank.py SPEC.json` writes the tokens that it generated.

SPEC: model, dtype, dp, tp, ep, rank, port, prompts (ids, tokens to add), out, all_out, further LLM arguments, and
updates: (way, checkpoint), each followed by the same prompts. Without updates the file holds one list of tokens.
With `as_gpu`, vLLM checks its flags as it does where GPUs are: its CPU build refuses some that nothing on CPU hinders.
With `gates`, its routers are as GPUs have them, and what they tell vLLM's recorder of chosen experts is written, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    if spec["dp"] > 1:
        os.environ.update(
            VLLM_DP_RANK=str(spec["rank"]),
            VLLM_DP_RANK_LOCAL=str(spec["rank"]),
            VLLM_DP_SIZE=str(spec["dp"]),
            VLLM_DP_MASTER_IP="127.0.0.1",
            VLLM_DP_MASTER_PORT=str(spec["port"]),
        )
    if spec.get("gates"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # what is patched is patched in this process
    from vllm import SamplingParams

    llm = started(spec)
    recorder = Recorder()
    if spec.get("gates"):
        llm.apply_model(recorder.listen)
    settings = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in spec["prompts"]
    ]

    def tokens() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in spec["prompts"]], settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    found = [tokens()]
    Path(spec["out"] + ".experts").write_text(json.dumps(recorder.heard))
    for number, (way, checkpoint) in enumerate(spec.get("updates", [])):
        llm.sleep(level=0)  # returns when this rank's last dummy step is over
        meet(spec, f"before-{number}")
        update(llm, way, checkpoint)
        llm.wake_up(tags=["scheduling"])
        llm.reset_prefix_cache()
        meet(spec, f"after-{number}")
        found.append(tokens())
    Path(spec["out"]).write_text(json.dumps(found if "updates" in spec else found[0]))
    meet(spec, "end")
    time.sleep(1)
    llm.llm_engine.engine_core.shutdown()


class Recorder:
    """In the place of vLLM's recorder of chosen experts, which wants a GPU: what routers tell it, by layers."""

    def __init__(self) -> None:
        self.heard: dict[int, list[list[int]]] = {}

    def listen(self, model: Any) -> None:
        from vllm.model_executor.layers.fused_moe.routed_experts_capturer import bind_routed_experts_capturer

        bind_routed_experts_capturer(model, self)

    def capture(self, layer_id: int, topk_ids: Any) -> None:
        self.heard.setdefault(layer_id, []).extend(topk_ids.tolist())


class AsGpu:
    """vLLM's platform, but for what decides whether EPLB and sleep mode may be asked for."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_xpu(self) -> bool:
        return True

    def is_sleep_mode_available(self) -> bool:
        return True


def keep_gates(stack: ExitStack) -> None:
    """On a CPU vLLM packs gates, and its routers have a class of their own."""
    import torch
    import vllm.model_executor.layers.fused_moe.router.router_factory as routers
    from vllm.model_executor.layers import utils

    pack, kind = utils.dispatch_cpu_unquantized_gemm, type("FusedTopKRouter", (routers.CPURouter,), {})

    def unless_gate(layer: Any, remove_weight: bool) -> None:
        if type(layer).__name__ == "GateLinear":
            layer.cpu_linear = torch.nn.functional.linear
        else:
            pack(layer, remove_weight)

    stack.enter_context(patch.object(utils, "dispatch_cpu_unquantized_gemm", unless_gate))
    stack.enter_context(patch.object(routers, "CPURouter", kind))


def started(spec: dict[str, Any]) -> Any:
    """Starts this rank's engine."""
    import vllm.config.model
    import vllm.config.parallel
    from vllm import LLM

    with ExitStack() as stack:
        for module in (vllm.config.model, vllm.config.parallel) if spec.get("as_gpu") else ():
            stack.enter_context(patch.object(module, "current_platform", AsGpu(module.current_platform)))
        if spec.get("gates"):
            keep_gates(stack)
        return LLM(
            model=spec["model"],
            dtype=spec["dtype"],
            tensor_parallel_size=spec["tp"],
            enable_expert_parallel=spec["ep"],
            skip_tokenizer_init=True,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            worker_extension_cls="vllm_trainer.Trainer",
            **{"enforce_eager": True, **spec.get("llm", {})},
        )


def meet(spec: dict[str, Any], name: str) -> None:
    """Waits for all ranks. One that is done keeps taking part, with vLLM's dummy steps, until the last one is."""
    marks = [Path(f"{path}.{name}") for path in spec["all_out"]]
    marks[spec["rank"]].touch()
    deadline = time.monotonic() + 300
    while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
        time.sleep(0.1)


def update(llm: Any, way: str, checkpoint: str) -> None:
    """Loads a checkpoint into the engine that runs: by vLLM's `reload_weights`, or in a way of `vllm_trainer`. "again"
    changes nothing, "sleep" sleeps and wakes, "die in ..." ends rank 1's worker there (`vllm_trainer`)."""
    if way == "again":
        return
    if way == "sleep":
        llm.sleep(level=1)
        llm.wake_up()
    elif way.startswith("die"):
        llm.collective_rpc("die_in", args=(way.removeprefix("die in "),))
        if checkpoint:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    elif way == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    else:
        llm.collective_rpc("load_checkpoint", args=(way, checkpoint))


if __name__ == "__main__":
    main()
