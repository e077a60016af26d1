"""Where replicas should lie, from counts: offline, deterministic, plain Python.

An expert's load is shared evenly by its replicas (as prefill deals tokens out). Replicas go, one after the other, to
the expert whose replicas carry most; then the heaviest are put first, each into the emptiest host or NVLink domain and
there onto the emptiest rank, and the hottest rank trades with others while that helps. Against a placement that holds
now, the same balance is looked for with the fewest experts that travel.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from eprt.config import ParallelConfig
from eprt.errors import ConfigError
from eprt.placement import EMPTY, ExpertPlacement

GOOD_ENOUGH = 1.02  # how much hotter the hottest rank may stay where fewer experts travel for it


def plan_placement(
    counts: Sequence[int],
    parallel: ParallelConfig,
    num_slots: int,
    *,
    current: ExpertPlacement | None = None,
    domain_size: int | None = None,
) -> ExpertPlacement:
    """A placement whose hottest rank gets as little as can be found.

    Args:
        counts: [E] how often each expert is chosen; only their proportions count.
        num_slots: S, a multiple of the expert-parallel ranks; what exceeds E is for replicas. No rank gets two
            replicas of one expert: slots that would only hold such ones stay empty.
        current: what holds now, of as many slots; the plan then stays near it.
        domain_size: expert-parallel ranks that share a host or an NVLink domain: domains are balanced first, since what
            comes into one shares its links. None: those of a host, where a World knows it.

    Raises:
        ConfigError: too few slots, sizes that don't divide, counts that are none, or a `current` of another size.
    """
    E, ranks = len(counts), parallel.ep_size
    if E < 1 or any(count < 0 for count in counts):
        raise ConfigError(f"counts of {E} experts, smallest {min(counts, default=0)}: expected [E], none negative")
    if num_slots < E or num_slots % ranks:
        raise ConfigError(
            f"{num_slots} slots for {E} experts on {ranks} ranks: expected a multiple of {ranks}, at least {E}"
        )
    if domain_size is None:
        domain_size = max(1, (parallel.ranks_per_host or parallel.world_size) // parallel.moe_tp_size)
    if domain_size < 1 or (domain_size < ranks and ranks % domain_size):
        raise ConfigError(f"domain_size {domain_size}: expected a divisor of the {ranks} expert-parallel ranks")
    plan = _Slots.packed(counts, ranks, num_slots // ranks, min(domain_size, ranks))
    plan.trade()
    if current is None:
        return ExpertPlacement(E, parallel, plan.flat())
    if (current.num_experts, current.num_slots, current.parallel.ep_size) != (E, num_slots, ranks):
        raise ConfigError(
            f"current has {current.num_experts} experts in {current.num_slots} slots on {current.parallel.ep_size} "
            f"ranks: expected {E} in {num_slots} on {ranks}"
        )
    candidates = [plan.near(current)]
    kept = _Slots.of(counts, current, plan.domain_size)
    if kept.mend(GOOD_ENOUGH * max(plan.loads)):
        candidates.append(kept)
    best = min(candidates, key=lambda each: _changes(each.flat(), current.slots))
    return ExpertPlacement(E, parallel, best.flat())


def _changes(slots: Sequence[int], now: Sequence[int]) -> int:
    """How many experts travel."""
    return sum(new not in (old, EMPTY) for new, old in zip(slots, now, strict=True))


def rank_loads(counts: Sequence[int], placement: ExpertPlacement) -> tuple[float, ...]:
    """[ranks] what each expert-parallel rank gets of these counts where replicas share evenly."""
    return tuple(_Slots.of(counts, placement, placement.parallel.ep_size).loads)


def imbalance(loads: Sequence[float]) -> float:
    """max / mean; 1 where nothing was counted."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


