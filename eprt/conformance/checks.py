"""Runs checks inside the ranks and returns result rows: pytest asserts them, `eprt doctor` prints them.

A check never raises because of a wrong result: a rank that left early would leave its peers waiting.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Literal

import torch

from eprt.config import CombineFormat, MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig, TokenFormat
from eprt.conformance import transport
from eprt.conformance.cases import CASES, CONFIGS, CUT_CASES, TOLERANCE, Batch, Case, make_batches
from eprt.conformance.oracle import expected_outputs, full_weights, layer_of, relative_error
from eprt.dispatch import DISPATCHERS, Dispatched, Dispatcher, make_dispatcher
from eprt.experts import EXECUTORS
from eprt.experts.base import Executor
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.ranks.process import RankContext
from eprt.support import Device
from eprt.tokens import ExpertMajorTokens, FlatTokens
from eprt.weights import ExpertWeights
from eprt.world import World

Kind = Literal["transport", "layer", "interleaved"]
CAPACITY = 64
PACKED_TOLERANCE = 1e-2  # of the weighted sums' own bf16 rounding; the tokens' packing is on both sides


@dataclass(frozen=True)
class Check:
    """One cell of the matrix: a kind of check, a case, the backends and the sizes of the world.

    Attributes:
        kind: "transport" compares bitwise what arrives and what comes back, with a stand-in for the experts;
            "interleaved" does that with two calls open at once; "layer" runs `ExpertParallelMoE` against the oracle.
        config: a name in `CONFIGS`, or a layer of your own.
        executor: used by "layer" only.
        payload: number format that travels; None: the tokens' own.
        combine_payload: number format in which outputs travel back; "transport" and "interleaved" with plain bf16
            tokens only.
        dtype: of the tokens: "bf16" or "f32".
    """

    kind: Kind
    case: Case
    dispatcher: str
    token_format: TokenFormat = "flat"
    executor: str = ""
    config: str | MoEConfig = "silu_bf16"
    payload: PayloadFormat | None = None
    combine_payload: CombineFormat | None = None
    dtype: Literal["bf16", "f32"] = "bf16"
    attention_tp_size: int = 1
    moe_tp_size: int = 1

    @property
    def name(self) -> str:
        moe = self.moe
        config = self.config if isinstance(self.config, str) else f"h{moe.hidden_size}.k{moe.top_k}.e{moe.num_experts}"
        parts = [self.kind, self.dispatcher, self.token_format, self.executor, config, self.dtype, self.payload]
        parts += [f"back_{self.combine_payload}"] if self.combine_payload else []
        sizes = f"atp{self.attention_tp_size}.mtp{self.moe_tp_size}"
        return "-".join([*(p for p in parts if p), sizes, self.case.name])

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.dtype == "bf16" else torch.float32

    @property
    def moe(self) -> MoEConfig:
        return CONFIGS[self.config] if isinstance(self.config, str) else self.config

    @property
    def runtime(self) -> RuntimeConfig:
        return RuntimeConfig(
            dispatcher=self.dispatcher,
            executor=self.executor or "auto",
            max_tokens_per_rank=CAPACITY,
            payload=self.payload,
            combine_payload=self.combine_payload,
            token_format=self.token_format,
        )


@dataclass(frozen=True)
class CheckRow:
    """One rank's result of one check. `error`: largest relative error of its calls (0 for a bitwise match)."""

    check: Check
    rank: int
    ok: bool
    error: float
    detail: str = ""


def run_checks(context: RankContext, checks: Sequence[Check]) -> list[CheckRow]:
    """Runs every check in order on this rank. Collective. A job for `WorldPool.run`."""
    return [(check_layer if check.kind == "layer" else check_transport)(context, check) for check in checks]


def summarize(rows_by_rank: Iterable[Sequence[CheckRow]]) -> list[CheckRow]:
    """Returns one row for each check: the worst rank's."""
    return [max(rows, key=lambda row: (not row.ok, row.error)) for rows in zip(*rows_by_rank, strict=True)]


