"""Runs a rank in a trial: every output of its steps is checked, and the victim breaks in one of them."""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from eprt.conformance.cases import Batch
from eprt.conformance.faults.matrix import CUT, LATE_S, REPLAY, START_UP, STEP, Skipped, Then, Trial, config, runtime
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of
from eprt.dispatch import DISPATCHERS
from eprt.errors import EprtError, RankLost, UsageError
from eprt.files import write_whole
from eprt.graphs import StepGraphs
from eprt.placement import ExpertPlacement
from eprt.ranks.launcher import RankContext
from eprt.tokens import TopK
from eprt.world import World

STEPS, FAULT_STEP = 12, 5
MOST_TOKENS = 4
# float32: both sides, summed in another order. bf16: tokens, weights' products and outputs are rounded to 8 bits three
# times, 2^-9 each.
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}


class WrongOutput(EprtError):
    """Raised when a step returned other numbers than the oracle."""


class NoNumbers(WrongOutput):
    """Raised when a step returned NaN.

    On GPUs the peers of a rank that broke off a call get NaN; the next step has to say why.
    """


class CheckedLayer:
    """A layer of random experts, and the steps that call it and check every output.

    Args:
        then: `RuntimeConfig.on_rank_lost` of the layer.
        graphs: whether steps are replayed from CUDA graphs.
        placement: contiguous if None.

    Attributes:
        experts: all experts, on the CPU.
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
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.experts = full_weights(self.config)
        self.placement = placement or ExpertPlacement(self.config.num_experts, world.parallel)
        settings = runtime(dispatcher, device, then)
        self.layer = layer_of(world, self.config, self.experts, settings, self.placement)
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

        def forward(hidden: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
            return self.layer(hidden, TopK(ids, shares))

        return StepGraphs(self.world, [self.layer], forward, inputs, buckets=(MOST_TOKENS,))

    def batch(self, step: int) -> Batch:
        """Returns this rank's tokens of a step, float32 on the CPU; some ranks have none in some steps."""
        generator = torch.Generator().manual_seed(1000 * step + self.world.dp_rank)
        tokens = (step + self.world.dp_rank) % MOST_TOKENS
        hidden = torch.randn(tokens, self.config.hidden_size, generator=generator).to(self.dtype).float()
        shares, ids = torch.rand(tokens, self.config.num_experts, generator=generator).topk(self.config.top_k, dim=1)
        return Batch(hidden, TopK(ids.int(), shares))

    def step(self, number: int) -> None:
        """Runs one step. Raises WrongOutput."""
        batch = self.batch(number)
        tokens, own = batch.hidden.shape[0], batch.to(self.world.device)
        with self.world.step(tokens, number=number):
            hidden = own.hidden.to(self.dtype)
            if self.graphs is None:
                found = self.layer(hidden, own.topk)
            else:
                found = self.graphs(tokens, hidden=hidden, ids=own.topk.ids, shares=own.topk.weights)
            if self.world.device.type == "cuda":  # waits as a host does that wants to hear of lost ranks meanwhile
                self.world.finish_device_work()
                self.layer.dispatcher.check_peers()
        self.check(batch, found.cpu().float(), number)

    def check(self, batch: Batch, found: torch.Tensor, number: int) -> None:
        """Raises NoNumbers or WrongOutput unless `found` is what the oracle returns."""
        if bool(found.isnan().any()):
            raise NoNumbers(f"step {number}, rank {self.world.rank}: NaN")
        expected = self.expected(batch)
        if not bool((found - expected).norm() <= TOLERANCE[self.world.device.type] * expected.norm()):
            words = f"step {number}, rank {self.world.rank}: {found.norm():.4f} for {expected.norm():.4f}"
            raise WrongOutput(f"{words}, off by {(found - expected).norm():.2e}")

    def expected(self, batch: Batch) -> torch.Tensor:
        """Returns the oracle's float32 [T, H], without the experts that no rank holds any more."""
        E, topk = self.config.num_experts, batch.topk
        there = torch.tensor([self.is_there(e) for e in range(E)])[topk.ids.long()]
        weights = torch.where(there, topk.weights, 0.0)
        if self.then == "renormalize":
            weights *= topk.weights.sum(1, keepdim=True) / weights.sum(1, keepdim=True).clamp(min=1e-30)
        left = TopK(torch.where(there, topk.ids, E), weights)
        return expected_outputs(self.config, self.experts, [Batch(batch.hidden, left)])[0]

    def is_there(self, expert: int) -> bool:
        """Tells whether all ranks that share one of the expert's slots are alive."""
        tp, each = self.world.parallel.moe_tp_size, self.placement.num_local_experts
        firsts = [slot // each * tp for slot in self.placement.replicas[expert]]
        return any(all(self.world.alive[first : first + tp]) for first in firsts)


class Diary:
    """Notes of one rank for the process that judges: a JSON object in a file, whole at any moment."""

    def __init__(self, folder: str, rank: int) -> None:
        self._path = Path(folder, f"rank{rank}")
        self.seen: dict[str, Any] = {}

    def note(self, **seen: object) -> None:
        self.seen.update(seen)
        write_whole(self._path, json.dumps(self.seen))


def ready(context: RankContext, dispatcher: str) -> None:
    """Does what isn't timed: imports libraries that can't be imported before the fork, and makes a CUDA context, which
    holds the GIL for seconds where many start at once."""
    if context.device == "cuda":
        torch.cuda.set_device(context.rank)
        torch.ones(1, device="cuda").sum().item()
        spec = DISPATCHERS[dispatcher]
        importlib.import_module(spec.path.partition(":")[0])
        if spec.requirement is not None:
            importlib.import_module(spec.requirement.module)


def run(context: RankContext, trial: Trial, folder: str, patient: bool = False) -> None:
    """Runs a trial on this rank. Raises what its steps raise.

    Args:
        patient: on GPUs, first run a step in a World of the usual timeout, so that kernels are compiled before.
    """
    if patient and context.device == "cuda":
        with context.world() as first:
            _layer(first, trial).step(0)
    victim = context.rank in trial.victims
    diary = Diary(folder, context.rank)
    if context.rank == trial.late_rank:
        time.sleep(LATE_S)

    def act(*_: object, **__: object) -> None:
        diary.note(fault_at=time.monotonic())
        trial.how.act()

    if victim and trial.moment in START_UP:
        module, function = START_UP[trial.moment]
        with mock.patch.object(module, function.__name__, side_effect=act):
            context.world(timeout_s=trial.timeout_s)
    layer = _layer(context.world(timeout_s=trial.timeout_s), trial)
    cut = partial(_cut_off, layer.world, trial.victims, diary)
    _run_steps(layer, trial, diary, None if not victim else cut if trial.fault == CUT else act)


def _cut_off(world: World, side: Sequence[int], diary: Diary) -> None:
    """Ends what the guards of one side say to the other ranks and hear of them, as a cable would, and waits for the
    verdict. Calls are cut, too: this rank makes none any more. Raises RankLost."""
    guard = world._guard
    if guard is None:
        raise UsageError("a World of one rank has no cable")
    links = guard._links
    send, heard = links.send, links.heard

    def send_near(rank: int, message: object, must: bool = True) -> None:
        if rank in side:
            send(rank, message, must)

    def hear_near(rank: int, message: Any) -> None:
        if rank in side:
            heard(rank, message)

    links.send, links.heard = send_near, hear_near
    diary.note(fault_at=time.monotonic())
    while True:
        guard.raise_if_lost()
        time.sleep(0.01)


def _layer(world: World, trial: Trial) -> CheckedLayer:
    return CheckedLayer(world, trial.dispatcher, trial.then, graphs=trial.moment == REPLAY)


def _run_steps(layer: CheckedLayer, trial: Trial, diary: Diary, act: Callable[..., None] | None) -> None:
    """Runs all steps, and as many again after a rank was lost. `act` is the victim's fault."""
    step, steps = 0, STEPS
    while step < steps:
        try:
            with nullcontext() if act is None or step != FAULT_STEP else _armed(layer, trial.moment, act):
                layer.step(step)
            if not all(layer.world.alive) and "resumed_at" not in diary.seen:
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
            step = layer.world.shrink().next_step - 1
            steps = step + 1 + STEPS
            if layer.graphs is not None:
                layer.graphs.capture()
        step += 1
        time.sleep(0.01)


@contextmanager
def _armed(layer: CheckedLayer, moment: str, act: Callable[..., None]) -> Iterator[None]:
    """Makes the victim call `act` at that moment of a step."""
    if moment == STEP[0]:
        act()
    if moment == REPLAY and layer.graphs is not None:  # it asks for its peers between the agreement and the launch
        with mock.patch.object(layer.graphs._watch, "check", act):
            yield
        return

    def observe(phase: str) -> AbstractContextManager[None]:
        if phase == moment:
            act()
        return nullcontext()

    before, layer.layer.observe = layer.layer.observe, observe
    try:
        yield
    finally:
        layer.layer.observe = before
