"""One rank of vLLM as a program: `python vllm_rank.py SPEC.json` writes the tokens that it generated.

SPEC: model, dtype, dp, tp, ep, rank, port, prompts (ids, tokens to add), out, all_out, and further LLM arguments.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


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
        **{"enforce_eager": True, **spec.get("llm", {})},
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids, _ in spec["prompts"]],
        [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in spec["prompts"]],
        use_tqdm=False,
    )
    Path(spec["out"]).write_text(json.dumps([list(output.outputs[0].token_ids) for output in outputs]))
    # A rank that is done keeps taking part, with vLLM's dummy steps, until the last one is.
    deadline = time.monotonic() + 300
    while not all(Path(path).exists() for path in spec["all_out"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(1)
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
