"""Models the time of dispatchers and executors that weren't measured: sums of a few physical times, fitted to rows.

A dispatcher's round trip takes a constant, steps between ranks, rows to prepare, bytes over the link at its peak rate,
bytes through memory at its peak rate; and bytes over RDMA at an assumed rate. An executor's call takes a constant,
weights of the experts hit at the memory's peak rate, operations at the bf16 peak, rows and values between the two
matrices through memory. Each coefficient says how far from the peak a backend stays, so it carries over to another
machine's peaks. An executor has coefficients of its own for each number format that it keeps weights in, where there
are rows enough: those are other kernels.

Routing is taken as uniform. `tests/unit/test_plan_model.py` holds the fit: each measured row against the model without
that row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

from eprt.config import MoEConfig, ParallelConfig, WeightFormat
from eprt.dispatch import DISPATCHERS
from eprt.dispatch.spec import DispatcherSpec
from eprt.experts import EXECUTORS
from eprt.experts.base import ExecutorSpec
from eprt.plan.fitting import Fit, Sample, fit_of
from eprt.plan.machines import RDMA_GB_PER_S, Machine, linked_ranks, machine_of
from eprt.plan.measured import BENCH_EXPERTS, MeasuredRow, dispatch_time, experts_time, shipped
from eprt.support import Device

# Bytes of one value, and of one weight, with its share of block scales.
PAYLOAD_BYTES = {"f32": 4, "bf16": 2, "fp8_block": 1 + 4 / 128, "nvfp4": 1 / 2 + 1 / 16}
WEIGHT_BYTES: dict[WeightFormat, float] = {
    "f32": 4,
    "bf16": 2,
    "mxfp4": 1 / 2 + 1 / 32,
    "nvfp4": 1 / 2 + 1 / 16,
    "fp8_tensor": 1,
    "fp8_block": 1 + 4 / 128**2,
    "fp8_channel": 1,
    "mxfp8": 1 + 1 / 32,
    "int4": 1 / 2 + 2 / 32,  # bf16 scales of the smallest groups
}
DISPATCH_TERMS = ("constant", "steps", "rows", "link", "memory")
DISPATCH_LEAST = (0.0, 0.0, 0.0, 1.0, 0.0)  # nothing crosses a link faster than its peak
EXPERTS_TERMS = ("constant", "weights", "FLOPs", "activations")
EXPERTS_LEAST = (0.0, 0.0, 0.0, 0.0)
ADAPTER_US = 20.0  # assumed: a few small kernels and their launches


@dataclass(frozen=True)
class Estimate:
    """Microseconds of one half of a layer, and where they come from.

    Attributes:
        basis: "measured" rows of this shape, ranks and generation; "modelled" by a fit to rows of the same backend;
            "assumed": no row of that backend exists anywhere, the best that others reach stands in.
        here: rows of this backend on this generation exist; for an executor, in this weight format.
        why: words for `eprt explain`.
        parts: microseconds by cause, in the model's proportions.
    """

    us: float
    basis: Literal["measured", "modelled", "assumed"]
    here: bool
    why: str
    parts: dict[str, float] = field(default_factory=dict)

    def adapted(self, rows: float, hidden: int, device: Device) -> Estimate:
        """Adds an adapter between the token formats, by assumption.

        That is launches, and received rows and outputs each read and written once.
        """
        machine = machine_of(device)
        if machine is None:
            return self
        us = ADAPTER_US + 4 * rows * 2 * hidden / machine.memory_gb_per_s / 1e3
        why = f"{self.why}, adapter assumed {us:.3g} us"
        return replace(self, us=self.us + us, why=why, parts={**self.parts, "adapter": us})

    def times(self, rounds: int) -> Estimate:
        """Returns the estimate of `rounds` calls."""
        parts = {name: rounds * us for name, us in self.parts.items()}
        why = self.why if rounds == 1 else f"{rounds} rounds, each {self.why}"
        return replace(self, us=rounds * self.us, why=why, parts=parts)


# ---- the roofline ---------------------------------------------------------------------------------------------------


def roofline_us(config: MoEConfig, parallel: ParallelConfig, tokens: int, device: Device) -> float | None:
    """Returns microseconds of a layer's call that no kernel can beat at the makers' peak rates; None for a CPU.

    That is bytes over the busier of link and network, each token in bf16 once to each rank that needs it and its sum
    back; then the larger of reading the weights of the experts hit and multiplying.
    """
    machine = machine_of(device)
    if machine is None:
        return None
    W, linked = parallel.world_size, linked_ranks(parallel, device)
    moved = tokens * ranks_of_a_token(config, parallel) * 4 * config.hidden_size / W
    carried = max(moved * (linked - 1) / machine.link_gb_per_s, moved * (W - linked) / RDMA_GB_PER_S) / 1e3
    hit, rows = evenly(config, config.num_experts / parallel.ep_size, tokens * W)
    return carried + max(peaks_us(config, config.weight_format, parallel.moe_tp_size, hit, rows, machine))


def peaks_us(
    config: MoEConfig, kept: WeightFormat, moe_tp: int, hit: float, rows: float, machine: Machine
) -> tuple[float, float]:
    """Returns microseconds at a machine's peaks: of reading the weights of `hit` experts, and of multiplying `rows`."""
    values = expert_values(config) / moe_tp
    reading = hit * values * WEIGHT_BYTES[kept] / machine.memory_gb_per_s / 1e3
    return reading, 2 * rows * values / machine.bf16_tflop_per_s / 1e6


