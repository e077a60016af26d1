"""Chooses a dispatcher and an executor: every candidate pair with its reason, then the choice.

Needs no tensors, no GPU and no kernel library, so a plan for eight B200 can be made on a laptop. The choice follows
microseconds: measured ones (`eprt.plan.measured`) where rows of this shape, ranks and generation exist, else those of a
model fitted to the rows (`eprt.plan.model`), else the order of preference.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from eprt import engines
from eprt.config import MoEConfig, ParallelConfig, PayloadFormat, RuntimeConfig, TokenFormat
from eprt.dispatch import DISPATCHERS, DispatcherSpec, dispatcher_spec
from eprt.errors import UnsupportedError, aligned
from eprt.experts import EXECUTORS, ExecutorSpec, executor_spec
from eprt.kinds import require_kinds
from eprt.placement import ExpertPlacement
from eprt.plan.measured import own_fingerprint, own_tables
from eprt.plan.model import Estimate, dispatch_estimate, experts_estimate
from eprt.support import Device, Support, refuse

DECODE_TOKENS = 128  # tokens per rank that stand for a decode batch when times are looked up


@dataclass(frozen=True)
class Candidate:
    """One dispatcher/executor pair and the verdict on it.

    Attributes:
        token_format: what the dispatcher would emit; `adapted` says that an adapter bridges it to the executor.
        max_tokens_per_rank: capacity of its buffers; a dispatcher's own limit where that is less than was asked for,
            and a larger batch passes in rounds.
        dispatch, experts: microseconds of one layer's call; None where nothing is known, or the pair can't work.
    """

    dispatcher: str
    executor: str
    token_format: TokenFormat
    adapted: bool
    support: Support
    max_tokens_per_rank: int
    dispatch: Estimate | None = None
    experts: Estimate | None = None

    @property
    def us(self) -> float | None:
        """Microseconds of a layer's call, route and shared expert aside."""
        return None if self.dispatch is None or self.experts is None else self.dispatch.us + self.experts.us


@dataclass(frozen=True)
class Plan:
    """The choice, the reason for it, and the candidates that were turned down.

    Attributes:
        max_tokens_per_rank: capacity that the layer's buffers are sized for: `RuntimeConfig.max_tokens_per_rank`, or
            the dispatcher's own limit below it.
        tokens: tokens per rank that the times are of.
        settings: what the choice went by and all ranks must have in common: the rows of `eprt tune`, where something
            was left to the plan.
        engines: the verdict on every row of `eprt.engines.ENGINES` with this pair; the first that takes a call does
            its work, and the reason of a yes says which calls those are.
    """

    dispatcher: str
    executor: str
    token_format: TokenFormat
    payload: PayloadFormat | None
    reason: str
    candidates: tuple[Candidate, ...]
    max_tokens_per_rank: int
    tokens: int
    chosen: Candidate
    settings: Mapping[str, str]
    engines: Mapping[str, Support]


def make_plan(
    config: MoEConfig,
    parallel: ParallelConfig,
    runtime: RuntimeConfig,
    device: Device,
    placement: ExpertPlacement | None = None,
) -> Plan:
    """Chooses for a layer, a world and a device; experts lie as `placement` says, contiguous by default.

    Raises:
        UnsupportedError: nothing can; the message is the table.
        ConfigError: an unknown name, a placement of other experts, MoE-TP that doesn't divide an expert, or a file of
            `eprt tune` that can't be read.
    """
    require_kinds(make_plan, locals())
    placement = placement or ExpertPlacement(config.num_experts, parallel)
    config = placement.in_slots(config)
    placement.shard(0).slice_intermediate(config.intermediate_size)
    require_single(placement, runtime)
    ask = _Ask(config, parallel, runtime, device, placement.num_local_experts)
    dispatchers, executors = backends_of(runtime)
    candidates = tuple(candidate for d in dispatchers for e in executors for candidate in ask.pair(d, e))
    possible = [c for c in candidates if c.support]
    if not possible:
        world = f"{parallel.world_size} x {device}"
        rows = [(c.dispatcher, c.executor, c.token_format, c.support.reason) for c in candidates]
        table = aligned([("dispatcher", "executor", "tokens", "reason"), *rows])
        raise UnsupportedError(f"no dispatcher/executor pair can run this layer on {world}:\n{table}")
    best = min(possible, key=ask.key)
    return Plan(
        dispatcher=best.dispatcher,
        executor=best.executor,
        token_format=best.token_format,
        payload=runtime.payload,
        reason=ask.why(best, possible),
        candidates=candidates,
        max_tokens_per_rank=best.max_tokens_per_rank,
        tokens=ask.tokens,
        chosen=best,
        settings={"rows of eprt tune": own_fingerprint()} if "auto" in (runtime.dispatcher, runtime.executor) else {},
        engines=ask.engines(best.executor, sees_ids=runtime.count_load or not placement.is_identity),
    )


