"""Weighs replicas: the time of the hottest rank's experts before and after, against memory and the moving.

Experts' times are the plan's model's of an executor (`modelled`). Transport isn't in them; `eprt bench dispatch
--simulate` has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from eprt.balance.planner import by_rank, imbalance, numbers_of
from eprt.config import MoEConfig, ParallelConfig
from eprt.errors import ConfigError
from eprt.experts import executor_spec
from eprt.kinds import require_kinds
from eprt.placement import EMPTY, ExpertPlacement, chosen_slots
from eprt.plan.model import WEIGHT_BYTES, expert_values, modelled_experts
from eprt.support import Device

LINK_BYTES_PER_S = 375e9  # what NVLink (NV18) brought one rank in our own runs
WORTH = 0.02  # of the experts' time: below that a gain is less than what runs differ by

RankTime = Callable[[float, float], float]  # (rows, experts that got any) of one rank -> seconds of its experts


def expert_bytes(config: MoEConfig, moe_tp_size: int = 1) -> int:
    """Returns bytes of one expert's matrices on one rank, unpadded."""
    return round(expert_values(config) * WEIGHT_BYTES[config.weight_format] / moe_tp_size)


def modelled(config: MoEConfig, parallel: ParallelConfig, executor: str, device: Device) -> RankTime:
    """Returns the time by the plan's cost model. Raises ConfigError for an unknown device or executor."""
    require_kinds(modelled, locals())
    spec = executor_spec(executor)

    def seconds(rows: float, experts: float) -> float:
        found = modelled_experts(spec, config, parallel, experts, rows, device)
        if found is None:
            raise ConfigError(f"nothing is known of times on {device}: expected a GPU, sm90 or another")
        return found.us / 1e6

    seconds(1.0, 1.0)  # refused now, not at the first layer
    return seconds


@dataclass(frozen=True)
class Verdict:
    """The gain and the cost of a placement for one layer.

    Attributes:
        imbalance_before, imbalance_after: max / mean of the rows that ranks get.
        before_s, after_s: experts' time of the slowest rank in one call.
        more_bytes: what a rank holds more than before, of this layer.
        move_s: time to bring the experts to their new slots, by the rank that receives most.
    """

    imbalance_before: float
    imbalance_after: float
    before_s: float
    after_s: float
    more_bytes: int
    move_s: float

    @property
    def gain(self) -> float:
        """The share of the experts' time that is saved, 0 to 1; negative where it gets slower."""
        return 1 - self.after_s / self.before_s

    @property
    def pays(self) -> bool:
        return self.gain >= WORTH

    @property
    def break_even_calls(self) -> float:
        """Calls of the layer until the moving is paid for."""
        saved = self.before_s - self.after_s
        return self.move_s / saved if saved > 0 else float("inf")


def weigh(
    config: MoEConfig,
    counts: Sequence[int],
    before: ExpertPlacement,
    after: ExpertPlacement,
    tokens: int,
    *,
    one_replica: bool = False,
    time: RankTime,
) -> Verdict:
    """Compares two placements of one layer.

    Args:
        counts: [E] how often each expert was chosen.
        tokens: of one rank, in one call.
        one_replica: each expert's tokens go to one of its replicas, as decode does; else they are shared evenly.

    Raises:
        ConfigError: counts or placements of another number of experts, placements on different ranks, or counts that
            are none.
    """
    require_kinds(weigh, locals())
    sizes = {(each.num_experts, each.parallel.ep_size) for each in (before, after)}
    if sizes != {(config.num_experts, before.parallel.ep_size)}:
        found = f"placements of (experts, ranks) {sorted(sizes)}"
        raise ConfigError(f"{found}: expected two of one size, for the layer's {config.num_experts} experts")
    counts = numbers_of(counts, config.num_experts)
    size = expert_bytes(config, before.parallel.moe_tp_size)
    rows = tokens * before.parallel.world_size * config.top_k  # each rank sends tokens of its own
    old, new = (_loaded(counts, placement, rows, one_replica, time) for placement in (before, after))
    extra = (after.num_local_experts - before.num_local_experts) * size
    return Verdict(old[0], new[0], old[1], new[1], extra, _received(before, after) * size / LINK_BYTES_PER_S)


def _loaded(
    counts: Sequence[int], placement: ExpertPlacement, rows: int, one_replica: bool, time: RankTime
) -> tuple[float, float]:
    """Returns max / mean of the ranks' rows, and the slowest rank's time."""
    total, L = max(1, sum(counts)), placement.num_local_experts
    homes = chosen_slots(placement) if one_replica else placement.replicas
    found = [0.0] * placement.num_slots
    for count, slots in zip(counts, homes, strict=True):
        for slot in slots:
            found[slot] = rows * count / total / len(slots)
    ranks = [found[start : start + L] for start in range(0, len(found), L)]
    # A slot that gets n rows on average gets none with probability exp(-n) (Poisson).
    slowest = max(time(sum(slots), sum(1 - math.exp(-n) for n in slots)) for slots in ranks)
    return imbalance([sum(slots) for slots in ranks]), slowest


def _received(before: ExpertPlacement, after: ExpertPlacement) -> int:
    """Returns most experts that one rank has to receive from another."""
    ways = zip(by_rank(before), by_rank(after), strict=True)
    return max(sum(expert not in (*held, EMPTY) for expert in wanted) for held, wanted in ways)
