"""The jobs of `eprt run`: each rank loads its experts and calls the layer. The parent, which holds the oracle, judges
the outputs."""

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

_SEED = 8128


@dataclass(frozen=True)
class LoadedLayer:
    """One rank's share of a layer: its experts (first, and one past the last), their bytes, and the layer's plan."""

    experts: tuple[int, int]
    weight_bytes: int
    plan: dict[str, str]


@dataclass(frozen=True)
class DrivenStep:
    """One call of the layer on one rank.

    Attributes:
        hidden: [T, H] that the rank passed in; output: [T, H] that it got back.
        sent: the rows of `hidden` that this rank dispatched itself (a slice of them under attention TP).
        ids, weights: their routing, as the layer's own router chose it.
        traffic: copies_sent, copies_received, bytes_sent and bytes_received between ranks, both ways; None if only the
            device knows.
        seconds: by phase; waiting for other ranks counts.
    """

    hidden: torch.Tensor
    output: torch.Tensor
    sent: tuple[int, int]
    ids: torch.Tensor
    weights: torch.Tensor
    traffic: dict[str, int | None]
    seconds: dict[str, float]


def load(
    context: RankContext,
    directory: str,
    layer: int,
    attention_tp: int,
    moe_tp: int,
    runtime: RuntimeConfig,
    behind_s: float,
) -> LoadedLayer:
    """Loads this rank's experts of a layer and warms it up. Collective; closes the layer before."""
    world = context.world(attention_tp, moe_tp, behind_s)
    context.release("layer")
    parts = load_on_all_ranks(world, lambda: load_layer(directory, layer, world.parallel, world.rank), layer)
    moe = context.cache["layer"] = build_layer(parts, world, runtime)
    world.warmup(moe)
    plan = {
        "dispatcher": moe.plan.dispatcher,
        "executor": moe.plan.executor,
        "tokens": moe.plan.token_format,
        "reason": moe.plan.reason,
    }
    return LoadedLayer((parts.shard.first_expert, parts.shard.end_expert), parts.experts.nbytes, plan)


def drive(context: RankContext, layer: int, step: int, tokens: list[int], dtype: str) -> DrivenStep:
    """Calls the loaded layer once, with `tokens[rank]` tokens of `dtype` ("bfloat16" or "float32")."""
    moe: ExpertParallelMoE = context.cache["layer"]
    world, T = moe.world, tokens[context.rank]
    generator = torch.Generator().manual_seed(_SEED + 7919 * layer + 97 * step + world.dp_rank)
    hidden = torch.randn(T, moe.config.input_size, generator=generator).to(getattr(torch, dtype))
    with _Observation(moe) as seen:
        x, token_ids, routing = hidden.to(world.device), None, None
        if (table := seen.router.token_table) is not None:
            token_ids = torch.randint(table.shape[0], (T,), generator=generator).to(world.device)
        if world.size == 1 and moe.executor.takes_logits:  # a kernel's own choice couldn't be seen
            routing = seen.router(x, token_ids)
        with world.step(T, number=step):
            output = moe(x, routing, token_ids=token_ids)
    sent = seen.handles[0].traffic
    part = -(-T // world.parallel.attention_tp_size)
    first = min(world.attention_tp_rank * part, T)
    return DrivenStep(
        hidden=hidden,
        output=output.cpu(),
        sent=(first, min(first + part, T)),
        ids=seen.choices[0].ids.cpu(),
        weights=seen.choices[0].weights.cpu(),
        traffic={
            "copies_sent": sent.rows_sent if sent else None,
            "copies_received": sent.rows_received if sent else None,
            "bytes_sent": sent.bytes_sent if sent else None,
            "bytes_received": sent.bytes_received if sent else None,
        },
        seconds=dict(seen.seconds),
    )


class _Observation:
    """Observes one call of a layer: times its phases, notes what its router chose and which handles were made.

    The executor is handed outputs full of NaN, so that a row it forgets shows.
    """

    def __init__(self, layer: ExpertParallelMoE) -> None:
        if layer.router is None:
            raise ConfigError("eprt run observes the router of a checkpoint's layer: this layer has none")
        self.router = layer.router
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.choices: list[TopK] = []
        self.handles: list[Handle] = []
        self._layer = layer

    def __enter__(self) -> _Observation:
        layer = self._layer
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
