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
from eprt.plan import Candidate, Plan
from eprt.plan.machines import linked_ranks
from eprt.plan.model import evenly, modelled_dispatch, modelled_experts, sent_by
from eprt.support import Device

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Demand:
    """The skew of one layer's routing on a placement, as shares of all of the world's tokens.

    Attributes:
        placement: where the experts lie.
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
        dispatch: there and back.
        mean_experts: mean of the ranks, which the others wait for the slowest of.
        received_mb, hottest_mb: there and back, from other ranks, in the mean and of the hottest rank.
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
    plan: Plan, config: MoEConfig, parallel: ParallelConfig, device: Device, demand: Demand, candidate: Candidate
) -> LayerTime | None:
    """Estimates a pair's time under a demand; None where nothing is known of it (a CPU without rows).

    Args:
        plan: of this layer with experts in order, for as many tokens; `candidate` is one of its.
        config: the layer, in experts.

    Raises:
        UsageError: a demand for another layer or world.
    """
    placement = demand.placement
    if placement.num_experts != config.num_experts or placement.parallel.ep_size != parallel.ep_size:
        raise UsageError(
            f"a demand for {placement.num_experts} experts on {placement.parallel.ep_size} ranks: the layer has "
            f"{config.num_experts} on {parallel.ep_size}"
        )
    if candidate.dispatch is None or candidate.experts is None:
        return None
    d, e = DISPATCHERS[candidate.dispatcher], EXECUTORS[candidate.executor]
    payload, rounds = plan.payload or "bf16", -(-plan.tokens // candidate.max_tokens_per_rank)
    tokens = -(-plan.tokens // rounds)
    in_order = ExpertPlacement(config.num_experts, parallel)
    even = in_order.in_slots(config)
    linked = linked_ranks(parallel, device)
    shares = demand.rows if d.sends == "expert" else demand.ranks

    def carried(share: float | None) -> float:
        found = modelled_dispatch(d, even, parallel, tokens, device, payload, share)
        return 0.0 if found is None else found.us

    def computed(hit: float, rows: float) -> float:
        found = modelled_experts(e, even, parallel, hit, rows, device)
        return 0.0 if found is None else found.us

    def received_mb(share: float) -> float:
        sent = sent_by(d, even, parallel, tokens, linked, payload, share)
        return rounds * (sent.link_bytes + sent.network_bytes) / 1e6

    every = tokens * parallel.world_size
    by_rank = [computed(*_work(demand.of_rank(rank), every)) for rank in range(len(demand.ranks))]
    expert_scale = _over(candidate.experts.us, computed(*evenly(even, in_order.num_local_experts, every)))
    dispatch_scale = _over(candidate.dispatch.us, carried(None)) if parallel.world_size > 1 else 0.0
    received = [received_mb(share) for share in shares]
    order = ("measured", "modelled", "assumed")
    return LayerTime(
        dispatch=dispatch_scale * carried(max(shares)),
        experts=expert_scale * max(by_rank),
        mean_experts=expert_scale * sum(by_rank) / len(by_rank),
        received_mb=sum(received) / len(received),
        hottest_mb=max(received),
        basis=max((candidate.dispatch.basis, candidate.experts.basis), key=order.index),
    )


def _work(shares: tuple[float, ...], tokens: int) -> tuple[float, float]:
    """Returns (experts that get any row, rows) of slots with these shares of the world's tokens."""
    return sum(1 - (1 - min(share, 1.0)) ** tokens for share in shares), tokens * sum(shares)


def _over(us: float, modelled: float) -> float:
    return us / modelled if modelled else 0.0
