"""The jobs of `eprt run`: what each rank does. The parent, which holds the oracle, judges what they return."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from eprt.config import RuntimeConfig
from eprt.conformance.checks import NanOutput
from eprt.dispatch import Dispatched, Handle
from eprt.errors import ConfigError
from eprt.layer import PHASES, ExpertParallelMoE
from eprt.models import build_layer, load_layer
from eprt.models.checkpoint import load_on_all_ranks
from eprt.ranks.launcher import RankContext
from eprt.tokens import RouterLogits, TopK
from eprt.world import World

_SEED = 8128


@dataclass(frozen=True)
class Job:
    """What to run: the same on every rank.

    Attributes:
        directory: the checkpoint.
        counts: tokens of each data-parallel group, one tuple for each step.
        dtype: "bfloat16" or "float32", the tokens' own.
    """

    directory: str
    attention_tp: int
    moe_tp: int
    runtime: RuntimeConfig
    counts: tuple[tuple[int, ...], ...]
    dtype: str
    timeout_s: float

    def world(self, context: RankContext) -> World:
        return context.world(self.attention_tp, self.moe_tp, self.timeout_s)

    def tokens(self, step: int, dp_rank: int) -> int:
        return self.counts[step][min(dp_rank, len(self.counts[step]) - 1)]


@dataclass(frozen=True)
class Loaded:
    """One rank's share of a layer: first and last expert, bytes of their weights, what the plan chose."""

    first_expert: int
    end_expert: int
    weight_bytes: int
    plan: dict[str, str]
    table: str


@dataclass(frozen=True)
class Step:
    """One call of the layer on one rank.

    Attributes:
        hidden: [T, H] that the rank passed in; output: [T, H] that it got back.
        sent: the rows of `hidden` that this rank dispatched itself (a slice of them under attention TP).
        ids, weights: their routing, as the layer's own router chose it.
        copies_sent, copies_received, bytes_sent, bytes_received: between ranks, both ways; None if only the device
            knows.
        seconds: by phase; waiting for other ranks counts.
    """

    hidden: torch.Tensor
    output: torch.Tensor
    sent: tuple[int, int]
    ids: torch.Tensor
    weights: torch.Tensor
    copies_sent: int | None
    copies_received: int | None
    bytes_sent: int | None
    bytes_received: int | None
    seconds: dict[str, float]


def load(context: RankContext, job: Job, layer: int) -> Loaded:
    """Load this rank's experts of a layer and warm it up. Collective; replaces the layer before."""
    world = job.world(context)
    _drop(context)
    parts = load_on_all_ranks(world, lambda: load_layer(job.directory, layer, world.parallel, world.rank), layer)
    moe = context.cache["layer"] = build_layer(parts, world, job.runtime)
    world.warmup(moe)
    plan = moe.plan
    return Loaded(
        first_expert=parts.shard.first_expert,
        end_expert=parts.shard.end_expert,
        weight_bytes=parts.experts.nbytes,
        plan={
            "dispatcher": plan.dispatcher,
            "executor": plan.executor,
            "tokens": plan.token_format,
            "reason": plan.reason,
        },
        table=plan.table(),
    )


def drive(context: RankContext, job: Job, layer: int, step: int) -> Step:
    """Call the loaded layer once, with this rank's tokens of that step."""
    world, moe = job.world(context), context.cache["layer"]
    T, H = job.tokens(step, world.dp_rank), moe.config.input_size
    generator = torch.Generator().manual_seed(_SEED + 7919 * layer + 97 * step + world.dp_rank)
    hidden = torch.randn(T, H, generator=generator).to(getattr(torch, job.dtype))
    token_ids: torch.Tensor | None = None
    if moe.router.token_table is not None:
        token_ids = torch.randint(moe.router.token_table.shape[0], (T,), generator=generator).to(world.device)
    with _Observation(moe) as seen:
        x, routing = hidden.to(world.device), None
        if world.size == 1 and moe.executor.takes_logits:  # a kernel's own choice couldn't be seen
            routing = moe.router(x, token_ids)
        with world.step(T, number=step):
            output = moe(x, routing, token_ids=token_ids)
    traffic = seen.handles[0].traffic
    part = -(-T // job.attention_tp)
    first = min(world.attention_tp_rank * part, T)
    return Step(
        hidden=hidden,
        output=output.cpu(),
        sent=(first, min(first + part, T)),
        ids=seen.choices[0].ids.cpu(),
        weights=seen.choices[0].weights.cpu(),
        copies_sent=traffic.rows_sent if traffic else None,
        copies_received=traffic.rows_received if traffic else None,
        bytes_sent=traffic.bytes_sent if traffic else None,
        bytes_received=traffic.bytes_received if traffic else None,
        seconds=dict(seen.seconds),
    )


def finish(context: RankContext) -> None:
    """Give back the last layer's memory."""
    _drop(context)


def _drop(context: RankContext) -> None:
    layer = context.cache.pop("layer", None)
    if layer is not None:
        layer.close()


class _Observation:
    """Hooks into one call of a layer: times its phases, notes what its router chose and which handles were made.

    The executor is handed outputs full of NaN, so that a row it forgets shows.
    """

    def __init__(self, layer: ExpertParallelMoE) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.choices: list[TopK] = []
        self.handles: list[Handle] = []
        self._layer = layer

    def __enter__(self) -> _Observation:
        layer = self._layer
        if layer.router is None:
            raise ConfigError("eprt run observes the router of a checkpoint's layer: this layer has none")
        if not isinstance(layer.executor, NanOutput):
            layer.executor = NanOutput(layer.executor)
        self._before = layer.observe, layer.see
        layer.observe, layer.see = self._time, self._see
        return self

    def __exit__(self, *_: object) -> None:
        self._layer.observe, self._layer.see = self._before

    def _see(self, phase: str, found: TopK | RouterLogits | Dispatched) -> None:
        if isinstance(found, TopK):
            self.choices.append(found)
        elif isinstance(found, Dispatched):
            self.handles.append(found.handle)

    @contextmanager
    def _time(self, phase: str) -> Iterator[None]:
        start = self._now()
        yield
        self.seconds[phase] += self._now() - start

    def _now(self) -> float:
        if self._layer.world.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
