"""Balances experts while an engine serves: counts, plans and moves them between its steps.

Every rank takes part in every step, so equal counts of steps let all ranks count, plan and move at the same one without
asking. Plans are made of counts summed over all ranks, and are equal on all of them. Layers move one at a time, one a
step, so that no step waits long.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from eprt.balance import gather_load, imbalance, plan_placement, rank_loads, rebalance
from eprt.config import ParallelConfig
from eprt.errors import CapacityError, ConfigError, UnsupportedError
from eprt.integrations.engine.parameters import FallsBackToEngine
from eprt.layer import ExpertParallelMoE
from eprt.placement import EMPTY, ExpertPlacement
from eprt.rounding import ceil_div


@dataclass(frozen=True)
class BalanceConfig:
    """When experts are balanced, and with how many spare slots. The names are those of vLLM's `--eplb-config`.

    Attributes:
        window_size: steps whose choices count.
        step_interval: steps from one plan to the next, more while layers of the first still have to move; the first
            comes after a quarter of it.
        num_redundant_experts: slots beyond one for each expert, over all ranks.
        log_balancedness: log each plan, also where nothing moves.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False

    @classmethod
    def read(cls, given: object, where: str) -> BalanceConfig:
        """Reads an object of options. Raises ConfigError for other names or values."""
        fields: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {repr(given): None}
        if unknown := sorted(set(fields) - set(cls.__dataclass_fields__)):
            raise ConfigError(f"{where}: {unknown}: expected {', '.join(cls.__dataclass_fields__)}")
        for name, value in fields.items():
            least = 0 if name == "num_redundant_experts" else 1
            right, wanted = type(value) is int and value >= least, f"a number of at least {least}"
            if name == "log_balancedness":
                right, wanted = isinstance(value, bool), "true or false"
            if not right:
                raise ConfigError(f"{where}.{name}: {value!r}: expected {wanted}")
        return cls(**fields)

    def first_placement(self, num_experts: int, parallel: ParallelConfig) -> ExpertPlacement:
        """Returns each rank's experts in order, and its share of the spare slots, empty.

        Without spare slots two experts of the first rank change places: a layer in plain order couldn't move any.

        Raises:
            FallsBackToEngine: slots that don't divide by the ranks, or one expert a rank and no spare slot.
        """
        ranks = parallel.ep_size
        slots, rest = divmod(num_experts + self.num_redundant_experts, ranks)
        held = num_experts // ranks
        if rest or num_experts % ranks:
            raise FallsBackToEngine(
                f"{num_experts} experts and {self.num_redundant_experts} redundant ones don't divide by {ranks} ranks"
            )
        rows = [[*range(rank * held, (rank + 1) * held), *[EMPTY] * (slots - held)] for rank in range(ranks)]
        if slots == held:
            if held < 2:
                raise FallsBackToEngine(
                    f"{num_experts} experts on {ranks} ranks without redundant ones: nothing can be moved"
                )
            rows[0][:2] = rows[0][1], rows[0][0]
        return ExpertPlacement(num_experts, parallel, tuple(slot for row in rows for slot in row))


class Balancing:
    """One process's part of balancing.

    Args:
        logger: told what was planned, where `reports` is set.
    """

    def __init__(self, config: BalanceConfig, logger: logging.Logger) -> None:
        self.config, self._logger = config, logger
        self.reports = False
        self.moved = 0  # slots that changed their expert, over all layers
        interval = config.step_interval
        self._step = interval - ceil_div(interval, 4)
        self._moves: deque[tuple[ExpertParallelMoE, ExpertPlacement]] = deque()

    def before_step(self, layers: Sequence[ExpertParallelMoE]) -> None:
        """Counts a step that is about to begin, and moves a layer's experts if some are to move. Collective.

        Args:
            layers: that count their load, in the same order on every rank.

        Raises:
            WorldMismatch, RankLost: see `eprt.balance.rebalance`.
        """
        config = self.config
        if self._step >= config.step_interval and not self._moves:
            self._step = 0
            self._plan(layers)
        if self._step == max(0, config.step_interval - config.window_size):
            for layer in layers:
                layer.reset_load()
        self._step += 1
        if self._moves:
            layer, placement = self._moves.popleft()
            try:
                self.moved += rebalance(layer.world, [layer], [placement]).slots
            except (CapacityError, UnsupportedError) as error:  # on every rank, before anything moved
                self._moves.clear()
                self._logger.warning("eprt: experts stay where they lie until the next plan: %s", error)

    def _plan(self, layers: Sequence[ExpertParallelMoE]) -> None:
        before, after = [0.0], [0.0]
        for _, group in groupby(layers, key=lambda layer: (id(layer.world), layer.config.num_experts)):
            some = list(group)
            for layer, row in zip(some, gather_load(some[0].world, some).tolist(), strict=True):
                if not sum(row):
                    continue
                held = layer.placement
                plan = plan_placement(row, layer.world.parallel, held.num_slots, current=held)
                before.append(imbalance(rank_loads(row, held)))
                after.append(imbalance(rank_loads(row, plan)))
                if plan.slots != held.slots:
                    self._moves.append((layer, plan))
        if self.reports and (self._moves or self.config.log_balancedness):
            self._logger.info(
                "eprt: experts of %d of %d layers move, one layer a step: max / mean at worst %.2f -> %.2f",
                *(len(self._moves), len(layers), max(before), max(after)),
            )