def standard_checks(size: int, device: Device) -> list[Check]:
    """Returns the table for a machine: every case on each dispatcher, format and executor that can run there.

    Left out is what `supports` refuses, for the reason that `eprt explain` prints.
    """
    checks: list[Check] = []
    layers = [("silu_bf16", 1, 1), ("gpt_oss", 1, 1)]  # config, attention TP, MoE TP
    layers += [("gpt_oss", 2, 1), ("gpt_oss", 1, 2)] if size % 2 == 0 else []
    for name, spec in DISPATCHERS.items():
        for token_format in spec.formats:
            checks += [
                Check(kind, case, name, token_format, combine_payload=combine_payload)
                for combine_payload in (None, *spec.combine_payloads)
                for kind in _TRANSPORTS
                for case in CASES
            ]
            checks += [
                Check("layer", case, name, token_format, executor, config, attention_tp_size=attention, moe_tp_size=moe)
                for executor in EXECUTORS
                for config, attention, moe in layers
                for case in (*CASES, *CUT_CASES)
                if attention * moe == 1 or case.routing == "uniform"
            ]
    return [check for check in checks if _possible(check, size, device)]


_TRANSPORTS: tuple[Kind, ...] = ("transport", "interleaved")
_INTERLEAVED = (((0, 1), (0, 1)), ((0, 1), (1, 0)))  # calls dispatched, and in which order they are combined


def _possible(check: Check, size: int, device: Device) -> bool:
    parallel = ParallelConfig(size, check.attention_tp_size, check.moe_tp_size)
    if not DISPATCHERS[check.dispatcher].supports(check.moe, parallel, check.runtime, device):
        return False
    payload = check.payload or check.dtype
    executor = EXECUTORS.get(check.executor)
    return executor is None or bool(executor.supports(check.moe, parallel, check.runtime, device, payload))


# ---- the kinds ------------------------------------------------------------------------------------------------


def check_transport(context: RankContext, check: Check) -> CheckRow:
    """Dispatches, stands in for the experts, and combines; all calls of the case in a row.

    "interleaved" has two calls open at once, combined in the order of their dispatch, then in the other.
    """
    run = _TransportRun(context, check)
    in_a_row = [((call,), (call,)) for call in range(check.case.num_calls)]
    for dispatched, combined in _INTERLEAVED if check.kind == "interleaved" else in_a_row:
        for call in dispatched:
            run.dispatch(call)
        for call in combined:
            run.combine(call)
    return run.row()


def check_layer(context: RankContext, check: Check) -> CheckRow:
    """Holds `ExpertParallelMoE` with canonical weights to the oracle; all calls of the case in a row.

    Under attention TP the ranks of a group hold the tokens of their group's first rank.
    """
    world = _world(context, check)
    config, full = check.moe, context.once(("weights", check.config), lambda: full_weights(check.moe))
    layer = _layer(context, check, world, full)
    errors = [0.0]
    for call in range(check.case.num_calls):
        source = world.rank - world.attention_tp_rank
        batch = _inputs(check.case, call, world.size, config, check.torch_dtype)[source]
        own = batch.to(world.device)
        out = layer(own.hidden, own.topk, tokens_per_rank=check.case.counts.agreed)
        key = ("expected", check.config, check.case, call, check.dtype, source)
        expected = context.once(key, partial(expected_outputs, config, full, [batch]))
        errors.append(relative_error(out, expected[0]))
    return CheckRow(check, world.rank, max(errors) <= TOLERANCE[check.torch_dtype], max(errors))


