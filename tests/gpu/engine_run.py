"""One engine on one GPU as a program: `python engine_run.py SPEC` writes the greedy tokens that it generated.

SPEC: engine, model, quantization (or null), prompts (ids, tokens to add), ports, out.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any


def vllm(spec: dict[str, Any]) -> list[list[int]]:
    from vllm import LLM, SamplingParams

    engine = LLM(
        spec["model"],
        dtype="bfloat16",
        quantization=spec["quantization"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 29,
        compilation_config={"cudagraph_capture_sizes": [1, 4, 16]},
    )
    prompts = [{"prompt_token_ids": ids} for ids, _ in spec["prompts"]]
    settings = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False) for _, n in spec["prompts"]
    ]
    return [list(output.outputs[0].token_ids) for output in engine.generate(prompts, settings, use_tqdm=False)]


def sglang(spec: dict[str, Any]) -> list[list[int]]:
    import sglang

    engine = sglang.Engine(
        model_path=spec["model"],
        dtype="bfloat16",
        quantization=spec["quantization"],
        skip_tokenizer_init=True,
        disable_radix_cache=True,
        max_total_tokens=8192,
        max_running_requests=16,
        chunked_prefill_size=512,
        mem_fraction_static=0.35,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="info",
        port=spec["ports"][0],
        nccl_port=spec["ports"][1],
    )
    settings = [{"temperature": 0, "max_new_tokens": n, "ignore_eos": True} for _, n in spec["prompts"]]
    found = engine.generate(input_ids=[ids for ids, _ in spec["prompts"]], sampling_params=settings)
    return [output["output_ids"] for output in found]


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    Path(given["out"]).write_text(json.dumps({"vllm": vllm, "sglang": sglang}[given["engine"]](given)))
    os._exit(0)  # an orderly end takes some engines long
