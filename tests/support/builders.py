"""What jobs and tests of several folders build alike. No pytest here: ranks import this module."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from eprt.conformance.cases import Case
from eprt.conformance.checks import Check, Kind, check_transport, run_checks, summarize
from eprt.dispatch import Dispatcher
from eprt.errors import EprtError
from eprt.garbage import without_collections

NOTHING = "nothing was raised"
# Room for what a first run may compile: FlashInfer's all-to-all takes 3.5 minutes on 64 cores where it isn't installed
# with its kernels, humming's 70 kernels of a layer a minute, Triton seconds. Where all of that is there, a lower limit
# ends a hang sooner.
JOB_S = float(os.environ.get("EPRT_TEST_JOB_S", "420"))

BEHIND_S = 300.0  # one rank may compile while the others are done
Errors = type[Exception] | tuple[type[Exception], ...]


def caught(call: Callable[[], object], kinds: Errors = EprtError) -> tuple[str, str]:
    """Returns the type and the text of the typed error that a call raises, or ("nothing", "")."""
    try:
        call()
    except kinds as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def said(call: Callable[[], object], kinds: Errors = EprtError) -> str:
    """Returns the type and the text of the typed error that a call raises as one text, or NOTHING."""
    kind, text = caught(call, kinds)
    return NOTHING if kind == "nothing" else f"{kind}: {text}"


def die(*_: object, **__: object) -> None:
    """Kills this process, and writes down when."""
    sys.stderr.write(f"killed at {time.monotonic()}\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def live_tensors() -> dict[int, torch.Tensor]:
    """Returns the process's tensors by id. Whoever looks for new ones holds them: a new one may take a freed one's
    id."""
    return {id(each): each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)}


def stop_for(seconds: float) -> None:
    """Stops this process, and returns when a child of it has woken it up again."""
    if (child := os.fork()) == 0:
        os.kill(os.getppid(), signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.waitpid(child, 0)


def recorded(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, Callable[[], object]]:
    """Returns a call's output, captured in a CUDA graph, and what replays it. Without CUDA, replaying is doing it
    again."""
    if device.type != "cuda":
        out = call()
        return out, lambda: out.copy_(call())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Other threads (NCCL's watchdog) may ask for events meanwhile.
    with without_collections(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = call()
    return out, graph.replay


def whole_numbers(*shape: int, seed: int) -> torch.Tensor:
    """Returns float32 values from -3 to 3: their sums are exact in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def distinct_experts(T: int, E: int, K: int, generator: torch.Generator) -> torch.Tensor:
    """Returns [T, K] int32 ids; no token chooses an expert twice."""
    return torch.rand(T, E, generator=generator, device=generator.device).argsort(1)[:, :K].to(torch.int32)


def transported(dispatcher: Dispatcher, case: Case, kind: Kind = "transport") -> list[str]:
    """Returns what the conformance check of a transport finds wrong with all calls of a case. Collective."""
    runtime, context = dispatcher.runtime, mock.Mock(once=lambda *_: dispatcher)
    formats = {"payload": runtime.payload, "combine_payload": runtime.combine_payload, "config": dispatcher.config}
    context.world.return_value = dispatcher.world
    row = check_transport(context, Check(kind, case, dispatcher.spec.name, dispatcher.token_format, **formats))
    return [] if row.ok else [f"{case.name}: error {row.error:.1e} {row.detail}"]


def wrong_checks(
    pool: Any, checks: Sequence[Check], run: Any = run_checks, bound: Callable[[Check], float] | None = None
) -> list[str]:
    """Runs conformance checks on a pool, and returns those that failed, or whose error is beyond a `bound`."""
    rows = summarize(pool.run(run, checks=checks))
    assert len(rows) == len(checks) > 0
    return [
        f"{row.check.name}, rank {row.rank}: error {row.error:.2e} {row.detail}"
        for row in rows
        if not (row.ok if bound is None else row.error <= bound(row.check))  # NaN counts as wrong
    ]


def told_alike(found: Sequence[tuple[str, bool]]) -> str:
    """Returns the error that every rank was told, in the same words. What each one did next must have worked."""
    (told,) = {told for told, _ in found}
    assert all(works for _, works in found), found
    return told
