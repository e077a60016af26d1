"""`eprt generate` as one of torchrun's ranks, in a process that is forked from one which has imported everything."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from eprt.cli import main

PRELOAD = ["transformers.models.gpt_oss.modeling_gpt_oss", "eprt.integrations.transformers", __name__]


def be_rank(rank: int, size: int, port: int, words: list[str], log: Path) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"})
    with log.open("ab", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    sys.exit(main(words))
