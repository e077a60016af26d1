"""A rank as torchrun starts it, whose hash seed is its own: greedy tokens of a checkpoint by `generate(graphs=True)`.

    torchrun ... started_graphs.py CHECKPOINT RESULTS

writes RESULTS/RANK.json: the tokens, what was warned of, and a hash that tells hash seeds apart.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from eprt import World
from eprt.cli.generate_jobs import heard
from eprt.config import RuntimeConfig
from eprt.integrations.transformers import generate, load_without_experts, parallelize

PROMPTS = [[[5, 17, 33, 8], [41, 9, 60], [12, 13]], [[7, 3]]]
OPTIONS = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

if __name__ == "__main__":
    world = World.from_env(device="cpu")
    model = load_without_experts(sys.argv[1], dtype=torch.float32).eval()
    layers = parallelize(model, world, RuntimeConfig(executor="torch_grouped", max_tokens_per_rank=64))
    world.warmup(*layers)
    with heard() as said:
        tokens = generate(model, PROMPTS[world.rank], batch_size=2, graphs=True, **OPTIONS)
    found = {"tokens": tokens, "said": said, "seed": hash("a name")}
    (Path(sys.argv[2]) / f"{world.rank}.json").write_text(json.dumps(found))
    world.close()
