"""Says which rank holds which expert: logical experts become slots, once, after routing.

A slot is a place for one expert on one rank. Every EP rank has equally many (L), rank by rank, so slot s lies on EP
rank s // L. The model, its router and its checkpoint speak of experts; dispatchers, executors and what travels speak of
slots (their E is the number of slots). In a contiguous placement of experts that divide evenly, both numbers are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from operator import index

import torch

from eprt.config import MAX_EXPERTS, MoEConfig, ParallelConfig, Routing, require_size
from eprt.errors import ConfigError
from eprt.json_files import shown
from eprt.kinds import require_kinds

EMPTY = -1  # a slot without an expert


@dataclass(frozen=True)
class ExpertShard:
    """The part of every expert matrix that one rank holds.

    Slots `[first_expert, first_expert + num_local_experts)` of `num_experts`; of each, slice `moe_tp_rank` of
    `moe_tp_size` along the intermediate dimension. The down projection's bias is added by `moe_tp_rank` 0 alone, so
    that the sum over ranks holds it once.

    Attributes:
        num_experts, first_expert, num_local_experts: in slots, as everything behind the router counts.
        experts: [L] the logical expert in each local slot, for whoever loads it; an empty slot repeats one of the
            others (of this rank's, or expert 0), which no token asks for. Default: slot numbers are expert numbers,
            which is kept as a range.
    """

    num_experts: int
    first_expert: int
    num_local_experts: int
    moe_tp_rank: int = 0
    moe_tp_size: int = 1
    experts: tuple[int, ...] | range = ()

    def __post_init__(self) -> None:
        in_order = range(self.first_expert, self.end_expert)
        if not self.experts or tuple(self.experts) == tuple(in_order):
            object.__setattr__(self, "experts", in_order)

    def __str__(self) -> str:
        whole = f"{self.first_expert} to {self.end_expert - 1} of {self.num_experts}"
        in_order = isinstance(self.experts, range)
        whole = f"experts {whole}" if in_order else f"slots {whole} (experts {listed(self.experts)})"
        return whole if self.moe_tp_size == 1 else f"slice {self.moe_tp_rank} of {self.moe_tp_size} of {whole}"

    @cached_property
    def end_expert(self) -> int:
        return self.first_expert + self.num_local_experts

    def slice_intermediate(self, intermediate_size: int) -> slice:
        """Returns this rank's slice of the intermediate dimension. Raises ConfigError if it doesn't divide."""
        if intermediate_size % self.moe_tp_size:
            raise ConfigError(
                f"intermediate_size {intermediate_size} doesn't divide by moe_tp_size {self.moe_tp_size}; "
                "choose a moe_tp_size that divides it"
            )
        width = intermediate_size // self.moe_tp_size
        return slice(self.moe_tp_rank * width, (self.moe_tp_rank + 1) * width)


@dataclass(frozen=True)
class ExpertPlacement:
    """Says which slots of a world hold each of `num_experts` logical experts.

    Args:
        num_experts: logical experts of the layer (E of the model).
        parallel: the world's sizes.
        slots: [S] the logical expert in each slot, EP rank by EP rank, with the same number of slots per rank; -1 for
            an empty slot. An expert may have several slots (replicas). Empty tuple: contiguous; if the experts don't
            divide evenly, the first ranks hold one more and the last slot of the others stays empty.

    Raises:
        ConfigError: slots that don't divide over the ranks, that name no expert of the layer, or that leave an expert
            without a place.
    """

    num_experts: int
    parallel: ParallelConfig
    slots: tuple[int, ...] | range = ()

    def __post_init__(self) -> None:
        require_size("num_experts", self.num_experts, MAX_EXPERTS)
        require_kinds(ExpertPlacement, {"parallel": self.parallel})
        E, ranks = self.num_experts, self.parallel.ep_size
        try:
            slots = tuple(map(index, self.slots))  # of any sequence of integers
        except TypeError as error:
            raise ConfigError(f"slots are {shown(self.slots)}: expected the expert's number in each") from error
        in_order = slots == tuple(range(E))
        object.__setattr__(self, "slots", range(E) if in_order else slots or _contiguous(E, ranks))
        if len(self.slots) % ranks:
            raise ConfigError(
                f"{len(self.slots)} slots can't be split evenly over {ranks} expert-parallel ranks: give every rank "
                f"equally many, {EMPTY} for a slot that stays empty"
            )
        if strangers := sorted({e for e in self.slots if not EMPTY <= e < E}):
            raise ConfigError(
                f"slots name experts [{listed(strangers)}]: expected 0 to {E - 1}, or {EMPTY} for an empty slot"
            )
        if missing := sorted(set(range(E)) - set(self.slots)):
            raise ConfigError(f"experts [{listed(missing)}] have no slot: every expert needs at least one")

    @property
    def num_slots(self) -> int:
        """Returns S, which dispatchers and executors know as E."""
        return len(self.slots)

    @property
    def num_local_experts(self) -> int:
        """Returns L, the slots that a rank holds."""
        return self.num_slots // self.parallel.ep_size

    @cached_property
    def is_identity(self) -> bool:
        """Returns whether slot numbers are expert numbers, so that nothing has to be translated."""
        return isinstance(self.slots, range)

    @cached_property
    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Returns [E] the slots of each expert, ascending."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for slot, expert in enumerate(self.slots):
            if expert != EMPTY:
                found[expert].append(slot)
        return tuple(tuple(slots) for slots in found)

    def shard(self, rank: int) -> ExpertShard:
        """Returns what `rank` (in the World's numbering) holds. Raises ConfigError where there is no such rank."""
        if rank not in range(size := self.parallel.world_size):
            raise ConfigError(
                f"rank {rank}: expected 0 to {size - 1}, of a world of {size}; pass parallel=world.parallel"
            )
        ep_rank, moe_tp_rank = divmod(rank, self.parallel.moe_tp_size)
        L = self.num_local_experts
        held = self.slots[ep_rank * L : (ep_rank + 1) * L]
        if EMPTY in held:
            filler = next((expert for expert in reversed(held) if expert != EMPTY), 0)
            held = tuple(filler if expert == EMPTY else expert for expert in held)
        return ExpertShard(
            num_experts=self.num_slots,
            first_expert=ep_rank * L,
            num_local_experts=L,
            moe_tp_rank=moe_tp_rank,
            moe_tp_size=self.parallel.moe_tp_size,
            experts=held,
        )

    def in_slots(self, config: MoEConfig) -> MoEConfig:
        """Returns the layer's maths as everything behind the router knows it: its experts are the slots.

        Raises:
            ConfigError: the placement is for another number of experts.
        """
        if config.num_experts != self.num_experts:
            raise ConfigError(
                f"the placement is for {self.num_experts} experts, the layer has {config.num_experts}: make it for this"
            )
        return config if self.is_identity else replace(config, num_experts=self.num_slots, routing=Routing())

    def fingerprint(self) -> str:
        """Returns a short text that differs where placements differ; equal on all ranks that agree."""
        if self.slots == _contiguous(self.num_experts, self.parallel.ep_size):
            return "contiguous"
        return hashlib.sha256(repr(self.slots).encode()).hexdigest()[:16]


class SlotTable:
    """A translation of ids of experts into ids of slots, on the device: no host sync, static shapes, deterministic.

    Args:
        one_replica: every expert's tokens go to one of its replicas, the one on the rank that has been given fewest
            experts so far; decode wants that, since a replica that gets any row has its weights read. False: they are
            dealt out in turn, token by token, starting elsewhere on each rank; prefill wants that.
        rank: this rank, in the World's numbering.
    """

    def __init__(self, placement: ExpertPlacement, device: torch.device, *, one_replica: bool, rank: int) -> None:
        self._num_experts, self._first, self._one_replica = placement.num_experts, rank, one_replica
        self._placement = placement
        self._alive = (True,) * placement.parallel.world_size
        # As wide as any placement on these slots can need, so that another one fits into the same memory.
        most = 1 if one_replica else placement.num_slots - placement.num_experts + 1
        self._slots = torch.zeros(placement.num_experts + 1, most, dtype=torch.int32, device=device)
        self._replicas = torch.ones(placement.num_experts + 1, dtype=torch.int32, device=device)
        self.update(placement)

    def update(self, placement: ExpertPlacement) -> None:
        """Translates to another placement of as many experts on as many slots from now on. Addresses stay, so CUDA
        graphs that were captured with this table follow."""
        self._placement = placement
        replicas = _left(placement, self._alive)
        chosen = chosen_slots(placement, replicas) if self._one_replica else replicas
        width = self._slots.shape[1]
        rows = [[*slots, *[0] * (width - len(slots))] for slots in chosen]
        rows.append([placement.num_slots] * width)  # no expert: no slot
        with torch.inference_mode():  # also where they were made in it
            self._slots.copy_(torch.tensor(rows, dtype=torch.int32, device="cpu"))
            self._replicas.copy_(torch.tensor([*map(len, chosen), 1], dtype=torch.int32, device="cpu"))

    def follow(self, alive: tuple[bool, ...]) -> None:
        """Chooses among replicas on `alive` ranks, [W]. Experts without any keep their slots, which are lost."""
        if alive != self._alive:
            self._alive = alive
            self.update(self._placement)

    def slots_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns [T, K] int32 slot ids, S for "no expert", of [T, K] int32 expert ids, E for "no expert".

        Ids outside [0, E] count as "no expert": who wants an error checks them before. On CUDA one small kernel."""
        if ids.is_cuda:
            from eprt.placement import ids_triton

            return ids_triton.slots_of(ids, self._slots, self._replicas, self._first)
        outside = (ids < 0) | (ids > self._num_experts)
        ids = torch.where(outside, self._num_experts, ids).long()
        if self._slots.shape[1] == 1:
            return self._slots[:, 0][ids]
        turn = torch.arange(ids.shape[0], device=ids.device) + self._first
        return self._slots[ids, turn[:, None] % self._replicas[ids]]


class ExpertLoad:
    """Counts how often each expert of one layer is chosen on one rank. No host sync and static shapes: a captured graph
    counts at each replay.

    On CUDA one small kernel a call: 4 bytes read for each (token, slot), a histogram in each block of 1024 of them,
    then one atomic addition for each expert that the block met.
    """

    def __init__(self, num_experts: int, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._counts = torch.zeros(num_experts, dtype=torch.int64, device=device)

    @torch.no_grad()
    def add(self, ids: torch.Tensor) -> None:
        """Counts [T, K] int32 ids; what lies outside [0, E) isn't one of an expert."""
        if ids.is_cuda:
            from eprt.placement import ids_triton

            ids_triton.count_ids(ids, self._counts)
            return
        E = self._counts.numel()
        known = torch.where((ids < 0) | (ids > E), E, ids).flatten()
        self._counts += torch.bincount(known, minlength=E + 1)[:E]

    def read(self) -> torch.Tensor:
        """Returns [E] int64 on the device, a copy."""
        return self._counts.clone()

    def reset(self) -> None:
        """Begins at zero again; captured graphs go on counting into the same memory."""
        self._counts.zero_()


def listed(experts: Sequence[int]) -> str:
    """Returns numbers of experts as a message bears them."""
    text = ", ".join(map(str, experts[:16]))
    return text if len(experts) <= 16 else f"{text}, ... ({len(experts)} of them)"


def _contiguous(num_experts: int, ranks: int) -> tuple[int, ...] | range:
    """Returns experts in order; the first `num_experts % ranks` ranks hold one more, the others' last slot is empty."""
    fewest, more = divmod(num_experts, ranks)
    if not more:
        return range(num_experts)
    starts = [rank * fewest + min(rank, more) for rank in range(ranks + 1)]
    held = (range(*ends) for ends in pairwise(starts))
    return tuple(chain.from_iterable([*experts, *[EMPTY] * (fewest + 1 - len(experts))] for experts in held))


def chosen_slots(placement: ExpertPlacement, replicas: tuple[tuple[int, ...], ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Returns one slot per expert: those with fewest replicas choose first, each the rank with fewest chosen so far.

    Args:
        replicas: [E] slots to choose from; all of each expert's if empty.
    """
    replicas = replicas or placement.replicas
    L, load = placement.num_local_experts, [0] * placement.parallel.ep_size
    chosen: dict[int, int] = {}
    for expert in sorted(range(placement.num_experts), key=lambda e: (len(replicas[e]), e)):
        slot = min(replicas[expert], key=lambda s: (load[s // L], s))
        chosen[expert] = slot
        load[slot // L] += 1
    return tuple((chosen[expert],) for expert in range(placement.num_experts))


def whole_ep_ranks(alive: tuple[bool, ...], parallel: ParallelConfig) -> list[bool]:
    """Returns [ep_size] whether all ranks that share an EP rank's experts are left; `alive` is [W]."""
    size = parallel.moe_tp_size
    return [all(alive[first : first + size]) for first in range(0, len(alive), size)]


def _left(placement: ExpertPlacement, alive: tuple[bool, ...]) -> tuple[tuple[int, ...], ...]:
    """Returns [E] each expert's slots on ranks that are left; all of them where none is."""
    whole, L = whole_ep_ranks(alive, placement.parallel), placement.num_local_experts
    return tuple(tuple(s for s in slots if whole[s // L]) or slots for slots in placement.replicas)