def expert_values(config: MoEConfig) -> int:
    """Returns the number of weights of one expert, biases aside."""
    return (config.activation.parts + 1) * config.intermediate_size * config.hidden_size


# ---- dispatch -----------------------------------------------------------------------------------------------------


def dispatch_estimate(
    spec: DispatcherSpec, config: MoEConfig, parallel: ParallelConfig, tokens: int, device: Device, payload: str
) -> Estimate | None:
    """Estimates dispatch + combine of `tokens` on every rank; None where nothing is known (a CPU without rows)."""
    if parallel.world_size == 1:
        return Estimate(0.0, "measured", True, "a world of one moves nothing")
    modelled = modelled_dispatch(spec, sent_by(spec, config, parallel, tokens, device, payload), device)
    if not parallel.spans_hosts and parallel.moe_tp_size == 1:
        row = dispatch_time(spec.name, config, tokens, parallel.world_size, device.sm, payload)
        if row is not None:
            return _measured(row, modelled)
    return modelled


def modelled_dispatch(spec: DispatcherSpec, sent: Sent, device: Device) -> Estimate | None:
    """Estimates by the model, whatever was measured."""
    machine = machine_of(device)
    fit = _dispatch_fits().get(spec.name) if machine else None
    if machine is None or fit is None:
        return None
    parts = _parts(DISPATCH_TERMS, fit, sent.terms(machine))
    parts[machine.link] = parts.pop("link")
    if sent.network_bytes:
        parts["RDMA"] = sent.network_bytes / RDMA_GB_PER_S / 1e3
    return _modelled(parts, fit, device)


@dataclass(frozen=True)
class Sent:
    """The bytes of a rank's busiest resources, for dispatch + combine."""

    ranks: int
    hidden: int
    link_bytes: float
    network_bytes: float
    memory_bytes: float

    def terms(self, machine: Machine) -> tuple[float, ...]:
        """Returns values of `DISPATCH_TERMS`; times in microseconds at the machine's peaks."""
        return (
            1.0,
            math.log2(self.ranks),
            self.hidden / 1e3,
            self.link_bytes / machine.link_gb_per_s / 1e3,
            self.memory_bytes / machine.memory_gb_per_s / 1e3,
        )


