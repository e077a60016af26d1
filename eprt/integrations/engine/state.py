"""This process's share of a plugin: its Worlds, its layers, their one warm-up, and what the log says of them."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.errors import ConfigError, UsageError
from eprt.integrations.engine.balancing import Balancing
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.integrations.engine.ranks import redistribute
from eprt.integrations.engine.settings import (
    PLACEMENT,
    STRICT,
    choose,
    placement_of,
    read_placements,
    with_low_precision,
)
from eprt.layer import ExpertParallelMoE
from eprt.placement import ExpertPlacement
from eprt.plan import Plan
from eprt.support import Device
from eprt.weights import ExpertWeights
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of

T = TypeVar("T")
# How the ranks of a layer's world come by their tokens; "local": each rank is a world of its own.
Sharing = Literal["own tokens", "same tokens", "local"]


@dataclass(frozen=True)
class LayerBinding:
    """Says where and how one layer runs. It is decided when the engine makes the layer, before any weight is loaded.

    Attributes:
        name: the engine's name of the layer.
        expert_parallel: False: no world goes beyond this rank, and the engine sums what the ranks compute.
        parts: ranks whose outputs the engine sums where the layer isn't expert-parallel.
        number: counts the layers of this process from 0.
        placement: None where experts lie as the engine loads them, in order.
    """

    name: str
    number: int
    config: MoEConfig
    world: World
    runtime: RuntimeConfig
    plan: Plan
    placement: ExpertPlacement | None = None
    expert_parallel: bool = True
    parts: int = 1


@dataclass
class EngineState:
    """The state that all layers of one process share; a child for each engine reads the engine's own configuration.

    Attributes:
        worlds: one World for each `sharing` of tokens that layers need.
        plans: one plan per kind of layer.
        bindings: one per layer that eprt runs.
        fallbacks: reason -> names of the layers that the engine runs itself.
        built: the layers themselves.
        cold: those that were built and not yet warmed up.
        balancing: what moves experts between steps, or None.
        unfinished: each `BoundLayer` whose new weights are still in the engine's parameters.
        loading: held by the thread that makes room for new weights; some models load with several.
        spent: seconds of the start-up per purpose, since the last report.
        reported: lengths of these lists when they were reported last.
        unfit: why no layer can run in this engine at all, or "".
    """

    engine: ClassVar[str]  # its name in messages
    logger: ClassVar[logging.Logger]  # below the engine's own, so that its handlers print these lines
    eager_flag: ClassVar[str]  # the engine's flag against CUDA graphs

    worlds: dict[Sharing, World] = field(default_factory=dict)
    plans: dict[tuple[Any, ...], tuple[Plan, RuntimeConfig]] = field(default_factory=dict)
    bindings: list[LayerBinding] = field(default_factory=list)
    fallbacks: dict[str, list[str]] = field(default_factory=dict)
    built: list[ExpertParallelMoE] = field(default_factory=list)
    cold: list[ExpertParallelMoE] = field(default_factory=list)
    balancing: Balancing | None = None
    unfinished: list[Any] = field(default_factory=list)
    loading: Any = field(default_factory=threading.RLock)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reported: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    unfit: str = ""

    def forget(self) -> None:
        """Lets go of what an earlier engine of this process had: its ranks, its settings, and its layers' memory."""
        read_placements.cache_clear()
        for each in fields(self):
            if each.default_factory is not MISSING:
                setattr(self, each.name, each.default_factory())

    def given(self) -> dict[str, Any]:
        """Returns the plugin's options as the user gave them. Raises ConfigError for bad ones."""
        raise NotImplementedError

    def makes_draft(self) -> bool:
        """Returns whether the model that is being made is a draft of another."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Returns the plugin's options; a placement file is the model's, not its draft's. Raises ConfigError."""
        given = self.given()
        return {name: given[name] for name in given if name != PLACEMENT} if self.makes_draft() else given

    def make_world(self, sharing: Sharing) -> World:
        """Makes a World of the engine's ranks. Collective."""
        raise NotImplementedError

    def reports(self) -> bool:
        """Returns whether this rank writes the report to the log."""
        raise NotImplementedError

    def bind_layer(
        self, name: str, config: MoEConfig, sharing: Sharing, parts: int, runtime: RuntimeConfig, *, captured: bool
    ) -> LayerBinding:
        """Binds a layer. Collective for the first of its kind. Raises FallsBackToEngine, ConfigError, RankLost.

        Args:
            runtime: settings with the engine's limit as capacity.
            captured: the engine may capture the layer in CUDA graphs.
        """
        if sharing not in self.worlds:
            with self._timed("to meet"):
                self.worlds[sharing] = self.make_world(sharing)
        world, options = self.worlds[sharing], self.options()
        placement = placement_of(options, name, config.num_experts, world.parallel)
        balanced = self.balancing is not None and sharing != "local"
        if self.balancing is not None and balanced and (placement is None or placement.is_identity):
            placement = self.balancing.config.first_placement(config.num_experts, world.parallel)
        key = config, sharing, placement
        if key not in self.plans:
            runtime = with_low_precision(config, runtime, options)
            runtime = replace(runtime, count_load=runtime.count_load or balanced)
            given = config, world.parallel, runtime, Device.of(world.device), placement
            self.plans[key] = choose(*given, captured=captured, eager_flag=self.eager_flag)
        plan, runtime = self.plans[key]
        how = placement, sharing != "local", parts
        self.bindings.append(LayerBinding(name, len(self.bindings), config, world, runtime, plan, *how))
        return self.bindings[-1]

    def require_fit(self) -> None:
        """Raises FallsBackToEngine where no layer can run in this engine at all."""
        if self.unfit:
            raise FallsBackToEngine(self.unfit)

    def fall_back(self, name: str, reason: str) -> None:
        """Notes a layer that stays with the engine; each reason is logged once, when it first occurs.

        Raises:
            ConfigError: the options say `strict`.
        """
        if self.options().get(STRICT):
            raise ConfigError(f"eprt: {name} would fall back to {self.engine}, and eprt.{STRICT} is set: {reason}")
        if reason not in self.fallbacks:
            unbalanced = "" if self.balancing is None else "; nothing balances their experts"
            self.logger.warning(
                "eprt: %s and layers like it fall back to %s: %s%s", name, self.engine, reason, unbalanced
            )
        self.fallbacks.setdefault(reason, []).append(name)

    def build(self, binding: LayerBinding, experts: ExpertWeights) -> ExpertParallelMoE:
        """Builds the layer. Collective. Raises ConfigError, UnsupportedError, RankLost."""
        config, world, placement = binding.config, binding.world, binding.placement
        with self._timed("to build the layers"):
            if placement is not None:
                found = {"placement": placement.fingerprint()}  # before ranks with other files send other sizes
                header = Header("build", binding.number, 2, fingerprint=fingerprint_of(found), settings=found)
                exchange(world, header)
                experts = redistribute(world, experts, placement)
            layer = ExpertParallelMoE(
                config,
                world,
                experts,
                runtime=binding.runtime,
                layer=binding.number,
                placement=placement,
            )
        layer.start_compiling(self.built)  # while the engine loads and compiles what is its own
        self.built.append(layer)
        self.cold.append(layer)
        return layer

    def before_step(self, *, forward: bool = True) -> None:
        """Brings new weights into their layers before the engine's next step, of calls or of a graph's replay, and
        moves experts. Collective while experts are balanced.

        Args:
            forward: whether all ranks run the model in this step.

        Raises:
            CheckpointError: new weights of which some experts lack a part.
            UsageError: a layer whose new weights came in part.
        """
        for bound in tuple(self.unfinished):
            bound.finish()
        if broken := next((layer.broken for layer in self.built if layer.broken), ""):
            raise UsageError(broken)
        if self.balancing is not None and forward and self.built and not self.cold:
            self.balancing.before_step([layer for layer in self.built if layer.dispatcher.runtime.count_load])

    def warm(self) -> None:
        """Compiles, tunes and allocates for all layers at once. Collective.

        The first call of any layer comes here. By then the whole model is loaded, drafts included, and the call is
        one in which every rank takes part.
        """
        layers, self.cold = self.cold, []
        with self._timed("of warm-up for all layers"):
            for world in self.worlds.values():
                own = [layer for layer in layers if layer.world is world]
                if not own:
                    continue
                if world.device.type == "cuda":
                    if torch.cuda.is_current_stream_capturing():
                        raise UsageError("the first call of these layers is inside a CUDA graph capture: report this")
                    torch.cuda.empty_cache()  # what the engine's copies of the experts took
                world.warmup(*own)
        if self.reports():
            self.report()
            if self.balancing is not None:
                self.balancing.reports = any(binding.expert_parallel for binding in self.bindings)

    @contextmanager
    def _timed(self, purpose: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.spent[purpose] += time.monotonic() - started

    def report(self) -> None:
        """Writes to the log which layers run where, and why: those that came since the last report, of a draft say."""
        bindings, built = self._unreported("bindings", self.bindings), self._unreported("built", self.built)
        fallbacks = {
            reason: new for reason, names in self.fallbacks.items() if (new := self._unreported(reason, names))
        }
        kinds: dict[tuple[Any, ...], list[LayerBinding]] = {}
        for binding in bindings:
            kinds.setdefault((binding.config, binding.runtime), []).append(binding)
        total = len(bindings) + sum(map(len, fallbacks.values()))
        for some in kinds.values():
            self.logger.info("eprt: %s", describe(some, total, balanced=self.balancing is not None))
        if count := sum(layer.router is not None for layer in built):
            self.logger.info("eprt: of %d layers the gate and the choice of experts are eprt's, too", count)
        if self.balancing is not None and not any(binding.expert_parallel for binding in self.bindings):
            self.logger.warning("eprt: nothing balances experts: no layer spreads them over ranks")
        for reason, names in fallbacks.items():
            self.logger.info("eprt: %d of %d MoE layers fall back to %s: %s", len(names), total, self.engine, reason)
        if self.spent:
            spent = ", ".join(f"{seconds:.1f} s {purpose}" for purpose, seconds in self.spent.items())
            self.logger.info("eprt: ready after %s", spent)
            self.spent.clear()

    def _unreported(self, name: str, found: list[T]) -> list[T]:
        """Returns what a list has that it had not at the last report, of which this is part."""
        begin, self.reported[name] = self.reported[name], len(found)
        return found[begin:]


def describe(bindings: list[LayerBinding], total: int, *, balanced: bool = False) -> str:
    """Returns one line for layers of one kind: where they run, how, and why so."""
    first = bindings[0]
    config, parallel, plan = first.config, first.world.parallel, first.plan
    ranks = "on this rank alone" if first.parts == 1 else f"on one of {first.parts} ranks whose outputs are summed"
    if parallel.world_size > 1:
        attention = f" (attention TP {parallel.attention_tp_size})" if parallel.attention_tp_size > 1 else ""
        ranks = f"over {parallel.world_size} ranks{attention}"
    named = f"{len(bindings)} of {total} MoE layers ({first.name} to {bindings[-1].name})"
    why = "balanced" if balanced and first.expert_parallel else "by the placement file"
    placed = "" if first.placement is None else f" on {first.placement.num_slots} slots {why}"
    return (
        f"{named} {ranks}: {plan.dispatcher} + {plan.executor}, {config.weight_format}, "
        f"{config.num_experts} experts{placed}, top-{config.top_k}, {config.hidden_size} x {config.intermediate_size}, "
        f"up to {first.runtime.max_tokens_per_rank} tokens per rank. Why: {plan.reason}"
    )
