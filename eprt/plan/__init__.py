"""Choosing a dispatcher and an executor: every candidate pair with its reason, then the choice.

Needs no tensors, no GPU and no kernel library, so a plan for eight B200 can be made on a laptop.
"""

from __future__ import annotations

from dataclasses import dataclass

from eprt.config import MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig, TokenFormat
from eprt.dispatch import DISPATCHERS, DispatcherSpec, dispatcher_spec
from eprt.errors import UnsupportedError
from eprt.experts import EXECUTORS, ExecutorSpec, executor_spec
from eprt.placement import ExpertPlacement
from eprt.plan import measured
from eprt.support import Device, Support, refuse


@dataclass(frozen=True)
class Candidate:
    """One dispatcher/executor pair and the verdict on it.

    Attributes:
        token_format: what the dispatcher would emit; `adapted` says that an adapter bridges it to the executor.
    """

    dispatcher: str
    executor: str
    token_format: TokenFormat
    adapted: bool
    support: Support


@dataclass(frozen=True)
class Plan:
    """The choice, why, and what was turned down."""

    dispatcher: str
    executor: str
    token_format: TokenFormat
    payload: PayloadFormat | None
    reason: str
    candidates: tuple[Candidate, ...]

    def table(self) -> str:
        """Plain text: one line a candidate."""
        return _table(self.candidates, (self.dispatcher, self.executor, self.token_format))


def make_plan(
    config: MoEConfig,
    parallel: ParallelConfig,
    runtime: RuntimeConfig,
    device: Device,
    placement: ExpertPlacement | None = None,
) -> Plan:
    """Choose for a layer, a world and a device; experts lie as `placement` says, contiguous by default.

    Raises:
        UnsupportedError: nothing can; the message is the table.
        ConfigError: an unknown name, a placement of other experts, or MoE-TP that doesn't divide an expert.
    """
    placement = placement or ExpertPlacement(config.num_experts, parallel)
    config = placement.in_slots(config)
    placement.shard(0).slice_intermediate(config.intermediate_size)
    dispatchers = list(DISPATCHERS.values()) if runtime.dispatcher == "auto" else [dispatcher_spec(runtime.dispatcher)]
    executors = list(EXECUTORS.values()) if runtime.executor == "auto" else [executor_spec(runtime.executor)]
    candidates = tuple(
        candidate
        for d in dispatchers
        for e in executors
        for candidate in _pair(d, e, config, parallel, runtime, device)
    )
    possible = [c for c in candidates if c.support]
    if not possible:
        raise UnsupportedError(
            f"no dispatcher/executor pair can run this layer on {parallel.world_size} x {device}:\n"
            + _table(candidates)
        )
    costs = _Costs.of(config, placement, runtime, device)
    best = min(possible, key=costs.key)
    return Plan(
        dispatcher=best.dispatcher,
        executor=best.executor,
        token_format=best.token_format,
        payload=runtime.payload,
        reason=costs.why(best),
        candidates=candidates,
    )


DECODE_TOKENS = 128  # tokens a rank that stand for a decode batch when rows are looked up


def _pair(
    d: DispatcherSpec,
    e: ExecutorSpec,
    config: MoEConfig,
    parallel: ParallelConfig,
    runtime: RuntimeConfig,
    device: Device,
) -> list[Candidate]:
    """The pair in every token format it could use: native ones, or one adapted."""
    carries = d.supports(config, parallel, runtime, device)
    formats: list[TokenFormat] = [f for f in d.formats if runtime.token_format in (None, f)] or list(d.formats)
    native: list[TokenFormat] = [f for f in formats if f in e.formats]
    computes = e.supports(config, parallel, runtime, device, runtime.payload or "bf16")
    found: list[Candidate] = []
    for token_format in native or formats[:1]:
        adapted = token_format not in native
        if not carries:
            support = refuse(f"{d.name}: {carries.reason}")
        elif not computes:
            support = refuse(f"{e.name}: {computes.reason}")
        elif e.name == "reference" and device.kind == "cuda" and runtime.executor == "auto":
            support = refuse("reference: the oracle, in float32 and slow: on a GPU only where it is asked for by name")
        else:
            remarks = [carries.reason, computes.reason, f"adapter from {token_format}" if adapted else ""]
            support = Support(True, "; ".join(r for r in remarks if r))
        found.append(Candidate(d.name, e.name, token_format, adapted, support))
    return found


@dataclass(frozen=True)
class _Costs:
    """What the choice goes by: the measured rows nearest to the call, else the order of preference.

    Attributes:
        dispatch, experts: None where nothing was measured on this device for this weight format.
    """

    device: Device
    world_size: int
    dispatch: measured.Row | None
    experts: measured.Row | None

    @classmethod
    def of(cls, config: MoEConfig, placement: ExpertPlacement, runtime: RuntimeConfig, device: Device) -> _Costs:
        tokens = runtime.max_tokens_per_rank
        if runtime.phase == "decode":
            tokens = min(tokens, DECODE_TOKENS)
        payload, ranks = runtime.payload or "bf16", placement.parallel.world_size
        return cls(
            device,
            ranks,
            measured.dispatch_row(config, tokens, ranks, device.sm, payload) if ranks > 1 else None,
            measured.experts_row(config, placement.num_local_experts, tokens * ranks, device.sm),
        )

    def key(self, c: Candidate) -> tuple[bool, int, float, int, int]:
        """Smallest is best: native before adapted, backends that the rows have before those they lack, then measured
        microseconds, then the order of preference."""
        # A world of one has nothing to carry: the dispatcher that moves nothing wins.
        moves_nothing = self.world_size == 1 and c.dispatcher == "none"
        dispatcher = -1_000_000 if moves_nothing else -DISPATCHERS[c.dispatcher].preference
        times = [row.microseconds.get(name) for row, name in self._halves(c)]
        cost = sum(time for time in times if time is not None)
        return c.adapted, times.count(None), cost, -EXECUTORS[c.executor].preference, dispatcher

    def _halves(self, c: Candidate) -> list[tuple[measured.Row, str]]:
        """What was measured, and the candidate's part of it."""
        halves = ((self.dispatch, c.dispatcher), (self.experts, c.executor))
        return [(row, name) for row, name in halves if row is not None]

    def why(self, c: Candidate) -> str:
        rows = [f"{name}, {row}" for row, name in self._halves(c) if name in row.microseconds]
        if not rows:
            rows = [f"nothing measured on {self.device} for this layer: first in the order of preference that can"]
        if self.world_size == 1:
            rows.append("a world of one moves nothing")
        return "; ".join(rows)


def _table(candidates: tuple[Candidate, ...], chosen: tuple[str, str, str] | None = None) -> str:
    rows = [("", "dispatcher", "executor", "tokens", "reason")]
    for c in candidates:
        mark = "->" if chosen == (c.dispatcher, c.executor, c.token_format) else ("ok" if c.support else "no")
        rows.append((mark, c.dispatcher, c.executor, c.token_format, c.support.reason))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) + "  " + row[4] for row in rows
    )