class _TransportRun:
    """Holds the open calls of one transport check, and what was wrong with them so far."""

    def __init__(self, context: RankContext, check: Check) -> None:
        self.check = check
        self.world = _world(context, check)
        self.dispatcher = _dispatcher(context, check, self.world)
        # Float32 has bits to spare for scaling expert e by e + 1; in bf16 only the plain sum is exact.
        E = self.dispatcher.config.num_experts
        self.scale = torch.arange(1.0, E + 1) if check.dtype == "f32" else torch.ones(E)
        self.exact = check.payload in (None, check.dtype)
        self.open: dict[int, tuple[Batch, Dispatched]] = {}
        self.problems: list[str] = []
        self.error = 0.0

    def dispatch(self, call: int) -> None:
        check, world = self.check, self.world
        batches = _inputs(check.case, call, world.size, self.dispatcher.config, check.torch_dtype)
        own = batches[world.rank].to(world.device)
        sent = self.dispatcher.dispatch(own.hidden, own.topk, check.case.counts.agreed)
        self.open[call] = (batches[world.rank], sent)
        found = transport.wrong_arrivals(sent.tokens, batches, self.dispatcher.shard, check.payload)
        self.problems += [f"call {call}: {problem}" for problem in found]

    def combine(self, call: int) -> None:
        batch, sent = self.open.pop(call)
        shard = self.dispatcher.shard
        # MoE-TP ranks each hold a part of an expert; here the first holds all of it, so that the sum stays exact.
        scale = self.scale if shard.moe_tp_rank == 0 else torch.zeros_like(self.scale)
        out = transport.scale_experts(sent.tokens, shard, scale, batch.hidden.dtype)
        returned = self.dispatcher.combine(out, sent.handle).cpu()
        expected = transport.weighted_sums(batch, self.scale, self.check.payload)
        if self.check.combine_payload == "fp8":
            expected = transport.fp8_sums(batch, shard)
        self.error = max(self.error, relative_error(returned, expected))
        if returned.dtype != batch.hidden.dtype:
            self.problems.append(f"call {call}: combine returned {returned.dtype}, {batch.hidden.dtype} was dispatched")
        if self.exact and not torch.equal(returned, expected.to(returned.dtype)):
            self.problems.append(f"call {call}: combine is not what the formats make of x * sum(weights), bit for bit")

    def row(self) -> CheckRow:
        ok = not self.problems and self.error <= (0.0 if self.exact else PACKED_TOLERANCE)
        return CheckRow(self.check, self.world.rank, ok, self.error, "; ".join(self.problems))


# ---- what ranks keep from check to check ----------------------------------------------------------------------


_inputs = lru_cache(1024)(make_batches)  # small, and the same for all backends


class NanOutput(Executor):
    """Wraps an executor and hands it an output full of NaN, so that an unwritten row shows."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.config = inner.config

    @property
    def takes_logits(self) -> bool:
        return False  # a kernel that chooses the experts itself is handed no output

    def run(self, tokens: FlatTokens | ExpertMajorTokens, out: torch.Tensor) -> None:
        out.fill_(math.nan)
        if out.is_contiguous() or self.inner.strided:
            self.inner(tokens, out)
        else:  # the inner executor would write into memory of its own, and copy that
            out.copy_(self.inner(tokens, out.clone(memory_format=torch.contiguous_format)))

    def warmup(self, max_rows: int, top_k: int | None = None) -> None:
        self.inner.warmup(max_rows, top_k)


def _world(context: RankContext, check: Check) -> World:
    return context.world(attention_tp_size=check.attention_tp_size, moe_tp_size=check.moe_tp_size)


def _key(check: Check) -> Check:
    """Returns the key of a check's dispatcher or layer. Checks that differ only in their case share it: reuse is part
    of what is checked."""
    return replace(check, case=CASES[0], kind="transport" if check.kind == "interleaved" else check.kind)


def _dispatcher(context: RankContext, check: Check, world: World) -> Dispatcher:
    """Returns a dispatcher of the check's experts, or of a few more, as they have to divide over the ranks."""
    inside = ExpertPlacement(check.moe.num_experts, world.parallel).in_slots(check.moe)
    return context.once(_key(check), lambda: make_dispatcher(check.dispatcher, world, inside, check.runtime))


def _layer(context: RankContext, check: Check, world: World, full: ExpertWeights) -> ExpertParallelMoE:
    def make() -> ExpertParallelMoE:
        layer = layer_of(world, check.moe, full, check.runtime)
        layer.executor = NanOutput(layer.executor)
        return layer

    return context.once(_key(check), make)
