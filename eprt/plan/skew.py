"""Models a layer's time under skewed routing: the hottest rank sets the pace of dispatch, experts and combine.

It is the pair's time under even routing, measured or modelled, scaled by the model's ratio of the hottest rank's bytes,
rows and experts to an even share of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from eprt.config import MoEConfig, ParallelConfig
from eprt.dispatch import DISPATCHERS
from eprt.errors import UsageError
from eprt.experts import EXECUTORS
from eprt.placement import ExpertPlacement
from eprt.plan import Plan
from eprt.plan.model import Estimate, evenly, modelled_dispatch, modelled_experts, sent_by
from eprt.rounding import ceil_div
from eprt.support import Device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Demand:
    """The skew of one layer's routing on a placement, as shares of all of the world's tokens.

    Attributes:
        slots: [S] of the tokens that choose each slot.
        ranks: [EP ranks] of the tokens that choose any slot of each.
    """

    placement: ExpertPlacement
    slots: tuple[float, ...]
    ranks: tuple[float, ...]

    @classmethod
    def of_slots(cls, ids: torch.Tensor, placement: ExpertPlacement) -> Demand:
        """Counts [N, K] ids of slots, N > 0 (`SlotTable.slots_of`); those beyond the last are of no expert."""
        S, L, R = placement.num_slots, placement.num_local_experts, placement.parallel.ep_size
        slots = ids.long().clamp(0, S)
        ranks = (slots // L).sort(1).values  # no expert: R
        first = ranks.diff(dim=1, prepend=ranks[:, :1] - 1) != 0
        counts = slots.flatten().bincount(minlength=S)[:S], ranks[first].bincount(minlength=R)[:R]
        return cls(placement, *(tuple((count / len(ids)).tolist()) for count in counts))

    def of_rank(self, rank: int) -> tuple[float, ...]:
        """Returns [L] shares of an EP rank's slots."""
        L = self.placement.num_local_experts
        return self.slots[rank * L : (rank + 1) * L]

    @property
    def rows(self) -> tuple[float, ...]:
        """[EP ranks] (token, expert) pairs of each, for one token of the world."""
        return tuple(sum(self.of_rank(rank)) for rank in range(len(self.ranks)))

    @property
    def imbalance(self) -> float:
        """max / mean of the ranks' rows."""
        rows = self.rows
        return max(rows) * len(rows) / sum(rows) if sum(rows) else 1.0


@dataclass(frozen=True)
class LayerTime:
    """Microseconds of a layer's call, route and shared expert aside, by the rank that takes longest in each half.

    Attributes:
        dispatch: dispatch + combine.
        mean_experts: mean of the ranks, which the others wait for the slowest of.
        received_mb, hottest_mb: of dispatch + combine, from other ranks, in the mean and of the hottest rank.
        basis: how the even times are known: "measured", "modelled" or "assumed", the less certain half.
    """

    dispatch: float
    experts: float
    mean_experts: float
    received_mb: float
    hottest_mb: float
    basis: str

    @property
    def us(self) -> float:
        return self.dispatch + self.experts


def layer_time(
    plan: Plan, config: MoEConfig, parallel: ParallelConfig, device: Device, demand: Demand
) -> LayerTime | None:
    """Estimates the chosen pair's time under a demand; None where no model knows the pair (on a CPU).

    Args:
        plan: of this layer with experts in order, for as many tokens.
        config: the layer, in experts.

    Raises:
        UsageError: a demand for another layer or world.
    """
    placement, dispatch, experts = demand.placement, plan.chosen.dispatch, plan.chosen.experts
    if placement.num_experts != config.num_experts or placement.parallel.ep_size != parallel.ep_size:
        raise UsageError(
            f"a demand for {placement.num_experts} experts on {placement.parallel.ep_size} ranks: the layer has "
            f"{config.num_experts} on {parallel.ep_size}"
        )
    if dispatch is None or experts is None or not experts.parts or (dispatch.us and not dispatch.parts):
        return None  # not known, or measured where there is no model to scale by
    even = ExpertPlacement(config.num_experts, parallel).in_slots(config)
    rounds = ceil_div(plan.tokens, plan.max_tokens_per_rank)
    batch = even, parallel, ceil_div(plan.tokens, rounds), device
    received, dispatch_ratio = _received(plan, demand, *batch)
    by_rank = [experts.us * ratio for ratio in _expert_ratios(plan, demand, *batch)]
    return LayerTime(
        dispatch=dispatch.us * dispatch_ratio,
        experts=max(by_rank),
        mean_experts=sum(by_rank) / len(by_rank),
        received_mb=rounds * sum(received) / len(received),
        hottest_mb=rounds * max(received),
        basis=max((dispatch.basis, experts.basis), key=("measured", "modelled", "assumed").index),
    )


def _received(
    plan: Plan, demand: Demand, even: MoEConfig, parallel: ParallelConfig, tokens: int, device: Device
) -> tuple[list[float], float]:
    """Returns the MB that each rank receives, and the hottest rank's dispatch over that of uniform routing."""
    spec, payload = DISPATCHERS[plan.dispatcher], plan.payload or "bf16"
    shares = demand.rows if spec.sends == "expert" else demand.ranks
    *sent, even_sent = (sent_by(spec, even, parallel, tokens, device, payload, share) for share in (*shares, None))
    hottest, uniform = (modelled_dispatch(spec, each, device) for each in (sent[shares.index(max(shares))], even_sent))
    return [(each.link_bytes + each.network_bytes) / 1e6 for each in sent], _ratio(hottest, uniform)


def _expert_ratios(
    plan: Plan, demand: Demand, even: MoEConfig, parallel: ParallelConfig, tokens: int, device: Device
) -> list[float]:
    """Returns each rank's experts' time over that of uniform routing."""
    every, L = tokens * parallel.world_size, even.num_experts // parallel.ep_size
    ranks = [demand.of_rank(rank) for rank in range(len(demand.ranks))]
    # (experts that get any row, rows) of slots with these shares of the world's tokens.
    work = [(sum(1 - (1 - min(share, 1.0)) ** every for share in shares), every * sum(shares)) for shares in ranks]
    *times, uniform = (
        modelled_experts(EXECUTORS[plan.executor], even, parallel, hit, rows, device)
        for hit, rows in (*work, evenly(even, L, every))
    )
    return [_ratio(time, uniform) for time in times]


def _ratio(time: Estimate | None, uniform: Estimate | None) -> float:
    return time.us / uniform.us if time and uniform and uniform.us else 0.0
