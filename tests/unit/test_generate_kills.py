"""`eprt generate --output`, killed at random moments and started again, gives the answers of a run that wasn't, bit for
bit: where all of its ranks die at once, and where the one that writes outlives the other.

EPRT_KILLS=50 kills as often, EPRT_KILLS_SEED=1 at other moments.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from support.jobs.forked_generate import PRELOAD, be_rank
from support.libraries import needs
from support.ports import free_port

from eprt.conformance.tiny_model import write_tiny_checkpoint

pytestmark = needs("transformers")

KILLS = int(os.environ.get("EPRT_KILLS", "4"))
SEED = int(os.environ.get("EPRT_KILLS_SEED", "8128"))
KILLS_A_FILE = 4  # then it may end
PROMPTS = 60
RANKS = 2


class Run:
    """Ranks of the command, which share one file of answers."""

    def __init__(self, words: list[str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        port, self.began = free_port(), time.monotonic()
        self.ranks: list[ForkServerProcess] = [
            context.Process(target=be_rank, args=(rank, RANKS, port, words, log)) for rank in range(RANKS)
        ]
        for process in self.ranks:
            process.start()

    def end(self) -> float:
        """Waits until all ended well; returns the seconds it took."""
        for process in self.ranks:
            process.join(100)
        assert [process.exitcode for process in self.ranks] == [0] * RANKS
        return time.monotonic() - self.began

    def kill(self, after_s: float, apart_s: float) -> bool:
        """Kills rank 1, and later rank 0, which writes: it may have heard of the loss by then. Returns whether one of
        them hadn't ended by itself."""
        time.sleep(max(0.0, self.began + after_s - time.monotonic()))
        self.ranks[1].kill()
        self.ranks[0].join(apart_s)
        self.ranks[0].kill()
        for process in self.ranks:
            process.join()
        return any(process.exitcode != 0 for process in self.ranks)


@pytest.mark.timeout(560)
def test_answers_after_kills_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "tiny", num_layers=1)
    rows = [{"prompt": [5 + n, 7], "id": n} for n in range(PROMPTS)]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["generate", "--model", str(model), "--prompts", str(tmp_path / "prompts.jsonl"), "--device", "cpu"]
    words += ["--batch", "2", "--temperature", "1", "--max-new-tokens", "4", "--output"]
    log = tmp_path / "log"
    Run([*words, str(tmp_path / "first.jsonl")], log).end()  # imports, which the server keeps
    whole_s = Run([*words, str(tmp_path / "undisturbed.jsonl")], log).end()
    undisturbed = (tmp_path / "undisturbed.jsonl").read_bytes()
    assert (tmp_path / "first.jsonl").read_bytes() == undisturbed
    assert undisturbed.count(b"\n") == 1 + len(rows)
    draw, kills, inside = random.Random(SEED), 0, 0
    while kills < KILLS:
        output = tmp_path / f"{kills}.jsonl"
        for _ in range(KILLS_A_FILE):
            kills += Run([*words, str(output)], log).kill(draw.uniform(0, whole_s), draw.choice([0.0, 3.0]))
            held = output.read_bytes() if output.exists() else b""
            assert undisturbed.startswith(held), log.read_text()
            inside += 1 < held.count(b"\n") < 1 + len(rows)
        Run([*words, str(output)], log).end()
        assert output.read_bytes() == undisturbed, log.read_text()
    assert inside >= KILLS // 10, "no kill met a file that was begun"
    sys.stdout.write(f"{kills} kills, {inside} of them in the middle of the answers, {whole_s:.1f} s undisturbed\n")
