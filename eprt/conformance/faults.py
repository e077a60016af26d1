"""The fault matrix: break one rank at one moment, and hold what the others say to what README promises.

A trial is a fresh world whose ranks run a layer step by step and check every output against a formula of its own. The
victim breaks as its row says. What counts: no survivor waits longer than the promise, all name the same rank and it is
the right one, no output was wrong, and nothing is left over. `eprt doctor --faults` runs them.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.conformance.harness import RankContext, RankReport, WorldFailed, WorldPool
from eprt.conformance.scratch import Scratch
from eprt.dispatch import DISPATCHERS
from eprt.errors import EprtError
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.support import Device
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights
from eprt.world import World

TIMEOUT_S = 4.0  # of the trials' Worlds
SILENT_S = TIMEOUT_S / 2
STEPS, FAULT_STEP = 12, 5
SLACK_S = 3.0  # a loaded machine schedules four processes on two cores
TOLERANCE = 1e-4  # float32 on both sides, summed in another order


def _config(world_size: int) -> MoEConfig:
    return MoEConfig(num_experts=2 * world_size, top_k=2, hidden_size=32, intermediate_size=16, weight_format="f32")


@dataclass(frozen=True)
class Fault:
    """A way to break.

    Attributes:
        why: what the survivors' RankLost must say; "mismatch" is a WorldMismatch on every rank.
        limit_s: how long the promise lets a survivor wait.
        act: what the victim does.
    """

    name: str
    why: str
    limit_s: float
    act: Callable[[], None]


class Deliberate(Exception):
    """What a victim raises."""


class WrongOutput(EprtError):
    """A step returned numbers that the formula doesn't give."""


class _Skip(BaseException):
    """Leaves the step."""


def _raise() -> None:
    raise Deliberate("raised by the fault matrix")


def _skip() -> None:
    raise _Skip


def _leave() -> None:
    sys.exit(0)


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _sleep() -> None:
    time.sleep(10 * TIMEOUT_S)


FAULTS: dict[str, Fault] = {
    fault.name: fault
    for fault in (
        Fault("kill", "exited", 1.0, _kill),
        Fault("stop", "silent", SILENT_S + 1.0, _stop),
        Fault("raise", "raised", 1.3 + 0.5, _raise),
        Fault("leave", "left", 1.3 + 0.5, _leave),
        Fault("skip", "mismatch", 1.0, _skip),
        Fault("sleep", "behind", TIMEOUT_S + 1.0, _sleep),
    )
}
# Where it happens: while ranks meet and groups are made, or in a step.
START_UP: dict[str, str] = {
    "meeting": "eprt.world.meeting.listen",
    "groups": "eprt.world.init_default_group",
    "control": "eprt.world.control_group",
}
STEP = ("between steps", "dispatch", "experts", "combine")


@dataclass(frozen=True)
class Trial:
    """One cell of the matrix."""

    fault: str
    moment: str
    rank: int
    dispatcher: str
    world: int
    device: str = "cpu"

    @property
    def limit_s(self) -> float:
        # A rank that sleeps or is stopped before the guards know each other is missing until the timeout.
        early = self.moment == "meeting" and self.fault in ("stop", "sleep")
        return (TIMEOUT_S + 1.0 if early else FAULTS[self.fault].limit_s) + SLACK_S


@dataclass(frozen=True)
class Result:
    """What a trial found.

    Attributes:
        seconds: from the fault to the last survivor's verdict; None if one had none when the trial's limit ended.
        verdicts: what the survivors said, each wording once.
        culprit: whether all named the victim (or, for a mismatch, all saw the same table).
        wrong: outputs that weren't what the formula gives.
        leftovers: processes, folders and shared memory that outlived the trial.
    """

    trial: Trial
    seconds: float | None
    verdicts: list[str]
    culprit: bool
    wrong: int
    leftovers: list[str]

    @property
    def late(self) -> bool:
        return self.seconds is None or self.seconds > self.trial.limit_s

    @property
    def ok(self) -> bool:
        return self.culprit and not self.late and not self.wrong and not self.leftovers

    def as_row(self) -> dict[str, Any]:
        seconds = None if self.seconds is None else round(self.seconds, 3)
        found = {"seconds": seconds, "limit_s": self.trial.limit_s, "culprit": self.culprit, "wrong": self.wrong}
        return {**asdict(self.trial), **found, "leftovers": self.leftovers, "ok": self.ok, "verdicts": self.verdicts}


