"""One rank of vLLM as a program: `python vllm_rank.py SPEC.json` writes the tokens that it generated.

SPEC: model, dtype, dp, tp, ep, rank, port, prompts (ids, tokens to add), out, all_out, further LLM arguments, and
updates: (way, checkpoint), each followed by the same prompts. Without updates the file holds one list of tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


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
    from vllm import LLM, SamplingParams

    llm = LLM(
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
    settings = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in spec["prompts"]
    ]

    def tokens() -> list[list[int]]:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids, _ in spec["prompts"]], settings, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    found = [tokens()]
    for number, (way, checkpoint) in enumerate(spec.get("updates", [])):
        meet(spec, f"before-{number}")
        update(llm, way, checkpoint)
        llm.reset_prefix_cache()
        meet(spec, f"after-{number}")
        found.append(tokens())
    Path(spec["out"]).write_text(json.dumps(found if "updates" in spec else found[0]))
    meet(spec, "end")
    time.sleep(1)
    llm.llm_engine.engine_core.shutdown()


def meet(spec: dict[str, Any], name: str) -> None:
    """Waits for all ranks. One that is done keeps taking part, with vLLM's dummy steps, until the last one is."""
    marks = [Path(f"{path}.{name}") for path in spec["all_out"]]
    marks[spec["rank"]].touch()
    deadline = time.monotonic() + 300
    while not all(mark.exists() for mark in marks) and time.monotonic() < deadline:
        time.sleep(0.1)
    if name.startswith("before"):
        time.sleep(1)  # the last rank's dummy steps


def update(llm: Any, way: str, checkpoint: str) -> None:
    """Loads a checkpoint into the engine that runs: by vLLM's `reload_weights`, or in a way of `vllm_trainer`."""
    if way == "reload":
        llm.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    else:
        llm.collective_rpc("load_checkpoint", args=(way, checkpoint))


if __name__ == "__main__":
    main()
