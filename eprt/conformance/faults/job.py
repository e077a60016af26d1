"""What a rank does in a trial: steps whose every output is held to a formula, and, if it is the victim, the fault."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eprt.config import MoEConfig
from eprt.conformance.faults.matrix import (
    REPLAY,
    START_UP,
    STEP,
    Skipped,
    Then,
    Trial,
    config,
    runtime,
)
from eprt.conformance.oracle import shard_weights
from eprt.dispatch import DISPATCHERS
from eprt.errors import EprtError, RankLost
from eprt.graphs import StepGraphs
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.ranks.launcher import RankContext
from eprt.tokens import TopK
from eprt.weights import Dense, ExpertWeights
from eprt.world import World

STEPS, FAULT_STEP = 12, 5
MOST_TOKENS = 4
# float32: both sides, summed in another order. bf16: tokens, weights' products and outputs are rounded to 8 bits three
# times, 2^-9 each.
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}


class WrongOutput(EprtError):
    """A step returned numbers that the formula doesn't give."""


class NoNumbers(WrongOutput):
    """A step returned NaN, as peers of a rank that broke off a call do on GPUs: the next step has to say why."""


@dataclass(frozen=True)
class Batch:
    """One rank's tokens of a step, on the CPU: hidden float32 [T, H], shares [T, K], ids [T, K]."""

    hidden: torch.Tensor
    shares: torch.Tensor
    ids: torch.Tensor


