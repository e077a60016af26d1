"""A decode step inside SGLang, with its own MoE and with eprt's plugin: the same model, batches and settings, in turn.

    python benchmarks/sglang_duel.py --models gpt-oss-20b qwen3 --dp 1 --batches 1 16 64 256 --json FILE

Needs GPUs, SGLang 0.5.17 to 0.5.23 and no network. Models have the real widths, few layers and random weights that it
makes itself: a gpt-oss checkpoint in MXFP4, SGLang's own dummy weights for the others (there routing is made lively
again after loading). `--dp` above 1 is data-parallel attention, experts parallel over the same ranks.

`--plugins none none:marlin eprt` has several of SGLang's runners as peers: the quickest one is compared. Both engines
have the same attention backend, `--attention`. A step is what SGLang's own counter says of stretches of
`--tokens` / 6 decode steps of all sequences without a prefill. Each batch is measured `--rounds` times in each of
`--starts` starts; what is compared is the median of all stretches. With `--prompts` both engines have SGLang's default,
CUDA graphs of prefill, and prompts of these lengths are sent one by one.

Memory of a GPU is the most in use by all its processes, and what its weights took by SGLang's log. By default SGLang
fills what is left with its KV cache: `--engine '{"max_total_tokens": 65536}'` gives both engines the same.

First of all eprt compiles and tunes what a model needs in ranks of their own (`--warm`). FILE is written after each
engine, and engines that it has are left out with `--resume`.
`--tiny --device cpu --dp 1 --models qwen3` rehearses it without a GPU (scripts/test_sglang.sh makes the environment).
"""

from __future__ import annotations

import json
import sys

import duel
from sglang_engine import most_tokens, run

ENTRY = ("sglang.srt.plugins", "eprt.integrations.sglang:register")


def main() -> int:
    options = duel.parser(__doc__ or "", "SGLang")
    options.add_argument("--attention", default="triton", help="attention backend of both engines")
    options.add_argument("--engine", type=json.loads, default={}, help="more of SGLang's arguments, of both, as JSON")
    options.add_argument("--profile", type=int, help="also trace 32 tokens of so many sequences, into --logs")
    return duel.play(options, "SGLang", ENTRY, run, most_tokens, limit)


def limit(model: str, what: str, batch: int, *, one_gpu: bool) -> float:
    """Returns the most that eprt's time may be of SGLang's own."""
    return 0.85 if model.startswith("gpt-oss") else 0.95


if __name__ == "__main__":
    sys.exit(main())