@dataclass
class _Slots:
    """[ranks][L] experts, with what they carry.

    Attributes:
        share: [E] what one replica of each expert carries.
        loads: [ranks].
    """

    counts: Sequence[int]
    held: list[list[int]]
    domain_size: int
    share: list[float]
    loads: list[float]

    @classmethod
    def of(cls, counts: Sequence[int], placement: ExpertPlacement, domain_size: int) -> _Slots:
        L = placement.num_local_experts
        held = [list(placement.slots[start : start + L]) for start in range(0, placement.num_slots, L)]
        share = [count / len(slots) for count, slots in zip(counts, placement.replicas, strict=True)]
        return cls(counts, held, domain_size, share, [_load(share, experts) for experts in held])

    @classmethod
    def packed(cls, counts: Sequence[int], ranks: int, L: int, domain_size: int) -> _Slots:
        """Replicas to the heaviest experts, then the heaviest replicas first to where it is emptiest."""
        copies = [1] * len(counts)
        heap = [(-float(count), expert) for expert, count in enumerate(counts)]
        heapq.heapify(heap)
        for _ in range(ranks * L - len(counts)):
            while heap and copies[heap[0][1]] == ranks:
                heapq.heappop(heap)
            if not heap:
                break
            _, expert = heap[0]
            copies[expert] += 1
            heapq.heapreplace(heap, (-counts[expert] / copies[expert], expert))
        share = [count / n for count, n in zip(counts, copies, strict=True)]
        plan = cls(counts, [[] for _ in range(ranks)], domain_size, share, [0.0] * ranks)
        for expert in sorted(range(len(counts)), key=lambda e: (-share[e], -copies[e], e)):
            for _ in range(copies[expert]):
                plan._put(expert, L)
        for held in plan.held:
            held += [EMPTY] * (L - len(held))
        return plan

    def _put(self, expert: int, L: int) -> None:
        size = self.domain_size
        in_domain = [sum(self.loads[r // size * size : r // size * size + size]) for r in range(len(self.held))]
        free = [rank for rank, held in enumerate(self.held) if len(held) < L]
        fresh = [rank for rank in free if expert not in self.held[rank]]
        if not fresh:  # a second replica on one rank would carry nothing: the slot stays empty, and the others share
            self.share[expert] = self.counts[expert] / max(1, sum(expert in held for held in self.held))
            self.loads = [_load(self.share, held) for held in self.held]
            return
        rank = min(fresh, key=lambda r: (in_domain[r], self.loads[r], r))
        self.held[rank].append(expert)
        self.loads[rank] += self.share[expert]

    def flat(self) -> tuple[int, ...]:
        return tuple(expert for held in self.held for expert in held)

    def trade(self) -> None:
        """The hottest rank trades one expert with another rank, while the hotter of the two gets cooler by it."""
        for _ in range(sum(map(len, self.held))):
            found = self._best_trade(self.loads.index(max(self.loads)))
            if found is None:
                return
            self._swap(*found[1:])

    def _best_trade(self, hot: int) -> tuple[float, int, int, int, int] | None:
        """(hotter of the two afterwards, hot rank, its place, other rank, its place)."""
        best: tuple[float, int, int, int, int] | None = None
        for rank, held in enumerate(self.held):
            if rank == hot:
                continue
            for i, mine in enumerate(self.held[hot]):
                for j, theirs in enumerate(held):
                    moved = self._carries(mine) - self._carries(theirs)
                    after = max(self.loads[hot] - moved, self.loads[rank] + moved)
                    if after >= (best[0] if best else self.loads[hot]) * (1 - 1e-9):
                        continue
                    if mine in held or (theirs != EMPTY and theirs in self.held[hot]):
                        continue
                    best = after, hot, i, rank, j
        return best

    def _swap(self, hot: int, i: int, rank: int, j: int) -> None:
        self.held[hot][i], self.held[rank][j] = self.held[rank][j], self.held[hot][i]
        for each in (hot, rank):
            self.loads[each] = _load(self.share, self.held[each])

    def _carries(self, expert: int) -> float:
        return 0.0 if expert == EMPTY else self.share[expert]

    def mend(self, goal: float) -> bool:
        """Few changes, each the best of those that cool the hottest rank, until it is at the goal. False: never."""
        for _ in range(2 * sum(map(len, self.held))):
            hottest = max(self.loads)
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

    def _best_copy(self, hot: int) -> tuple[float, int, int, int] | None:
        """(hottest rank afterwards, expert, rank, place): a replica more of one of the hot rank's experts, where a slot
        is empty or holds a replica that isn't the only one."""
        homes = self._homes()
        best: tuple[float, int, int, int] | None = None
        for rank, held in enumerate(self.held):
            for place, victim in enumerate(held):
                if rank == hot or (victim != EMPTY and len(homes[victim]) < 2):
                    continue
                for expert in self.held[hot]:
                    if expert in (EMPTY, victim) or expert in held:
                        continue
                    after = max(self._after_copy(homes, expert, rank, victim))
                    if after < (best[0] if best else self.loads[hot]) * (1 - 1e-9):
                        best = after, expert, rank, place
        return best

    def _after_copy(self, homes: list[list[int]], expert: int, rank: int, victim: int) -> list[float]:
        loads, old = list(self.loads), self.share[expert]
        new = self.counts[expert] / (len(homes[expert]) + 1)
        for home in homes[expert]:
            loads[home] += new - old
        loads[rank] += new
        if victim != EMPTY:
            before, after = self.share[victim], self.counts[victim] / (len(homes[victim]) - 1)
            for home in homes[victim]:
                loads[home] += after - before
            loads[rank] -= after
        return loads

    def _copy(self, expert: int, rank: int, place: int) -> None:
        self.held[rank][place] = expert
        homes = self._homes()
        self.share = [count / len(found) for count, found in zip(self.counts, homes, strict=True)]
        self.loads = [_load(self.share, held) for held in self.held]

    def _homes(self) -> list[list[int]]:
        """[E] the ranks of each expert's replicas, one entry a replica."""
        homes: list[list[int]] = [[] for _ in self.counts]
        for rank, held in enumerate(self.held):
            for expert in held:
                if expert != EMPTY:
                    homes[expert].append(rank)
        return homes

    def near(self, current: ExpertPlacement) -> _Slots:
        """The same shares on ranks, and in slots, where most of them lie already. Domains stay together."""
        L, size = current.num_local_experts, self.domain_size
        now = [list(current.slots[start : start + L]) for start in range(0, current.num_slots, L)]

        def overlap(mine: list[int], theirs: list[int]) -> int:
            return len((set(mine) & set(theirs)) - {EMPTY})

        domains = [list(range(start, start + size)) for start in range(0, len(now), size)]
        whole = [[list(chain.from_iterable(held[r] for r in d)) for d in domains] for held in (self.held, now)]
        target: dict[int, int] = {}
        for mine, theirs in _matched([[overlap(a, b) for b in whole[1]] for a in whole[0]]):
            inner = [[overlap(self.held[a], now[b]) for b in domains[theirs]] for a in domains[mine]]
            target |= {domains[theirs][b]: domains[mine][a] for a, b in _matched(inner)}
        held = [_in_place(self.held[target[rank]], now[rank]) for rank in range(len(now))]
        return replace(self, held=held, loads=[_load(self.share, experts) for experts in held])


def _load(share: Sequence[float], experts: Sequence[int]) -> float:
    return sum(share[expert] for expert in experts if expert != EMPTY)


def _matched(score: list[list[int]]) -> list[tuple[int, int]]:
    """Pairs (row, column), each once, the best pair first."""
    size = range(len(score))
    rows, columns = set(size), set(size)
    found: list[tuple[int, int]] = []
    for row, column in sorted(((r, c) for r in size for c in size), key=lambda rc: (-score[rc[0]][rc[1]], rc)):
        if row in rows and column in columns:
            found.append((row, column))
            rows.remove(row)
            columns.remove(column)
    return found


def _in_place(experts: list[int], now: list[int]) -> list[int]:
    """`experts`, those that are there already in the slots that they have, each as often as before."""
    left = list(experts)
    slots = [EMPTY] * len(now)
    open_slots: list[int] = []
    for slot, expert in enumerate(now):
        if expert != EMPTY and expert in left:
            slots[slot] = expert
            left.remove(expert)
        else:
            open_slots.append(slot)
    for slot, expert in zip(open_slots, sorted(left, key=lambda e: (e == EMPTY, e)), strict=True):
        slots[slot] = expert
    return slots