class Job:
    """A layer of random experts, all of them on the CPU, and its steps.

    Args:
        then: what the layer is built for.
        graphs: steps are replays.
        placement: contiguous if None.
    """

    def __init__(
        self,
        world: World,
        dispatcher: str,
        then: Then = "restart",
        graphs: bool = False,
        placement: ExpertPlacement | None = None,
    ) -> None:
        device = world.device.type
        self.world, self.config, self.then = world, config(world.size, device), then
        generator = torch.Generator().manual_seed(7)
        E, H, I = self.config.num_experts, self.config.hidden_size, self.config.intermediate_size
        self.dtype = dtype = torch.bfloat16 if device == "cuda" else torch.float32
        # Scaled so that outputs are about as large as tokens.
        self.gate_up = (torch.randn(E, 2 * I, H, generator=generator) / H**0.5).to(dtype)
        self.down = (torch.randn(E, H, I, generator=generator) / I**0.5).to(dtype)
        all_experts = ExpertWeights(Dense(self.gate_up), Dense(self.down))
        placement = placement or ExpertPlacement(E, world.parallel)
        experts = _share(all_experts, self.config, placement.shard(world.rank)).map(lambda x: x.to(world.device))
        self.placement = placement
        settings = runtime(dispatcher, device, then)
        self.layer = ExpertParallelMoE(self.config, world, experts, runtime=settings, placement=placement)
        self.graphs = self._make_graphs() if graphs else None
        if device == "cuda":
            world.warmup(self.layer)
        if self.graphs is not None:
            self.graphs.capture()

    def _make_graphs(self) -> StepGraphs:
        K, E, device = self.config.top_k, self.config.num_experts, self.world.device
        inputs = {
            "hidden": torch.zeros(1, self.config.hidden_size, dtype=self.dtype, device=device),
            "ids": torch.full((1, K), E, dtype=torch.int32, device=device),
            "shares": torch.zeros(1, K, device=device),
        }
        return StepGraphs(self.world, [self.layer], self._forward, inputs, buckets=(MOST_TOKENS,))

    def _forward(self, hidden: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return self.layer(hidden, TopK(ids, shares))

    def batch(self, step: int) -> Batch:
        """This rank's; some ranks have nothing to do in some steps."""
        generator = torch.Generator().manual_seed(1000 * step + self.world.dp_rank)
        tokens = (step + self.world.dp_rank) % MOST_TOKENS
        hidden = torch.randn(tokens, self.config.hidden_size, generator=generator).to(self.dtype).float()
        shares, ids = torch.rand(tokens, self.config.num_experts, generator=generator).topk(self.config.top_k, dim=1)
        return Batch(hidden, shares, ids)

    def step(self, number: int) -> None:
        """One step. Raises WrongOutput."""
        batch, device = self.batch(number), self.world.device
        tokens = batch.hidden.shape[0]
        with self.world.step(tokens, number=number):
            hidden = batch.hidden.to(device, self.dtype)
            topk = TopK(batch.ids.to(device, torch.int32), batch.shares.to(device))
            if self.graphs is None:
                found = self.layer(hidden, topk)
            else:
                found = self.graphs(tokens, hidden=hidden, ids=topk.ids, shares=topk.weights)
            self.wait()
        self.check(batch, found.cpu().float(), number)

    def wait(self) -> None:
        """Until this rank's GPU is done, as a host does that wants to hear of lost ranks meanwhile."""
        if self.world.device.type == "cuda":
            self.world.finish_device_work()
            self.layer.dispatcher.check_peers()

    def check(self, batch: Batch, found: torch.Tensor, number: int) -> None:
        if bool(found.isnan().any()):
            raise NoNumbers(f"step {number}, rank {self.world.rank}: NaN")
        expected = self.expected(batch)
        if not bool((found - expected).norm() <= TOLERANCE[self.world.device.type] * expected.norm()):
            words = f"step {number}, rank {self.world.rank}: {found.norm():.4f} for {expected.norm():.4f}"
            raise WrongOutput(f"{words}, off by {(found - expected).norm():.2e}")

    def expected(self, batch: Batch) -> torch.Tensor:
        """Token by token, without the experts that no rank holds any more."""
        out, there = torch.zeros_like(batch.hidden), [self._is_there(e) for e in range(self.config.num_experts)]
        for token, hidden in enumerate(batch.hidden):
            chosen = list(zip(batch.shares[token].tolist(), batch.ids[token].tolist(), strict=True))
            left = [(share, expert) for share, expert in chosen if there[expert]]
            had, has = (sum(share for share, _ in some) for some in (chosen, left))
            scale = had / has if self.then == "renormalize" and left else 1.0
            for share, expert in left:
                gate, up = (self.gate_up[expert].float() @ hidden).chunk(2)
                out[token] += scale * share * (self.down[expert].float() @ (gate * torch.sigmoid(gate) * up))
        return out

    def _is_there(self, expert: int) -> bool:
        """Whether all ranks that share one of its slots are left."""
        tp, each = self.world.parallel.moe_tp_size, self.placement.num_local_experts
        firsts = [slot // each * tp for slot in self.placement.replicas[expert]]
        return any(all(self.world.alive[first : first + tp]) for first in firsts)


def _share(everything: ExpertWeights, moe: MoEConfig, shard: ExpertShard) -> ExpertWeights:
    """What a rank holds: its slots' experts, its slice of each."""
    held = list(shard.experts)
    slots = replace(shard, first_expert=0, num_experts=len(held), experts=())
    return shard_weights(everything.map(lambda x: x[held]), moe, slots)


class Diary:
    """What a rank saw, for the process that judges: a JSON object in a file, whole at any moment."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"rank{rank}")
        self.seen: dict[str, Any] = {}

    def note(self, **seen: object) -> None:
        self.seen.update(seen)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self.seen))
        new.replace(self._path)


def ready(context: RankContext, dispatcher: str) -> None:
    """Start-up of a process, which isn't what is timed: libraries that can't be imported before the fork, and a CUDA
    context, which holds the GIL for seconds where many start at once."""
    if context.device == "cuda":
        torch.cuda.set_device(context.rank)
        torch.ones(1, device="cuda").sum().item()
        spec = DISPATCHERS[dispatcher]
        importlib.import_module(spec.path.partition(":")[0])
        if spec.requirement is not None:
            importlib.import_module(spec.requirement.module)


def run(context: RankContext, trial: Trial, folder: str, patient: bool = False) -> None:
    """A trial's job; the harness's `run` raises what it raises.

    Args:
        patient: on GPUs, first run a step in a World of the usual timeout: what has to be compiled is, then.
    """
    diary = Diary(folder, context.rank)
    try:
        if patient and context.device == "cuda":
            with context.world() as first:
                Job(first, *_settings(trial)).step(0)
        _run(context, trial, diary, Path(folder))
    except BaseException as error:
        diary.note(end=type(error).__name__)
        raise
    diary.note(end="done")


def _settings(trial: Trial) -> tuple[str, Then, bool]:
    return trial.dispatcher, trial.then, trial.moment == REPLAY


def _run(context: RankContext, trial: Trial, diary: Diary, folder: Path) -> None:
    victim = context.rank == trial.rank

    def act(*_: object, **__: object) -> None:
        if trial.fault == "none":
            return
        (folder / "fault").write_text(str(time.monotonic()))
        trial.how.act()

    if victim and trial.moment in START_UP:
        with mock.patch(START_UP[trial.moment], side_effect=act):
            context.world(timeout_s=trial.timeout_s)
    job = Job(context.world(timeout_s=trial.timeout_s), *_settings(trial))
    step, steps = 0, STEPS
    while step < steps:
        try:
            with _armed(job, trial.moment, act) if victim and step == FAULT_STEP else nullcontext():
                job.step(step)
            if not all(job.world.alive) and "resumed_at" not in diary.seen:
                diary.note(resumed_at=time.monotonic())
        except Skipped:
            pass
        except NoNumbers:
            if trial.fault == "none" or step != FAULT_STEP or "words" in diary.seen:
                raise
            diary.note(nan=True)
        except RankLost as lost:
            diary.note(verdict_at=time.monotonic(), words=str(lost), why=lost.why, ranks=list(lost.ranks))
            if trial.then == "restart":
                raise
            step = _go_on(job) - 1
            steps = step + 1 + STEPS
        step += 1
        time.sleep(0.01)
    diary.note(steps=step)


def _go_on(job: Job) -> int:
    """Without the lost; the number of the next step."""
    found = job.world.shrink()
    if job.graphs is not None:
        job.graphs.capture()
    return found.next_step


@contextmanager
def _armed(job: Job, moment: str, act: Callable[..., None]) -> Iterator[None]:
    """In this step the victim breaks."""
    if moment == STEP[0]:
        act()
    if moment == REPLAY and job.graphs is not None:  # it asks for its peers between the agreement and the launch
        with mock.patch.object(job.graphs._peers, "check", act):
            yield
        return
    before = job.layer.observe
    job.layer.observe = partial(_at, moment, act)
    try:
        yield
    finally:
        job.layer.observe = before


@contextmanager
def _at(moment: str, act: Callable[..., None], phase: str) -> Iterator[None]:
    if phase == moment:
        act()
    yield


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
    job = Job(context.world(), dispatcher)
    found: list[Growth] = []
    start = time.monotonic()
    for step in range(steps):
        job.step(step)
        if step % max(1, steps // looks) == 0 or step == steps - 1:
            status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
            resident = int(status["VmRSS"].split()[0]) / 1024
            descriptors = len(os.listdir("/proc/self/fd"))
            found.append(Growth(step, resident, descriptors, int(status["Threads"]), time.monotonic() - start))
    job.layer.close()
    return found