def sent_by(
    spec: DispatcherSpec,
    config: MoEConfig,
    parallel: ParallelConfig,
    tokens: int,
    device: Device,
    payload: str,
    share: float | None = None,
) -> Sent:
    """Returns the bytes of one rank as this dispatcher sends.

    Args:
        tokens: on every rank.
        share: rows that the rank gets of each token of the world, in the mean; None: as uniform routing gives it.
    """
    W, hidden, top_k = parallel.world_size, spec.padded_hidden(config.hidden_size), config.top_k
    row, linked = hidden * PAYLOAD_BYTES[payload] + 8 * top_k + 2 * hidden, linked_ranks(parallel, device)
    if spec.sends == "everyone":
        # Every rank gets all rows over the link; each host gets those of the others once, over all its NICs.
        near, far, touched = tokens * (W - 1), tokens * (W - linked) / linked, tokens * W
    else:
        if share is None:
            share = (top_k if spec.sends == "expert" else ranks_of_a_token(config, parallel)) / W
        near, far, touched = tokens * share * (linked - 1), tokens * share * (W - linked), tokens * share * W
    return Sent(W, hidden, near * row, far * row, touched * 4 * hidden)


def ranks_of_a_token(config: MoEConfig, parallel: ParallelConfig) -> float:
    """Returns the mean number of ranks that hold an expert of a token under uniform routing.

    Each of R expert-parallel ranks is missed with probability C(E - E/R, K) / C(E, K).
    """
    E, K, R = config.num_experts, config.top_k, parallel.ep_size
    missed = math.comb(max(E - round(E / R), 0), K) / math.comb(E, K)
    return parallel.moe_tp_size * R * (1 - missed)


@cache
def _dispatch_fits() -> dict[str, Fit]:
    return {name: fit for name in DISPATCHERS if (fit := fit_of(list(dispatch_samples(name)), DISPATCH_LEAST))}


def dispatch_samples(name: str) -> Iterator[Sample]:
    """Returns terms and microseconds of each measured row of a dispatcher."""
    for sm, row in shipped("dispatch"):
        device = Device("cuda", sm)
        if name in row["us"] and (machine := machine_of(device)) is not None:
            config = MoEConfig(BENCH_EXPERTS, row["top_k"], row["hidden"], 128)
            parallel = ParallelConfig(row["ranks"])
            sent = sent_by(DISPATCHERS[name], config, parallel, row["tokens"], device, row["payload"])
            yield Sample(sm, sent.terms(machine), row["us"][name])


# ---- experts ------------------------------------------------------------------------------------------------------


def experts_estimate(
    spec: ExecutorSpec, config: MoEConfig, parallel: ParallelConfig, local_experts: int, tokens: int, device: Device
) -> Estimate | None:
    """Estimates the experts of one rank, `tokens` of all ranks; None where nothing is known, and for a witness."""
    if spec.witness:
        return None
    modelled = modelled_experts(spec, config, parallel, *evenly(config, local_experts, tokens), device)
    row = None
    if parallel.moe_tp_size == 1:
        row = experts_time(spec.name, config, local_experts, tokens, device.sm)
    return modelled if row is None else _measured(row, modelled)


def evenly(config: MoEConfig, local_experts: float, tokens: int) -> tuple[float, float]:
    """Returns (experts that get any row, rows) of a rank under uniform routing; `tokens` of all ranks."""
    E, K = config.num_experts, config.top_k
    return local_experts * (1 - (1 - K / E) ** tokens), tokens * K * local_experts / E


def modelled_experts(
    spec: ExecutorSpec, config: MoEConfig, parallel: ParallelConfig, hit: float, rows: float, device: Device
) -> Estimate | None:
    """Estimates by the model, whatever was measured: `rows` rows for `hit` of a rank's experts."""
    machine = machine_of(device)
    if machine is None:
        return None
    work = expert_terms(spec, config, parallel.moe_tp_size, hit, rows, machine)
    fit = _experts_fit(spec, config.weight_format, work)
    found = _modelled(_parts(EXPERTS_TERMS, fit, work), fit, device)
    return replace(found, here=(device.sm, config.weight_format) in fit.formats)


def expert_terms(
    spec: ExecutorSpec, config: MoEConfig, moe_tp: int, hit: float, rows: float, machine: Machine
) -> tuple[float, ...]:
    """Returns values of `EXPERTS_TERMS`; times in microseconds at the machine's peaks."""
    values = config.hidden_size + 2 * config.intermediate_size / moe_tp  # of a row: in; written and read
    peaks = peaks_us(config, kept_format(spec, config.weight_format), moe_tp, hit, rows, machine)
    return 1.0, *peaks, 2 * rows * values / machine.memory_gb_per_s / 1e3