def trials(world: int, device: str = "cpu", count: int | None = None, seed: int = 0) -> list[Trial]:
    """The matrix, in an order that spreads a short run over all of it.

    Args:
        count: so many; above the number of cells they come again. None: each once.
    """
    where = Device.of(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    parallel = ParallelConfig(world)
    names = [
        name for name, spec in DISPATCHERS.items() if spec.supports(_config(world), parallel, RuntimeConfig(), where)
    ]
    cells = [
        Trial(fault, moment, rank, name, world, device)
        for fault, moment, rank, name in itertools.product(FAULTS, (*START_UP, *STEP), range(world), names)
        if moment in STEP or fault in ("kill", "stop", "raise")
        # A start-up has no dispatcher yet.
        if moment in STEP or name == names[0]
    ]
    dice = random.Random(seed)
    dice.shuffle(cells)
    turns = itertools.count()
    by_fault: dict[tuple[str, bool], list[Trial]] = {}
    for cell in cells:
        by_fault.setdefault((cell.fault, cell.moment in STEP), []).append(cell)
    spread = sorted(
        ((place / len(group), next(turns), cell) for group in by_fault.values() for place, cell in enumerate(group)),
        key=lambda item: item[:2],
    )
    ordered = [cell for _, _, cell in spread]
    return ordered if count is None else list(itertools.islice(itertools.cycle(ordered), count))


def run_trial(trial: Trial) -> Result:
    """One trial in a world of its own."""
    before = _footprint()
    with Scratch("faults") as folder:
        stamp = folder / "fault"
        # Wide enough that a survivor that hangs is seen to: the pool ends it then.
        grace_s = trial.limit_s + 2.0
        pids: list[int] = []
        folder_of_pool: Path | None = None
        reports: Sequence[RankReport] = ()
        try:
            with WorldPool(trial.world, trial.device, timeout_s=60.0 + grace_s, grace_s=grace_s) as pool:
                pool.run(_ready)
                pids, folder_of_pool = pool.pids, pool.folder
                pool.run(_job, trial=trial, stamp=str(stamp))
        except WorldFailed as failed:
            reports = failed.reports
        at = float(stamp.read_text()) if stamp.exists() else None
    leftovers = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    leftovers += [str(folder_of_pool)] if folder_of_pool is not None and folder_of_pool.exists() else []
    leftovers += sorted(_footprint() - before)
    return _judge(trial, reports, at, leftovers)


def _judge(trial: Trial, reports: Sequence[RankReport], at: float | None, leftovers: list[str]) -> Result:
    mismatch = FAULTS[trial.fault].why == "mismatch"
    heard = [r for r in reports if mismatch or r.rank != trial.rank]
    raised = [r.raised for r in heard if r.raised is not None]
    wrong = sum(r.error == "WrongOutput" for r in raised)
    words = sorted({f"{r.error} {r.why}: {r.message}" for r in raised})
    if mismatch:
        right = {r.error for r in raised} == {"WorldMismatch"}
    else:
        right = {(r.error, r.lost_rank, r.why) for r in raised} == {("RankLost", trial.rank, _why(trial))}
    culprit = right and len(raised) == len(heard) > 0 and len(words) == 1
    whole = at is not None and len(raised) == len(heard) > 0
    seconds = max(r.at for r in raised) - at if whole and at is not None else None
    return Result(trial, seconds, words, culprit, wrong, leftovers)


def _why(trial: Trial) -> str:
    return FAULTS[trial.fault].why


def _ready(context: RankContext) -> None:
    """Start-up of the processes, which isn't what is timed."""


def _job(context: RankContext, trial: Trial, stamp: str) -> None:
    """One rank's steps, with its fault if it is the victim."""
    fault = FAULTS[trial.fault]
    victim = context.rank == trial.rank

    def act(*_: Any) -> None:
        Path(stamp).write_text(str(time.monotonic()))
        fault.act()

    if victim and trial.moment in START_UP:
        where = START_UP[trial.moment]
        with mock.patch(where, side_effect=act):
            context.world(timeout_s=TIMEOUT_S)
    world = context.world(timeout_s=TIMEOUT_S)
    layer, weights = _layer(world, trial.dispatcher)
    for step in range(STEPS):
        here = victim and step == FAULT_STEP
        if here and trial.moment in STEP[1:]:
            layer.observe = lambda phase: _at(phase == trial.moment, act)
        try:
            if here and trial.moment == STEP[0]:
                act()
            _run_step(world, layer, weights, step)
        except _Skip:
            layer.observe = lambda phase: _at(False, lambda: None)
        time.sleep(0.01)


@contextmanager
def _at(here: bool, act: Callable[[], None]) -> Iterator[None]:
    if here:
        act()
    yield


def _run_step(world: World, layer: ExpertParallelMoE, weights: tuple[torch.Tensor, torch.Tensor], step: int) -> None:
    """One call, its output held to the formula."""
    config = _config(world.size)
    generator = torch.Generator().manual_seed(1000 * step + world.rank)
    tokens = (step + world.rank) % 4  # idle ranks, too
    hidden = torch.randn(tokens, config.hidden_size, generator=generator)
    scores = torch.rand(tokens, config.num_experts, generator=generator)
    shares, ids = scores.topk(config.top_k, dim=1)
    topk = TopK(ids.to(world.device, torch.int32), shares.to(world.device))
    with world.step(tokens, number=step):
        found = layer(hidden.to(world.device), topk).cpu()
    expected = torch.zeros_like(hidden)
    gate_up, down = weights
    for token in range(tokens):
        for share, expert in zip(shares[token].tolist(), ids[token].tolist(), strict=True):
            gate, up = (gate_up[expert] @ hidden[token]).chunk(2)
            expected[token] += share * (down[expert] @ (gate * torch.sigmoid(gate) * up))
    if not bool((found - expected).norm() <= TOLERANCE * expected.norm()):
        raise WrongOutput(f"step {step}, rank {world.rank}: {found.norm():.4f} for {expected.norm():.4f}")


def _layer(world: World, dispatcher: str) -> tuple[ExpertParallelMoE, tuple[torch.Tensor, torch.Tensor]]:
    """A layer of random float32 experts, and all of them."""
    config = _config(world.size)
    generator = torch.Generator().manual_seed(7)
    E, H, I = config.num_experts, config.hidden_size, config.intermediate_size
    gate_up = torch.randn(E, 2 * I, H, generator=generator)
    down = torch.randn(E, H, I, generator=generator)
    shard = ExpertPlacement(E, world.parallel).shard(world.rank)
    own = slice(shard.first_expert, shard.end_expert)
    experts = ExpertWeights(Dense(gate_up[own].to(world.device)), Dense(down[own].to(world.device)))
    runtime = RuntimeConfig(dispatcher=dispatcher, executor="reference", max_tokens_per_rank=8)
    return ExpertParallelMoE(config, world, experts, runtime=runtime), (gate_up, down)


@dataclass(frozen=True)
class Growth:
    """What one rank's process held at a step of a soak.

    Attributes:
        resident_mb: of memory; descriptors, threads: how many.
        seconds: since the first step.
    """

    step: int
    resident_mb: float
    descriptors: int
    threads: int
    seconds: float


def soak(context: RankContext, dispatcher: str, steps: int, looks: int = 10) -> list[Growth]:
    """A job: many steps, idle ranks included, every output held to the formula. What the process held meanwhile.

    Raises:
        WrongOutput: at the first step whose numbers aren't right.
    """
    world = context.world()
    layer, weights = _layer(world, dispatcher)
    found: list[Growth] = []
    start = time.monotonic()
    for step in range(steps):
        _run_step(world, layer, weights, step)
        if step % max(1, steps // looks) == 0 or step == steps - 1:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            resident = int(status["VmRSS"].split()[0]) / 1024
            descriptors = len(os.listdir("/proc/self/fd"))
            found.append(Growth(step, resident, descriptors, int(status["Threads"]), time.monotonic() - start))
    layer.close()
    return found


def _footprint() -> set[str]:
    """Shared memory by names that our libraries give."""
    patterns = ("eprt*", "torch_*", "nccl*", "nvshmem*")
    return {str(path) for pattern in patterns for path in Path("/dev/shm").glob(pattern)}
