"""A program as users launch it: items through one layer, those done kept in a file, so that a restarted world goes on
after the last one.

    torchrun ... resumable.py PROGRESS [VICTIM]

Rank VICTIM of the first generation is killed before the third item. With PAUSE_BEFORE=N its ranks wait for each other
before the N-th, until one is lost.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from eprt import RuntimeConfig, World
from eprt.conformance.cases import BY_NAME, CONFIGS, make_batches
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error

ITEMS, KILLED_BEFORE = 4, 2


def main(progress: Path, victim: int) -> None:
    with World.from_env("cpu", timeout_s=40.0) as world:
        config = CONFIGS["silu_f32"]
        full = full_weights(config)
        runtime = RuntimeConfig(dispatcher="torch", executor="reference", max_tokens_per_rank=64)
        layer = layer_of(world, config, full, runtime)
        done = len(progress.read_text().splitlines()) if progress.exists() else 0
        for item in range(done, ITEMS):
            if (world.rank, world.generation, item) == (victim, 0, KILLED_BEFORE):
                os.kill(os.getpid(), signal.SIGKILL)
            while (str(item), world.generation) == (os.environ.get("PAUSE_BEFORE"), 0):
                world.barrier()
            batch = make_batches(BY_NAME["uneven-uniform"], item, world.size, config, torch.float32)[world.rank]
            error = relative_error(layer(batch.hidden, batch.topk), expected_outputs(config, full, [batch])[0])
            worst = world.gather_control(torch.tensor([int(error * 1e9)])).max().item()
            if world.rank == 0:
                with progress.open("a") as file:
                    line = {"item": item, "ranks": world.size, "generation": world.generation, "error": worst / 1e9}
                    file.write(json.dumps(line) + "\n")
            world.barrier()
        layer.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
