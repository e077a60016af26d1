"""This process's share of the plugin: the Worlds around vLLM's EP group, the layers, their one warm-up."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.errors import UsageError
from eprt.integrations.vllm.placed import placement_of, spread
from eprt.integrations.vllm.terms import (
    as_vllm_computes,
    captures_graphs,
    choose,
    options_of,
    require_host,
    runtime_config,
)
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import Plan
from eprt.weights import ExpertWeights
from eprt.world import World

logger = logging.getLogger("vllm.eprt")  # below vLLM's own, so that its handlers print these lines
LOOK_S = 0.05  # vLLM ends this process a moment after a peer has died
EXIT_S = 0.8  # longer than the guards need, from a closed connection to the verdict
TIMEOUT_S = 600.0  # the first start of a model compiles; vLLM's own start-up waits as long


@dataclass(frozen=True)
class Seat:
    """Where and how one layer runs, decided when vLLM makes it. `placement` None: experts lie as vLLM loads them."""

    name: str
    number: int
    config: MoEConfig
    world: World
    runtime: RuntimeConfig
    plan: Plan
    placement: ExpertPlacement | None = None


@dataclass
class Host:
    """What the layers of this process share."""

    worlds: dict[bool, World] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], tuple[Plan, RuntimeConfig]] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    cold: list[ExpertParallelMoE] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # seconds of the start-up, by what for

    def seat(self, name: str, config: MoEConfig, sequence_parallel: bool) -> Seat:
        """Collective for the first layer of its kind. Raises LeftToVllm, ConfigError, RankLost."""
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_ep_group, get_tp_group

        vllm_config = get_current_vllm_config()
        if sequence_parallel not in self.worlds:
            require_host(vllm_config, get_ep_group().device.type)
            with self._timed("to meet"):
                self.worlds[sequence_parallel] = _world(get_ep_group(), get_tp_group(), sequence_parallel)
        world = self.worlds[sequence_parallel]
        options = options_of(vllm_config)
        placement = placement_of(options, name, config.num_experts, world)
        key = config, sequence_parallel, placement
        if key not in self.plans:
            runtime = as_vllm_computes(config, runtime_config(vllm_config, get_tp_group().world_size), options)
            captured = captures_graphs(vllm_config)
            self.plans[key] = choose(config, world, runtime, placement, captured=captured)
        plan, runtime = self.plans[key]
        found = Seat(name, len(self.seats), config, world, runtime, plan, placement)
        self.seats.append(found)
        return found

    def leave(self, name: str, reason: str) -> None:
        """A layer stays with vLLM; each reason is told once, when it first occurs."""
        if reason not in self.left:
            logger.warning("eprt: %s and layers like it are left to vLLM: %s", name, reason)
        self.left.setdefault(reason, []).append(name)

    def build(self, seat: Seat, experts: ExpertWeights) -> ExpertParallelMoE:
        """Collective. Raises ConfigError, UnsupportedError, RankLost."""
        with self._timed("to build the layers"):
            if seat.placement is not None:
                experts = spread(seat.world, experts, seat.placement)
            layer = ExpertParallelMoE(
                seat.config, seat.world, experts, runtime=seat.runtime, layer=seat.number, placement=seat.placement
            )
        self.cold.append(layer)
        return layer

    def warm(self) -> None:
        """Collective: compile, tune and allocate for all layers at once. Their first call comes here: in vLLM's
        profile run, when the whole model is loaded (drafts, too) and every rank takes part."""
        layers, self.cold = self.cold, []
        with self._timed("of warm-up for all layers"):
            for world in self.worlds.values():
                own = [layer for layer in layers if layer.world is world]
                if not own:
                    continue
                if world.device.type == "cuda":
                    if torch.cuda.is_current_stream_capturing():
                        raise UsageError("the first call of these layers is inside a CUDA graph capture: report this")
                    torch.cuda.empty_cache()  # what vLLM's copies of the experts took
                world.warmup(*own)
        if all(world.rank == 0 for world in self.worlds.values()):
            self._report()

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.spent[what] += time.monotonic() - started

    def _report(self) -> None:
        kinds: dict[tuple[Any, ...], list[Seat]] = {}
        for seat in self.seats:
            kinds.setdefault((seat.config, seat.runtime), []).append(seat)
        total = len(self.seats) + sum(map(len, self.left.values()))
        for seats in kinds.values():
            logger.info("eprt: %s", describe(seats, total))
        for reason, names in self.left.items():
            logger.info("eprt: %d of %d MoE layers are left to vLLM: %s", len(names), total, reason)
        logger.info(
            "eprt: ready after %s", ", ".join(f"{seconds:.1f} s {what}" for what, seconds in self.spent.items())
        )


def describe(seats: list[Seat], total: int) -> str:
    """One line on layers of one kind: where they run, how, and why so."""
    seat = seats[0]
    config, parallel, plan = seat.config, seat.world.parallel, seat.plan
    tp = f" (attention TP {parallel.attention_tp_size})" if parallel.attention_tp_size > 1 else ""
    named = f"{len(seats)} of {total} MoE layers ({seat.name} to {seats[-1].name})"
    placed = "" if seat.placement is None else f" on {seat.placement.num_slots} slots by the placement file"
    experts = f"{config.num_experts} experts{placed}"
    sizes = f"{experts}, top-{config.top_k}, {config.hidden_size} x {config.intermediate_size}"
    return (
        f"{named} over {parallel.world_size} ranks{tp}: {plan.dispatcher} + {plan.executor}, {config.weight_format}, "
        f"{sizes}, up to {seat.runtime.max_tokens_per_rank} tokens a rank. Why: {plan.reason}"
    )


def _world(ep: Any, tp: Any, sequence_parallel: bool) -> World:
    """vLLM's EP group, ranks in its order (dp, tp). Without sequence parallelism TP ranks hold the same tokens."""
    on_cpu = ep.device.type == "cpu"
    if on_cpu:
        torch.cpu._init_amx()  # vLLM's attention takes AMX tiles that only its own experts asked the kernel for
    shared_tokens = tp.world_size > 1 and not sequence_parallel
    tp_group = tp.cpu_group if on_cpu else tp.device_group
    world = World.from_group(
        ep.cpu_group if on_cpu else ep.device_group,
        ep.device,
        attention_tp_group=tp_group if shared_tokens else None,
        timeout_s=TIMEOUT_S,
    )
    teller = threading.Thread(target=_tell_who_is_lost, args=(world,), name="eprt-vllm", daemon=True)
    teller.start()
    let_tell = partial(_let_tell, world, teller)
    atexit.register(let_tell)
    Finalize(None, let_tell, exitpriority=1)  # vLLM's processes end without atexit; World's own, at 0, ends the guard
    return world


def _tell_who_is_lost(world: World) -> None:
    """Log the culprit as soon as it is known: vLLM may end this process before a call of its own raises RankLost."""
    while not world.closed and (guard := world._guard) is not None:
        if guard.verdict is not None:
            logger.error("eprt: %s", guard.verdict)
            return
        time.sleep(LOOK_S)


def _let_tell(world: World, teller: threading.Thread) -> None:
    """At exit: vLLM's own collective may fail, and end this process, before the guards have agreed on the culprit."""
    guard = world._guard
    if guard is not None and (guard.verdict is not None or guard.verdict_due):
        teller.join(EXIT_S)