def backends_of(runtime: RuntimeConfig) -> tuple[Collection[DispatcherSpec], Collection[ExecutorSpec]]:
    """Returns those that may be chosen: all, or the named one. Raises ConfigError for a name that nothing has."""
    return (
        DISPATCHERS.values() if runtime.dispatcher == "auto" else [dispatcher_spec(runtime.dispatcher)],
        EXECUTORS.values() if runtime.executor == "auto" else [executor_spec(runtime.executor)],
    )


def require_single(placement: ExpertPlacement, runtime: RuntimeConfig) -> None:
    """Raises UnsupportedError for replicas where a token's bits may not follow the batch."""
    if runtime.batch_invariant and any(len(slots) > 1 for slots in placement.replicas):
        raise UnsupportedError(
            "batch_invariant with replicated experts: which replica a token visits follows the batch; plan for as many "
            "slots as experts"
        )


@dataclass(frozen=True)
class _Ask:
    """The layer to plan for, counted in physical expert slots."""

    config: MoEConfig
    parallel: ParallelConfig
    runtime: RuntimeConfig
    device: Device
    local_experts: int

    @property
    def tokens(self) -> int:
        """Tokens per rank at which times are compared."""
        tokens = self.runtime.max_tokens_per_rank
        return min(tokens, DECODE_TOKENS) if self.runtime.phase == "decode" else tokens

    def pair(self, d: DispatcherSpec, e: ExecutorSpec) -> list[Candidate]:
        """Returns the pair in every token format it could use: native ones, or one adapted."""
        runtime, asked = self.runtime, self.runtime.max_tokens_per_rank
        if d.max_tokens is not None and asked > d.max_tokens and not runtime.strict_capacity:
            runtime = replace(runtime, max_tokens_per_rank=d.max_tokens)  # larger batches pass in rounds
        carries = d.supports(self.config, self.parallel, runtime, self.device)
        computes = e.supports(self.config, self.parallel, self.runtime, self.device, runtime.payload or "bf16")
        if computes and e.witness and runtime.executor == "auto":
            computes = refuse(f"there to check the others, not to be fast: only by name, executor={e.name!r}")
        formats: list[TokenFormat] = [f for f in d.formats if runtime.token_format in (None, f)] or list(d.formats)
        native: list[TokenFormat] = [f for f in formats if f in e.formats]
        rounds = f"in rounds of at most {d.max_tokens} tokens a rank" if runtime.max_tokens_per_rank < asked else ""
        found: list[Candidate] = []
        for token_format in native or formats[:1]:
            adapted = token_format not in native
            if not carries or not computes:
                name, lacks = (d.name, carries) if not carries else (e.name, computes)
                support, times = refuse(f"{name}: {lacks.reason}"), ()
            else:
                remarks = carries.reason, rounds, computes.reason, f"adapter from {token_format}" if adapted else ""
                support, times = Support(True, "; ".join(filter(None, remarks))), self._times(d, e, runtime, adapted)
            common = (d.name, e.name, token_format, adapted)
            found.append(Candidate(*common, support, runtime.max_tokens_per_rank, *times))
        return found

    def _times(
        self, d: DispatcherSpec, e: ExecutorSpec, runtime: RuntimeConfig, adapted: bool
    ) -> tuple[Estimate | None, Estimate | None]:
        """Returns the times of dispatch + combine and of the experts, all rounds of one call together."""
        rounds = -(-self.tokens // runtime.max_tokens_per_rank)
        tokens, ranks = -(-self.tokens // rounds), self.parallel.world_size
        carried = dispatch_estimate(d, self.config, self.parallel, tokens, self.device, runtime.payload or "bf16")
        work = experts_estimate(e, self.config, self.parallel, self.local_experts, tokens * ranks, self.device)
        if work and adapted:
            work = work.adapted(tokens * self.config.top_k, self.config.hidden_size, self.device)
        return carried and carried.times(rounds), work and work.times(rounds)

    def engines(self, executor: str, sees_ids: bool) -> dict[str, Support]:
        asked = self.config, self.parallel, self.runtime, EXECUTORS[executor], sees_ids
        if self.runtime.batch_invariant:
            return dict.fromkeys(engines.ENGINES, refuse("batch_invariant: takes some sizes of batches only"))
        return {spec.name: spec.rule(*asked) for spec in engines.ENGINES.values()}

    def key(self, c: Candidate) -> tuple[bool, int, bool, float, bool, int, int]:
        """Returns a sort key; smallest is best.

        Dispatchers that carry the tokens of a float32 layer, unless a payload is asked for, come before those that
        don't. Then backends with rows on this generation of GPU come before those without, then count microseconds,
        then native before adapted, then the order of preference.
        """
        # A world of one has nothing to carry: the dispatcher that moves nothing wins.
        moves_nothing = self.parallel.world_size == 1 and c.dispatcher == "none"
        dispatcher = -1_000_000 if moves_nothing else -DISPATCHERS[c.dispatcher].preference
        unknown = sum(2 if half is None else not half.here for half in (c.dispatch, c.experts))
        cost = sum(half.us for half in (c.dispatch, c.experts) if half is not None)
        untimed = unknown, c.us is None and c.adapted
        return self._casts(c), *untimed, cost, c.adapted, -EXECUTORS[c.executor].preference, dispatcher

    def _casts(self, c: Candidate) -> bool:
        """Tells whether the dispatcher would ask for bf16 tokens in a model that computes in float32."""
        asked = self.runtime.payload or ("f32" if self.config.weight_format == "f32" else "bf16")
        return asked not in DISPATCHERS[c.dispatcher].payloads

    def why(self, best: Candidate, possible: list[Candidate]) -> str:
        chosen, halves = (best.dispatcher, best.executor), (best.dispatch, best.experts)
        took = [(name, half) for name, half in zip(chosen, halves, strict=True) if half and half.us]
        said = [f"{name} {half.why}" for name, half in took]
        if not any(half.here for _, half in took):
            first = "" if took else ": first in the order of preference that can"
            said.insert(0, f"nothing measured on {self.device} for this layer{first}")
        if self.parallel.world_size == 1:
            said.append("a world of one moves nothing")
        tuned = any(table["sm"] == self.device.sm for table in own_tables()) and self.parallel.moe_tp_size == 1
        if tuned and any(half is None or half.basis != "measured" for half in halves):
            tokens = self.tokens
            said.append(f"eprt tune has no times of this model at {tokens} tokens a rank: --tokens {tokens} adds them")
        if not self._casts(best) and any(map(self._casts, possible)):
            said.append("carries float32 tokens")
        others = {c.dispatcher: c.dispatch.us for c in possible if c.dispatch and c.dispatch.us}
        others |= {c.executor: c.experts.us for c in possible if c.experts}
        ranked = sorted((us, name) for name, us in others.items() if name not in chosen)
        if ranked:
            said.append(f"others: {', '.join(f'{name} {us:.3g}' for us, name in ranked)} us")
        return "; ".join(said)