def kept_format(spec: ExecutorSpec, weight_format: WeightFormat) -> WeightFormat:
    """Returns the format that an executor keeps weights of this one in."""
    return weight_format if weight_format in spec.weights else "bf16"


def _experts_fit(spec: ExecutorSpec, weight_format: WeightFormat, work: Sequence[float]) -> Fit:
    """Returns the executor's own fit; without one, that of the other which does this work soonest.

    The least of each coefficient would be a time that none reaches: one's fit has the operations in the activations'
    term, another's the activations in the operations'.
    """
    fits = _experts_fits()
    if own := fits.get((spec.name, kept_format(spec, weight_format))) or fits.get((spec.name, "")):
        return own
    others = [fit for (_, kept), fit in fits.items() if not kept]
    soonest = min(others, key=lambda fit: sum(_parts(EXPERTS_TERMS, fit, work).values()))
    return Fit(soonest.coefficients, frozenset(), math.nan, math.nan)


@cache
def _experts_fits() -> dict[tuple[str, str], Fit]:
    """Returns fits by executor and the format that it keeps weights in; "": to all of an executor's rows."""
    found = {key: fit_of(samples, EXPERTS_LEAST) for name in EXECUTORS for key, samples in experts_groups(name).items()}
    return {key: fit for key, fit in found.items() if fit is not None}


def experts_groups(name: str) -> dict[tuple[str, str], list[Sample]]:
    """Returns an executor's samples as they are fitted together."""
    groups: dict[tuple[str, str], list[Sample]] = {(name, ""): list(experts_samples(name))}
    for sample in groups[name, ""]:
        groups.setdefault((name, sample.kept), []).append(sample)
    return groups


def experts_samples(name: str) -> Iterator[Sample]:
    """Returns terms and microseconds of each measured row of an executor."""
    for sm, row in shipped("experts"):
        machine = machine_of(Device("cuda", sm))
        if name in row["us"] and machine is not None:
            config = MoEConfig(
                row["experts"], row["top_k"], row["hidden"], row["intermediate"], weight_format=row["weight_format"]
            )
            terms = expert_terms(EXECUTORS[name], config, 1, row["hit"], row["rows"], machine)
            kept = kept_format(EXECUTORS[name], config.weight_format)
            yield Sample(sm, terms, row["us"][name], row["weight_format"], kept)


def _parts(names: Sequence[str], fit: Fit, terms: Sequence[float]) -> dict[str, float]:
    return {name: a * x for name, a, x in zip(names, fit.coefficients, terms, strict=True)}


def _measured(row: MeasuredRow, modelled: Estimate | None) -> Estimate:
    """Returns a row's time, its causes in the model's proportions."""
    parts = {} if modelled is None else {name: us * row.us / modelled.us for name, us in modelled.parts.items()}
    return Estimate(row.us, "measured", True, row.why, parts)


def _modelled(parts: dict[str, float], fit: Fit, device: Device) -> Estimate:
    us = sum(parts.values())
    shown = ", ".join(f"{name} {part:.3g}" for name, part in sorted(parts.items(), key=lambda p: -p[1]) if part >= 0.5)
    sms = {sm for sm, _ in fit.formats}
    if not sms:
        why = f"assumed {us:.3g} us, never measured on any GPU: the best that others reach ({shown})"
        return Estimate(us, "assumed", False, why, parts)
    here = device.sm in sms
    rows = "" if here else f", from rows of {', '.join(f'sm{sm}' for sm in sorted(sms))} by the machines' peaks"
    network = "; RDMA at an assumed rate" if "RDMA" in parts else ""
    why = (
        f"modelled, not measured: {us:.3g} us ({shown}){rows}{network}; a row left out is foretold within "
        f"{fit.median_error:.0%}, at worst {fit.worst_error:.0%}"
    )
    return Estimate(us, "modelled", here, why, parts)
