"""Compares ways to lay a model's experts over the same GPUs: expert parallelism, tensor parallelism, replicas.

All ranks of a world hold equally many tokens in each. Counted are the MoE layers' routed experts: their time, their
weights, the dispatcher's buffers. Attention, KV cache and dense layers are left out, the same in all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import EprtError
from eprt.experts import EXECUTORS
from eprt.placement import ExpertPlacement
from eprt.plan import Plan, make_plan
from eprt.plan.machines import machine_of
from eprt.plan.model import WEIGHT_BYTES, expert_values, kept_format
from eprt.support import Device

USABLE = 0.9  # share of a GPU's memory that experts and buffers may fill


@dataclass(frozen=True)
class ParallelLayout:
    """One way to lay the experts out, with its times and sizes.

    Attributes:
        name, parallel, replicas: the way has `replicas` worlds of `parallel` beside each other.
        plans: of each kind of layer; empty if `refused` says why there is none.
        weight_gb, buffer_gb: a rank's, decimal; buffers are about that.
        layer_us: mean of an MoE layer; None where nothing is known.
        tokens_per_s: of all replicas, through the MoE layers alone; None without a time.
        bound: what takes most of the time.
        fits: into the GPU's memory; None for a CPU.
    """

    name: str
    parallel: ParallelConfig
    replicas: int
    plans: tuple[Plan, ...] = ()
    refused: str = ""
    weight_gb: float = 0.0
    buffer_gb: float = 0.0
    layer_us: float | None = None
    tokens_per_s: float | None = None
    bound: str = ""
    fits: bool | None = None


def layouts(
    kinds: Sequence[tuple[MoEConfig, int]],
    parallel: ParallelConfig,
    runtime: RuntimeConfig,
    device: Device,
    check: Callable[[ParallelConfig], object] = lambda way: None,
) -> list[ParallelLayout]:
    """Returns every way of this world, the fastest that fits first.

    Args:
        kinds: the model's kinds of MoE layers, and how many layers there are of each.
        parallel: the world; its own MoE-TP is one of the ways.
        check: raises EprtError for a way in which the checkpoint can't be read.
    """
    found = [
        _judged(ParallelLayout(name, way, parallel.world_size // way.world_size), kinds, runtime, device, check)
        for name, way in _ways(parallel).items()
    ]
    return sorted(found, key=lambda way: (bool(way.refused), way.fits is False, -(way.tokens_per_s or 0.0)))


def _ways(parallel: ParallelConfig) -> dict[str, ParallelConfig]:
    """Returns worlds of one replica, by name; each shape once."""
    W = parallel.world_size
    host = min(parallel.ranks_per_host or W, W)
    tp = parallel.moe_tp_size
    named = {
        f"EP {parallel.ep_size}" + f" x MoE-TP {tp}" * (tp > 1): (W, tp),
        f"EP {W}": (W, 1),
        f"EP {host} within a host, {W // host} replicas": (host, 1),
        f"EP {W // host} x MoE-TP {host} within a host": (W, host),
        f"TP {host} within a host, {W // host} replicas": (host, host),
        f"one rank, {W} replicas": (1, 1),
    }
    ways: dict[str, ParallelConfig] = {}
    for name, (size, tp) in named.items():
        way = ParallelConfig(size, 1, tp, min(host, size))
        if W % size == 0 and way not in ways.values():
            ways[name] = way
    return ways


def _judged(
    layout: ParallelLayout,
    kinds: Sequence[tuple[MoEConfig, int]],
    runtime: RuntimeConfig,
    device: Device,
    check: Callable[[ParallelConfig], object],
) -> ParallelLayout:
    way, machine = layout.parallel, machine_of(device)
    try:
        check(way)
        plans = tuple(make_plan(config, way, runtime, device) for config, _ in kinds)
    except EprtError as error:
        return replace(layout, refused=str(error).splitlines()[0].removesuffix(":"))
    counted = [(config, count, plan) for (config, count), plan in zip(kinds, plans, strict=True)]
    weights = sum(count * _weight_bytes(config, way, plan) for config, count, plan in counted) / 1e9
    buffers = max(_buffer_bytes(config, way, plan) for config, _, plan in counted) / 1e9
    times = [count * plan.chosen.us for _, count, plan in counted if plan.chosen.us is not None]
    total = sum(times) if len(times) == len(plans) else None
    return replace(
        layout,
        plans=plans,
        weight_gb=weights,
        buffer_gb=buffers,
        layer_us=None if total is None else total / sum(count for _, count in kinds),
        tokens_per_s=layout.replicas * way.world_size * plans[0].tokens / total * 1e6 if total else None,
        bound=_bound(counted),
        fits=None if machine is None else weights + buffers <= USABLE * machine.memory_gb,
    )


def _weight_bytes(config: MoEConfig, way: ParallelConfig, plan: Plan) -> float:
    """Returns the bytes of a rank's experts of one layer, as the executor keeps them."""
    kept = kept_format(EXECUTORS[plan.executor], config.weight_format)
    one = expert_values(config) / way.moe_tp_size * WEIGHT_BYTES[kept]
    return ExpertPlacement(config.num_experts, way).num_local_experts * one


def _buffer_bytes(config: MoEConfig, way: ParallelConfig, plan: Plan) -> float:
    """Estimates the bytes that a dispatcher keeps, once for all layers.

    These are rows from every rank, for dispatch and combine. A dispatcher that sends to each expert has a row for every
    token at each of them, twice over each way.
    """
    if way.world_size == 1:
        return 0.0
    spec = DISPATCHERS[plan.dispatcher]
    row = 2 * spec.padded_hidden(config.hidden_size)
    rows = 4 * config.num_experts if spec.sends == "expert" else 2 * way.world_size
    return rows * plan.max_tokens_per_rank * row


def _bound(counted: Sequence[tuple[MoEConfig, int, Plan]]) -> str:
    """Returns the largest cause over all layers, and its share."""
    causes: dict[str, float] = {}
    for _, count, plan in counted:
        for half in (plan.chosen.dispatch, plan.chosen.experts):
            for cause, us in half.parts.items() if half else ():
                named = {"constant": "latency", "steps": "latency", "rows": "latency"}.get(cause, cause)
                causes[named] = causes.get(named, 0.0) + count * us
    if not causes:
        return ""
    most = max(causes, key=lambda cause: causes[cause])
    return f"{most} {causes[most] / sum(causes.values()):.0%}"
