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
from typing import Any, Literal

import torch

from eprt.config import MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import ConfigError, UsageError
from eprt.integrations.vllm.parameters import FallsBackToVllm
from eprt.integrations.vllm.placement import placement_of, redistribute
from eprt.integrations.vllm.supported import (
    OPTIONS,
    STRICT,
    captures_graphs,
    choose,
    options_of,
    require_supported,
    runtime_config,
    with_low_precision,
)
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import Plan
from eprt.weights import ExpertWeights
from eprt.world import World
from eprt.world.collectives import Membership

logger = logging.getLogger("vllm.eprt")  # below vLLM's own, so that its handlers print these lines
POLL_S = 0.05  # vLLM ends this process a moment after another rank has died
EXIT_S = 0.8  # longer than the guards need, from a closed connection to the verdict
TIMEOUT_S = 600.0  # the first start of a model compiles; vLLM's own start-up waits as long

# How the ranks of a layer's world come by their tokens; "local": each rank is a world of its own.
Sharing = Literal["own tokens", "same tokens", "local"]


@dataclass(frozen=True)
class LayerBinding:
    """Says where and how one vLLM layer runs. It is decided when vLLM makes the layer, before any weight is loaded.

    Attributes:
        name: vLLM's name of the layer.
        expert_parallel: False: each rank holds its part of every expert's rows, and no world goes beyond it.
        tp_size: ranks that share every expert's rows.
        number: counts the layers of this process from 0.
        placement: None where experts lie as vLLM loads them, in order.
    """

    name: str
    number: int
    config: MoEConfig
    world: World
    runtime: RuntimeConfig
    plan: Plan
    placement: ExpertPlacement | None = None
    expert_parallel: bool = True
    tp_size: int = 1


