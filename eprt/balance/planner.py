"""Plans where replicas should lie, from counts: offline, deterministic, on the CPU.

An expert's load is shared evenly by its replicas (as prefill deals tokens out). Replicas go, one after the other, to
the expert whose replicas carry most; then the heaviest are put first, each into the emptiest host or NVLink domain and
there onto the emptiest rank, and the hottest rank trades with others while that helps. Against a placement that holds
now, the same balance is looked for with the fewest experts that travel.

A replica must earn its place: its weights are read in every call that gives it a row, which made a prefill layer 6 to
9% slower where 16 replicas cooled no rank. So the plan has the fewest replicas that leave the hottest rank about as
cool as one in every spare slot would, and the other slots stay empty; experts stay in order where that is as good.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Any

import numpy as np

from eprt.balance.matching import in_place, matched
from eprt.config import MAX_EXPERTS, ParallelConfig
from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.kinds import require_kinds
from eprt.placement import EMPTY, ExpertPlacement
from eprt.rounding import ceil_div

# How much hotter the hottest rank may stay than replicas in all slots make it, where fewer replicas do or fewer experts
# travel for it.
GOOD_ENOUGH = 1.02 * (1 + 1e-9)  # the same loads are summed in another order

PAIRS = 1 << 20  # of experts that are weighed against each other at a time


def plan_placement(
    counts: Sequence[int],
    parallel: ParallelConfig,
    num_slots: int,
    *,
    current: ExpertPlacement | None = None,
    domain_size: int | None = None,
) -> ExpertPlacement:
    """Returns a placement with the fewest replicas whose hottest rank gets as little as can be found, to 2%.

    Args:
        counts: [E] how often each expert is chosen; only their proportions count.
        num_slots: S, a multiple of the expert-parallel ranks; what exceeds E is for replicas. Slots whose replica
            would cool no rank that matters stay empty: all of them where the ranks are even without. No rank gets two
            replicas of one expert.
        current: what holds now, of as many slots; the plan then stays near it: the fewest experts that travel for the
            same balance. Replicas that aren't needed any more go, which moves nothing.
        domain_size: expert-parallel ranks that share a host or an NVLink domain: domains are balanced first, since what
            comes into one shares its links. None: those of a host, where a World knows it; fewer where hosts differ.

    Raises:
        ConfigError: too few slots, sizes that don't divide, counts that are none, or a `current` of another size.
    """
    require_kinds(plan_placement, locals())
    counts, ranks = numbers_of(counts, max(1, len(counts))), parallel.ep_size
    E = len(counts)
    if not E <= num_slots <= MAX_EXPERTS or num_slots % ranks:
        raise ConfigError(
            f"{num_slots} slots for {E} experts on {ranks} ranks: expected a multiple of {ranks}, {E} to {MAX_EXPERTS}"
        )
    if domain_size is None:
        on_host = max(1, (parallel.ranks_per_host or parallel.world_size) // parallel.moe_tp_size)
        domain_size = math.gcd(ranks, min(ranks, on_host))
    if domain_size < 1 or (domain_size < ranks and ranks % domain_size):
        raise ConfigError(f"domain_size {domain_size}: expected a divisor of the {ranks} expert-parallel ranks")
    plan, goal = _fewest_replicas(counts, parallel, num_slots, min(domain_size, ranks))
    if current is not None:
        found = current.num_experts, current.num_slots, current.parallel.ep_size
        if found != (E, num_slots, ranks):
            has = "current has {} experts in {} slots on {} ranks".format(*found)
            raise ConfigError(f"{has}: expected {E} in {num_slots} on {ranks}")
        plan = _nearest(plan, goal, current)
    return ExpertPlacement(E, parallel, tuple(chain.from_iterable(plan.held)))


def numbers_of(counts: Sequence[Any], num_experts: int) -> list[Any]:
    """Returns counts as Python's own numbers: a tensor's would be rounded to float32.

    Raises ConfigError unless there is one for each expert, finite and not negative.
    """
    numbers = [count.tolist() if hasattr(count, "tolist") else count for count in counts]
    wrong = [count for count in numbers if not isinstance(count, (int, float)) or not 0 <= count < math.inf]
    if len(numbers) != num_experts or wrong:
        found = f"counts of {len(numbers)} experts" + f", {shown(wrong[:1])} among them" * bool(wrong)
        raise ConfigError(f"{found}: expected one for each of {num_experts}, finite and none negative")
    return numbers


def _fewest_replicas(
    counts: Sequence[int], parallel: ParallelConfig, num_slots: int, domain_size: int
) -> tuple[_Slots, float]:
    """Returns the plan, and how hot its hottest rank may be.

    More replicas needn't be cooler, so bisection may miss the very fewest. Experts in order, and no replica at all, are
    tried first, and the result is checked.
    """
    ranks, most = parallel.ep_size, num_slots - len(counts)
    plan = _Slots.packed(counts, ranks, most, domain_size)
    plan.trade()
    goal = GOOD_ENOUGH * plan.hottest
    in_order = _Slots(counts, by_rank(ExpertPlacement(len(counts), parallel)), domain_size)
    if in_order.hottest <= goal:
        return in_order.filled_up(num_slots), min(goal, GOOD_ENOUGH * in_order.hottest)
    low, high, tried = 0, most, 0
    while low < high:
        fewer = _Slots.packed(counts, ranks, tried, domain_size)
        fewer.trade(goal)
        if fewer.hottest <= goal:
            plan, high = fewer, tried
        else:
            low = tried + 1
        tried = (low + high) // 2
    plan.trade()
    plan.thin(goal)
    return plan.filled_up(num_slots), min(goal, GOOD_ENOUGH * plan.hottest)  # fewer may be cooler


def _nearest(plan: _Slots, goal: float, current: ExpertPlacement) -> _Slots:
    """Chooses, of some ways from `current` to the goal, the one on which fewest experts travel.

    The goal is what holds now where that is cooler. A rank's second replica of an expert carries nothing, and goes.
    """
    once = [[EMPTY if expert in held[:i] else expert for i, expert in enumerate(held)] for held in by_rank(current)]
    now = _Slots(plan.counts, once, plan.domain_size)
    goal = min(goal, GOOD_ENOUGH * now.hottest)
    candidates = [plan.near(current)] if plan.hottest <= goal else []
    for replicas in (None, plan):  # from as many replicas of each expert as there are, and as the plan has
        kept = replace(now, held=[list(held) for held in once])
        if replicas is not None:
            kept.replicate(replicas)
        if kept.mend(goal):
            kept.thin(goal)
            candidates.append(kept)

    def travelling(way: _Slots) -> int:
        slots = chain.from_iterable(way.held)
        return sum(new not in (old, EMPTY) for new, old in zip(slots, current.slots, strict=True))

    return min(candidates, key=travelling)


def rank_loads(counts: Sequence[float], placement: ExpertPlacement) -> tuple[float, ...]:
    """Returns [ranks] the load of each expert-parallel rank by these counts, replicas sharing evenly.

    Raises:
        ConfigError: counts of another number of experts, or counts that are none.
    """
    require_kinds(rank_loads, locals())
    counts = numbers_of(counts, placement.num_experts)
    return tuple(_Slots(counts, by_rank(placement), placement.parallel.ep_size).loads)


def imbalance(loads: Sequence[float]) -> float:
    """Returns max / mean; 1 where nothing was counted."""
    require_kinds(imbalance, locals())
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


@dataclass
class _Slots:
    """The experts in each rank's slots, [ranks][L], with their loads.

    Attributes:
        share: [E] what one replica of each expert carries.
        loads: [ranks].
    """

    counts: Sequence[float]
    held: list[list[int]]
    domain_size: int

    def __post_init__(self) -> None:
        self._share_evenly()

    @classmethod
    def packed(cls, counts: Sequence[int], ranks: int, replicas: int, domain_size: int) -> _Slots:
        """Gives replicas to the heaviest experts, then places the heaviest replicas first, where it is emptiest.

        It takes no more slots per rank than needed, as a rank's time grows with its experts, too.
        """
        copies = [1] * len(counts)
        heaviest = [(-float(count), expert) for expert, count in enumerate(counts)] if ranks > 1 else []
        heapify(heaviest)
        for _ in range(min(replicas, (ranks - 1) * len(counts))):
            _, expert = heappop(heaviest)
            copies[expert] += 1
            if copies[expert] < ranks:
                heappush(heaviest, (-counts[expert] / copies[expert], expert))
        plan = cls(counts, [[] for _ in range(ranks)], domain_size)
        plan.share = [count / n for count, n in zip(counts, copies, strict=True)]
        L = ceil_div(len(counts) + replicas, ranks)
        for expert in sorted(range(len(counts)), key=lambda e: (-plan.share[e], -copies[e], e)):
            for _ in range(copies[expert]):
                plan._put(expert, L)
        return plan.filled_up(L * ranks)

    def filled_up(self, num_slots: int) -> _Slots:
        """Returns itself, with empty slots up to `num_slots`."""
        for held in self.held:
            held += [EMPTY] * (num_slots // len(self.held) - len(held))
        return self

    def _put(self, expert: int, L: int) -> None:
        size = self.domain_size
        in_domain = [sum(self.loads[start : start + size]) for start in range(0, len(self.held), size)]
        free = [rank for rank, held in enumerate(self.held) if len(held) < L]
        fresh = [rank for rank in free if self.held[rank][-1:] != [expert]]  # its replicas come one after the other
        if not fresh:  # a second replica on one rank would carry nothing: the slot stays empty, and the others share
            self.share[expert] = self.counts[expert] / max(1, sum(expert in held for held in self.held))
            self._sum()
            return
        rank = min(fresh, key=lambda r: (in_domain[r // size], self.loads[r], r))
        self.held[rank].append(expert)
        self.loads[rank] += self.share[expert]

    @property
    def hottest(self) -> float:
        return max(self.loads)

    def trade(self, goal: float = 0.0) -> None:
        """Trades experts between the hottest rank and another while that cools the hotter one, down to the goal.

        Does nothing where one replica alone is above the goal.
        """
        if goal and max(self.share) > goal:
            return
        for _ in range(sum(map(len, self.held))):
            hottest = self.hottest
            found = None if hottest <= goal else self._best_trade(self.loads.index(hottest))
            if found is None:
                return
            self._swap(*found[1:])

    def _best_trade(self, hot: int) -> tuple[float, int, int, int, int] | None:
        """Returns (hotter of the two afterwards, hot rank, its place, other rank, its place)."""
        best: tuple[float, int, int, int, int] | None = None
        limit = self.loads[hot] * (1 - 1e-9)
        for rank, held in enumerate(self.held):
            even = (self.loads[hot] + self.loads[rank]) / 2  # no trade of these two does better
            if rank == hot or even >= limit:
                continue
            mine, mine_carry = self._tradable(hot, held)
            theirs, theirs_carry = self._tradable(rank, self.held[hot])
            for start in range(0, len(mine), step := max(1, PAIRS // max(1, len(theirs)))):
                moved = (mine_carry[start : start + step, None] - theirs_carry).ravel()
                after = np.maximum(self.loads[hot] - moved, self.loads[rank] + moved)
                left = np.flatnonzero(after < limit)
                while left.size:
                    i, j = divmod(int(left[0]), len(theirs))
                    best = float(after[left[0]]), hot, mine[start + i], rank, theirs[j]
                    limit = best[0] * (1 - 1e-9)
                    left = left[after[left] < limit]
        return best

    def _tradable(self, rank: int, other: list[int]) -> tuple[list[int], np.ndarray]:
        """Returns the places of a rank's experts that `other` lacks, with what they carry, and its first empty one."""
        held, taken = self.held[rank], {*other} - {EMPTY}
        places = [place for place, expert in enumerate(held) if expert != EMPTY and expert not in taken]
        if EMPTY in held:
            insort(places, held.index(EMPTY))
        return places, np.array([0.0 if held[place] == EMPTY else self.share[held[place]] for place in places])

    def _swap(self, hot: int, i: int, rank: int, j: int) -> None:
        self.held[hot][i], self.held[rank][j] = self.held[rank][j], self.held[hot][i]
        self._sum()

    def mend(self, goal: float) -> bool:
        """Makes few changes, each the best that cools the hottest rank, until it is at the goal. False: it never is."""
        for _ in range(2 * sum(map(len, self.held))):
            hottest = self.hottest
            if hottest <= goal:
                return True
            hot = self.loads.index(hottest)
            copy, trade = self._best_copy(hot), self._best_trade(hot)
            # A copy costs one transfer, a trade two.
            if copy is not None and (trade is None or hottest - copy[0] >= (hottest - trade[0]) / 2):
                self._copy(*copy[1:])
            elif trade is not None:
                self._swap(*trade[1:])
            else:
                return False
        return False

    def thin(self, goal: float) -> None:
        """Drops replicas, first whichever is missed least, while the hottest rank stays at the goal."""
        while True:
            homes = self._homes()
            found = [
                (max(self._after_copy(homes, EMPTY, rank, expert)), rank, place)
                for rank, held in enumerate(self.held)
                for place, expert in enumerate(held)
                if expert != EMPTY and len(homes[expert]) > 1
            ]
            after, rank, place = min(found, default=(float("inf"), 0, 0))
            if after > goal:
                return
            self._copy(EMPTY, rank, place)

    def replicate(self, like: _Slots) -> None:
        """Takes as many replicas of each expert as `like` has.

        Surplus ones leave the hottest of their ranks; missing ones go to the coolest with an empty slot.
        """
        wanted = [len(homes) for homes in like._homes()]
        for expert, homes in enumerate(self._homes()):
            surplus = max(0, len(homes) - wanted[expert])
            for rank in sorted(homes, key=lambda r: -self.loads[r])[:surplus]:
                self._copy(EMPTY, rank, self.held[rank].index(expert))
        for expert in sorted(range(len(wanted)), key=lambda e: (-like.share[e], e)):
            for _ in range(wanted[expert] - sum(expert in held for held in self.held)):
                free = [rank for rank, held in enumerate(self.held) if EMPTY in held and expert not in held]
                if free:
                    rank = min(free, key=lambda r: self.loads[r])
                    self._copy(expert, rank, self.held[rank].index(EMPTY))

    def _best_copy(self, hot: int) -> tuple[float, int, int, int] | None:
        """Finds the best further replica of one of the hot rank's experts.

        Its slot is empty or holds a replica that isn't the only one. Returns (hottest load afterwards, expert, rank,
        place).
        """
        homes = self._homes()
        best: tuple[float, int, int, int] | None = None
        for rank, held in enumerate(self.held):
            for victim in dict.fromkeys(held):  # one empty slot is as good as another
                if rank == hot or (victim != EMPTY and len(homes[victim]) < 2):
                    continue
                for expert in dict.fromkeys(self.held[hot]):
                    if expert in (EMPTY, victim) or expert in held:
                        continue
                    after = max(self._after_copy(homes, expert, rank, victim))
                    if after < (best[0] if best else self.loads[hot]) * (1 - 1e-9):
                        best = after, expert, rank, held.index(victim)
        return best

    def _after_copy(self, homes: list[list[int]], expert: int, rank: int, victim: int) -> list[float]:
        """Returns [ranks] loads where `expert`, or EMPTY, takes `victim`'s place."""
        loads = list(self.loads)
        for changed, more in ((expert, 1), (victim, -1)):
            if changed != EMPTY:
                share = self.counts[changed] / (len(homes[changed]) + more)
                for home in homes[changed]:
                    loads[home] += share - self.share[changed]
                loads[rank] += more * share
        return loads

    def _copy(self, expert: int, rank: int, place: int) -> None:
        self.held[rank][place] = expert
        self._share_evenly()

    def _share_evenly(self) -> None:
        """Lets the replicas of each expert carry equal shares of its load."""
        self.share = [count / max(1, len(homes)) for count, homes in zip(self.counts, self._homes(), strict=True)]
        self._sum()

    def _sum(self) -> None:
        self.loads: list[float] = [sum(self.share[e] for e in held if e != EMPTY) for held in self.held]

    def _homes(self) -> list[list[int]]:
        """Returns [E] the ranks of each expert's replicas, one entry per replica."""
        homes: list[list[int]] = [[] for _ in self.counts]
        for rank, held in enumerate(self.held):
            for expert in held:
                if expert != EMPTY:
                    homes[expert].append(rank)
        return homes

    def near(self, current: ExpertPlacement) -> _Slots:
        """Puts the same shares on the ranks and in the slots where most lie already. Domains stay together."""
        now, size = by_rank(current), self.domain_size

        def overlap(mine: list[int], theirs: list[int]) -> int:
            return len((set(mine) & set(theirs)) - {EMPTY})

        domains = [list(range(start, start + size)) for start in range(0, len(now), size)]
        whole = [[list(chain.from_iterable(held[r] for r in d)) for d in domains] for held in (self.held, now)]
        target: dict[int, int] = {}
        for mine, theirs in matched([[overlap(a, b) for b in whole[1]] for a in whole[0]]):
            inner = [[overlap(self.held[a], now[b]) for b in domains[theirs]] for a in domains[mine]]
            target |= {domains[theirs][b]: domains[mine][a] for a, b in matched(inner)}
        return replace(self, held=[in_place(self.held[target[rank]], now[rank]) for rank in range(len(now))])


def by_rank(placement: ExpertPlacement) -> list[list[int]]:
    """Returns [ranks][L] the experts in each rank's slots."""
    L = placement.num_local_experts
    return [list(placement.slots[start : start + L]) for start in range(0, placement.num_slots, L)]
