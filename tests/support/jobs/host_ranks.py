"""Process 1 of a host of test_hosts.py: forks ranks, which step and check every output until they are told to stop.

Orders come as lines of JSON: {"folder", "rank", "timeout_s", "environment"}. Notes of rank r are in FOLDER/rank<r>.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from eprt.conformance.faults.job import CheckedLayer, Diary
from eprt.errors import EprtError, RankLost
from eprt.world import World


def run(folder: str, rank: int, timeout_s: float) -> None:
    diary = Diary(folder, rank)
    diary.note(pid=os.getpid())
    try:
        with World.from_env("cpu", timeout_s=timeout_s) as world:
            try:
                step_until_told(world, Path(folder, "stop"), diary)
            except RankLost as lost:
                note(diary, lost)
                raise  # `close` waits a moment if the peers need it
        diary.note(outcome="ok")
    except RankLost as lost:
        if "outcome" not in diary.seen:
            note(diary, lost)
    except EprtError as error:
        diary.note(outcome="error", error=type(error).__name__, words=str(error))


def step_until_told(world: World, stop: Path, diary: Diary) -> None:
    job, step = CheckedLayer(world, "torch"), 0
    while not world.gather_control(torch.tensor([stop.exists()])).any():
        job.step(step)
        step += 1
        diary.note(steps=step, ranks_per_host=world.parallel.ranks_per_host)
        time.sleep(0.01)
    job.layer.close()


def note(diary: Diary, lost: RankLost) -> None:
    words = str(lost)
    diary.note(outcome="lost", verdict_at=time.monotonic(), words=words, why=lost.why, ranks=list(lost.ranks))


def serve(order: dict[str, Any]) -> None:
    os.environ.update(order["environment"])
    try:
        run(order["folder"], order["rank"], order["timeout_s"])
    except BaseException:  # noqa: BLE001 - the log has it
        traceback.print_exc()
    atexit._run_exitfuncs()
    os._exit(0)


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        while os.waitpid(-1, os.WNOHANG)[0] if _children() else False:
            pass
        if os.fork() == 0:
            serve(json.loads(line))


def _children() -> bool:
    return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


if __name__ == "__main__":
    main()