@dataclass
class PluginState:
    """The state that all layers of one process share.

    Attributes:
        worlds: one World for each `sharing` of tokens that layers need.
        plans: one plan per kind of layer.
        bindings: one per layer that eprt runs.
        fallbacks: reason -> names of the layers that vLLM runs itself.
        cold: layers that were built and not yet warmed up.
        spent: seconds of the start-up per purpose.
        unfit: why no layer can run in this vLLM at all, or "".
    """

    worlds: dict[Sharing, World] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], tuple[Plan, RuntimeConfig]] = field(default_factory=dict)
    bindings: list[LayerBinding] = field(default_factory=list)
    fallbacks: dict[str, list[str]] = field(default_factory=dict)
    cold: list[ExpertParallelMoE] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    unfit: str = ""

    def require_supported(self, parallel: Any) -> None:
        """Raises FallsBackToVllm where no layer that is split as `parallel` says can run under vLLM's configuration."""
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_ep_group

        if self.unfit:
            raise FallsBackToVllm(self.unfit)
        require_supported(get_current_vllm_config(), get_ep_group().device.type, parallel)

    def bind(self, name: str, config: MoEConfig, moe: Any) -> LayerBinding:
        """Binds a layer. Collective for the first of its kind. Raises FallsBackToVllm, ConfigError, RankLost.

        Args:
            moe: vLLM's FusedMoEConfig.
        """
        from vllm.config import get_current_vllm_config
        from vllm.distributed import get_ep_group, get_tp_group

        vllm_config, sharing = get_current_vllm_config(), sharing_of(moe)
        if sharing not in self.worlds:
            with self._timed("to meet"):
                self.worlds[sharing] = make_world(get_ep_group(), get_tp_group(), sharing)
        world = self.worlds[sharing]
        options = options_of(vllm_config)
        placement = placement_of(options, name, config.num_experts, world)
        key = config, sharing, placement
        if key not in self.plans:
            senders = 1 if sharing == "local" else get_tp_group().world_size
            runtime = with_low_precision(config, runtime_config(vllm_config, senders), options)
            captured = captures_graphs(vllm_config)
            self.plans[key] = choose(config, world, runtime, placement, captured=captured)
        plan, runtime = self.plans[key]
        how = placement, sharing != "local", moe.tp_size
        self.bindings.append(LayerBinding(name, len(self.bindings), config, world, runtime, plan, *how))
        return self.bindings[-1]

    def fall_back(self, name: str, reason: str) -> None:
        """Notes a layer that stays with vLLM; each reason is logged once, when it first occurs.

        Raises:
            ConfigError: the options say `strict`.
        """
        from vllm.config import get_current_vllm_config

        if options_of(get_current_vllm_config()).get(STRICT):
            raise ConfigError(f"eprt: {name} would fall back to vLLM, and {OPTIONS}.{STRICT} is set: {reason}")
        if reason not in self.fallbacks:
            logger.warning("eprt: %s and layers like it fall back to vLLM: %s", name, reason)
        self.fallbacks.setdefault(reason, []).append(name)

    def build(self, binding: LayerBinding, experts: ExpertWeights) -> ExpertParallelMoE:
        """Builds the layer. Collective. Raises ConfigError, UnsupportedError, RankLost."""
        config, world, placement = binding.config, binding.world, binding.placement
        with self._timed("to build the layers"):
            if placement is not None:
                experts = redistribute(world, experts, placement)
            layer = ExpertParallelMoE(
                config, world, experts, runtime=binding.runtime, layer=binding.number, placement=placement
            )
        self.cold.append(layer)
        return layer

    def warm(self) -> None:
        """Compiles, tunes and allocates for all layers at once. Collective.

        The first call of any layer comes here. It is in vLLM's profile run, when the whole model is loaded (drafts,
        too) and every rank takes part.
        """
        from vllm.distributed import get_ep_group

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
        if get_ep_group().rank_in_group == 0:
            self._report()

    @contextmanager
    def _timed(self, purpose: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.spent[purpose] += time.monotonic() - started

    def _report(self) -> None:
        kinds: dict[tuple[Any, ...], list[LayerBinding]] = {}
        for binding in self.bindings:
            kinds.setdefault((binding.config, binding.runtime), []).append(binding)
        total = len(self.bindings) + sum(map(len, self.fallbacks.values()))
        for bindings in kinds.values():
            logger.info("eprt: %s", describe(bindings, total))
        for reason, names in self.fallbacks.items():
            logger.info("eprt: %d of %d MoE layers fall back to vLLM: %s", len(names), total, reason)
        logger.info(
            "eprt: ready after %s", ", ".join(f"{seconds:.1f} s {purpose}" for purpose, seconds in self.spent.items())
        )


def describe(bindings: list[LayerBinding], total: int) -> str:
    """Returns one line for layers of one kind: where they run, how, and why so."""
    first = bindings[0]
    config, parallel, plan = first.config, first.world.parallel, first.plan
    ranks = f"over {parallel.world_size} ranks"
    if not first.expert_parallel:
        ranks = "on this rank alone" if first.tp_size == 1 else f"on one of {first.tp_size} tensor-parallel parts"
    elif parallel.attention_tp_size > 1:
        ranks += f" (attention TP {parallel.attention_tp_size})"
    named = f"{len(bindings)} of {total} MoE layers ({first.name} to {bindings[-1].name})"
    placed = "" if first.placement is None else f" on {first.placement.num_slots} slots by the placement file"
    return (
        f"{named} {ranks}: {plan.dispatcher} + {plan.executor}, {config.weight_format}, "
        f"{config.num_experts} experts{placed}, top-{config.top_k}, {config.hidden_size} x {config.intermediate_size}, "
        f"up to {first.runtime.max_tokens_per_rank} tokens per rank. Why: {plan.reason}"
    )


def sharing_of(moe: Any) -> Sharing:
    """Returns who takes part in a layer with this FusedMoEConfig."""
    if not moe.moe_parallel_config.use_ep:
        return "local"
    return "own tokens" if moe.is_sequence_parallel else "same tokens"


def make_world(ep: Any, tp: Any, sharing: Sharing) -> World:
    """Makes a World of vLLM's EP group, ranks in its order (dp, tp), and lets it report lost ranks. Collective.

    A local World has this rank alone: vLLM sums what the ranks of its TP group compute.
    """
    on_cpu = ep.device.type == "cpu"
    if on_cpu:
        torch.cpu._init_amx()  # vLLM's attention takes AMX tiles that only its own experts asked the kernel for
    if sharing == "local":
        return World(Membership(0, 1, ep.device, ParallelConfig()), TIMEOUT_S)
    shared_tokens = tp.world_size > 1 and sharing == "same tokens"
    tp_group = tp.cpu_group if on_cpu else tp.device_group
    world = World.from_group(
        ep.cpu_group if on_cpu else ep.device_group,
        ep.device,
        attention_tp_group=tp_group if shared_tokens else None,
        timeout_s=TIMEOUT_S,
    )
    reporter = threading.Thread(target=_report_failure, args=(world,), name="eprt-vllm", daemon=True)
    reporter.start()
    at_exit = partial(_await_verdict, world, reporter)
    atexit.register(at_exit)
    Finalize(None, at_exit, exitpriority=1)  # vLLM's processes end without atexit; World's own, at 0, ends the guard
    return world


def _report_failure(world: World) -> None:
    """Logs the lost rank as soon as it is known: vLLM may end this process before a call of its own raises RankLost."""
    while not world.closed and (guard := world._guard) is not None:
        if guard.verdict is not None:
            logger.error("eprt: %s", guard.verdict)
            return
        time.sleep(POLL_S)


def _await_verdict(world: World, reporter: threading.Thread) -> None:
    """Gives the guards time to agree at exit: vLLM's own collective may fail, and end this process, before that."""
    guard = world._guard
    if guard is not None and (guard.verdict is not None or guard.verdict_due):
        reporter.join(EXIT_S)
