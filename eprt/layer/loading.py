"""Puts new weights into a layer between two steps: the same tensors, so that graphs and descriptors stay valid."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from operator import index
from typing import TypeVar

import torch

from eprt.config import MoEConfig
from eprt.dispatch import Dispatcher, calibrated_scale
from eprt.errors import CapacityError, ConfigError, UsageError
from eprt.experts import Executor
from eprt.placement import ExpertPlacement, ExpertShard
from eprt.weights import ExpertWeights
from eprt.world import World
from eprt.world.agree import Header, exchange, shared_errors

T = TypeVar("T")


class ExpertLoading:
    """Knows whether a layer's experts are whole, and replaces them.

    Attributes:
        broken: why calls are refused until all experts were loaded, or "".
        order: `ExpertWeights.hidden_order`, on the world's device.
    """

    def __init__(self, world: World, config: MoEConfig, dispatcher: Dispatcher, order: torch.Tensor | None) -> None:
        self._world, self._config, self._dispatcher = world, config, dispatcher
        self.order = None if order is None else order.to(world.device)
        self.broken = ""

    def run(
        self,
        executor: Executor,
        weights: ExpertWeights | None,
        experts: Sequence[int] | None,
        placement: ExpertPlacement,
        agree: bool,
    ) -> None:
        """See `ExpertParallelMoE.load_experts`."""
        shard, before = placement.shard(self._world.rank), self.broken

        def plan() -> tuple[Sequence[int], ExpertWeights | None, list[int] | None]:
            self._require_idle()
            found = self._chosen(weights, experts, shard)
            executor.require_loadable(single=experts is not None)
            return found

        named, chosen, slots = self._on_all(plan, agree, 1)
        whole = self._brought_everywhere(named, placement) if agree else experts is None
        name = f"layer {self._dispatcher.layer}"
        # From here on: whoever is lost, and whatever fails, no call meets old and new experts.
        self.broken = f"{name} holds experts of a load that failed half way: load all of them before the next call"
        self._on_all(lambda: self._write(executor, chosen, slots), agree, 2)
        self.broken = "" if whole else before

    def _brought_everywhere(self, experts: Sequence[int], placement: ExpertPlacement) -> bool:
        """Returns whether the ranks together bring all experts. Collective.

        Raises:
            ConfigError: a rank that holds a replica, or a MoE-TP slice, of an expert doesn't bring it, and others do.
                The same on every rank.
        """
        E, L, parallel = placement.num_experts, placement.num_local_experts, placement.parallel
        own = torch.zeros(E, dtype=torch.uint8, device="cpu")
        own[list(experts)] = 1
        brought = self._world.gather_control(own).bool()
        held = torch.zeros(parallel.ep_size, E + 1, dtype=torch.bool, device="cpu")  # the last for empty slots
        rank = torch.arange(placement.num_slots, device="cpu") // L
        held[rank, torch.tensor(placement.slots, device="cpu")] = True
        lacking = held[:, :E].repeat_interleave(parallel.moe_tp_size, 0) & brought.any(0) & ~brought
        if lacking.any():
            expert = int(lacking.any(0).nonzero()[0])
            some, others = (of_rank[:, expert].nonzero().flatten().tolist() for of_rank in (brought, lacking))
            error = ConfigError(
                f"expert {expert} is brought by ranks {some}, and not by ranks {others}, which hold it: every rank "
                "that holds a replica or a slice of an expert (layer.placement) brings it, or none does"
            )
            error.shared = True
            raise error
        return bool(brought.any(0).all())

    def _on_all(self, work: Callable[[], T], agree: bool, part: int) -> T:
        """Does this rank's part of the work; if one rank's fails, all raise its error."""
        header = Header("load", self._dispatcher.layer, part)
        with shared_errors(self._world, header) if agree else nullcontext():
            try:
                done = work()
            except (torch.OutOfMemoryError, MemoryError) as found:
                rank = self._world.rank
                raise CapacityError(f"rank {rank} has no memory to prepare its experts anew: {found}") from found
        if agree:
            exchange(self._world, header)
        return done

    def _require_idle(self) -> None:
        """Raises UsageError."""
        self._world.require_open()
        self._world.require_whole("loading experts")
        if self._dispatcher.closed:
            raise UsageError(f"layer {self._dispatcher.layer} is closed: make it again")
        if self._world.current_step is not None:
            raise UsageError(f"load_experts inside step {self._world.current_step.number}: leave the step first")

    def _chosen(
        self, weights: ExpertWeights | None, experts: Sequence[int] | None, shard: ExpertShard
    ) -> tuple[Sequence[int], ExpertWeights | None, list[int] | None]:
        """Returns the numbers of the experts that this rank brings; of those that it holds, one for each slot to write;
        and those slots, None for all of them. Raises as `ExpertParallelMoE.load_experts`.
        """
        if not isinstance(weights, ExpertWeights | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"load_experts got {type(weights).__name__}: expected ExpertWeights, or None")
        if experts is None:
            if weights is None:
                raise ConfigError("load_experts got no weights, and isn't told of single experts: pass this rank's")
            self._require_like(weights, shard)
            return shard.experts, weights, None
        ids = self._numbers(experts)
        if (weights is None) != (not ids):
            some = "no" if weights is None else "some"
            raise ConfigError(f"{len(ids)} experts and {some} weights: pass both, or none of them")
        if weights is None:
            return ids, None, []
        self._require_like(weights, ExpertShard(len(ids), 0, len(ids), shard.moe_tp_rank, shard.moe_tp_size))
        rows = {expert: row for row, expert in enumerate(ids)}
        slots = [slot for slot, expert in enumerate(shard.experts) if expert in rows]
        picked = torch.tensor([rows[shard.experts[slot]] for slot in slots], dtype=torch.int64, device=weights.device)
        return ids, weights.map(lambda tensor: tensor[picked]) if slots else None, slots

    def _numbers(self, experts: object) -> list[int]:
        """Returns the experts' numbers. Raises ConfigError."""
        ids, known = list(experts) if isinstance(experts, Iterable) else [], list[int]()
        with suppress(TypeError):  # numpy's and torch's integers, too
            known = [index(e) for e in ids if not isinstance(e, bool)]
        known = [e for e in known if 0 <= e < self._config.num_experts]
        if not isinstance(experts, Iterable) or len({*known}) != len(ids):
            most = self._config.num_experts - 1
            raise ConfigError(f"experts {ids or experts}: expected different numbers of experts, from 0 to {most}")
        return known

    def _require_like(self, weights: ExpertWeights, shard: ExpertShard) -> None:
        """Raises ConfigError unless the weights are the shard's, and where tokens travel in an order of columns, or in
        NVFP4 with a scale, that they don't share."""
        weights.check(self._config, shard)
        held, new = (None if order is None else order.cpu() for order in (self.order, weights.hidden_order))
        if (held is None) != (new is None) or not (held is None or new is None or torch.equal(held, new)):
            raise ConfigError("hidden_order isn't that of the first weights: build the layer again with the new ones")
        scale, new_scale = self._dispatcher.payload_scale, calibrated_scale(weights)
        if scale is not None and new_scale is not None and float(new_scale) > float(scale):
            raise ConfigError(
                f"input_scale reaches {float(new_scale)}: tokens in NVFP4 have the {float(scale)} of the first "
                "weights; keep the scales, or build it again"
            )

    def _write(self, executor: Executor, weights: ExpertWeights | None, slots: list[int] | None) -> None:
        if weights is not None:
            executor.load_experts(weights, slots)
        self._world.finish_device_work()
