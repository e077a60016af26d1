"""Moves experts between two steps: in the executors' own layout, into the memory that calls read."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch

from eprt.errors import CapacityError, ConfigError, UnsupportedError, UsageError, WorldMismatch
from eprt.kinds import require_kinds
from eprt.layer import ExpertParallelMoE
from eprt.placement import EMPTY, ExpertPlacement
from eprt.plan import require_single
from eprt.rounding import round_up
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of, shared_errors

ALIGNMENT = 16  # bytes: where a tensor of any dtype may begin


@dataclass(frozen=True)
class Moved:
    """The result of a rebalance; the same on every rank.

    Attributes:
        pause_s: seconds between the moment when all ranks were there and the one when the slowest was done.
        slots: how many slots of all layers and ranks changed their expert.
        most_bytes: most bytes that a rank received and staged (it needs as much again for what it sends).
    """

    pause_s: float
    slots: int
    most_bytes: int


def transfers(old: ExpertPlacement, new: ExpertPlacement) -> list[tuple[int, int]]:
    """Lists what has to travel, as (slot that has the expert, slot that gets it), in the order of the latter.

    Each expert comes from the nearest of its old slots: of its own rank, then of its host, then of the rank that sends
    least so far.
    """
    L, parallel = old.num_local_experts, old.parallel
    per_host = parallel.ranks_per_host or parallel.world_size

    def host(slot: int) -> int:
        return slot // L * parallel.moe_tp_size // per_host

    sent: Counter[int] = Counter()
    found: list[tuple[int, int]] = []
    for target, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
        if after in (EMPTY, before):
            continue
        source = min(
            old.replicas[after], key=lambda s: (s // L != target // L, host(s) != host(target), sent[s // L], s)
        )
        sent[source // L] += source // L != target // L
        found.append((source, target))
    return found


def rebalance(
    world: World,
    layers: Sequence[ExpertParallelMoE],
    placements: Sequence[ExpertPlacement],
    *,
    most_bytes: int | None = None,
) -> Moved:
    """Puts the experts of these layers where `placements` say. Collective, between two steps, by all ranks.

    Every rank first stages all that it will hold, then all of them swap: until then, whatever fails leaves the old
    placement everywhere. Weights travel as the executors hold them and are written to where they lie, so nothing is
    prepared, compiled or captured again. The pause is the time of moving the bytes: fewer layers at a time make it
    shorter.

    Args:
        layers: equally many and in the same order on every rank. Each translates ids to slots already: built with a
            placement that isn't the plain one, as any with spare slots.
        placements: one for each layer: as many experts, slots and ranks as it has; equal on all ranks.
        most_bytes: of staged weights on one rank; None: whatever it takes.

    Raises:
        ConfigError, UsageError, UnsupportedError: what can't be moved, and why; the same on every rank.
        CapacityError: more than `most_bytes`, or no memory to stage it. The same on every rank.
        WorldMismatch: other layers, placements or layouts on some ranks.
        RankLost: a peer is gone. Where that is found after the last rank had agreed to swap, this one may have swapped.
    """
    with shared_errors(world, Header("rebalance", -1, 0)):
        require_kinds(rebalance, {"layers": layers, "placements": placements, "most_bytes": most_bytes})
        if most_bytes is not None and most_bytes < 0:
            raise ConfigError(f"most_bytes {most_bytes}: expected bytes from 0 on, or None for whatever it takes")
        world.require_whole("rebalance")
        _require_movable(world, layers, placements)
        move = _Move(world, layers, placements, most_bytes)
    settings = {
        f"layer {place}": f"{layer.dispatcher.layer}: {layer.placement.fingerprint()} -> {new.fingerprint()}"
        for place, (layer, new) in enumerate(zip(layers, placements, strict=True))
    }
    fingerprint, words = fingerprint_of(settings), (move.signature,)
    _, signatures = exchange(world, Header("rebalance", -1, 0, fingerprint=fingerprint, words=words, settings=settings))
    _require_one_layout(world, [words[0] for words in signatures])
    return move.run()


class _Pieces:
    """The slots that one rank sends or receives, peer by peer, as bytes of the executors' tensors.

    Args:
        ranks: of the world.
        slots: (peer, the tensors of one slot), in one order on both sides.

    Attributes:
        sizes: [ranks] bytes for each peer; each tensor's are rounded up to `ALIGNMENT`.
    """

    def __init__(self, ranks: int, slots: list[tuple[int, list[torch.Tensor]]]) -> None:
        self.sizes = [0] * ranks
        self._held: list[torch.Tensor] = []
        for peer, tensors in sorted(slots, key=itemgetter(0)):
            for tensor in tensors:
                self._held.append(tensor.view(-1).view(torch.uint8))
                self.sizes[peer] += round_up(tensor.nbytes, ALIGNMENT)

    def places(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields (bytes in the executor, their place in the buffer)."""
        start = 0
        for held in self._held:
            yield held, buffer[start : start + held.numel()]
            start += round_up(held.numel(), ALIGNMENT)


class _Move:
    """One rank's part of a rebalance. Nothing of a layer changes before all ranks have staged.

    Raises:
        UnsupportedError, CapacityError: see `rebalance`.
    """

    def __init__(
        self,
        world: World,
        layers: Sequence[ExpertParallelMoE],
        placements: Sequence[ExpertPlacement],
        most_bytes: int | None,
    ) -> None:
        self.world, self.layers, self.placements, self.slots = world, layers, placements, 0
        held = [_slot_tensors(layer) for layer in layers]
        every = ((f"{n} {name}", tensor) for n, tensors in enumerate(held) for name, tensor in tensors.items())
        self.signature = fingerprint_of({name: f"{t.dtype} {tuple(t.shape)}" for name, t in every})
        out: list[tuple[int, list[torch.Tensor]]] = []
        into: list[tuple[int, list[torch.Tensor]]] = []
        for layer, new, tensors in zip(layers, placements, held, strict=True):
            for ends in transfers(layer.placement, new):
                self.slots += 1
                (source, taken), (target, filled) = (divmod(slot, layer.placement.num_local_experts) for slot in ends)
                for side, rank, slot, peer in ((out, source, taken, target), (into, target, filled, source)):
                    if rank == world.ep_rank:
                        peer_rank = peer * world.parallel.moe_tp_size + world.moe_tp_rank
                        side.append((peer_rank, [tensor[slot] for tensor in tensors.values()]))
        self._out, self._into = _Pieces(world.size, out), _Pieces(world.size, into)
        self._buffers = self._allocated(sum(self._out.sizes), sum(self._into.sizes), most_bytes)

    def _allocated(self, sent: int, received: int, most_bytes: int | None) -> list[torch.Tensor]:
        rank, remedy = f"rank {self.world.rank}", "move fewer layers at a time"
        if most_bytes is not None and received > most_bytes:
            raise CapacityError(f"{rank} would stage {received} bytes, most_bytes is {most_bytes}: {remedy}")
        try:
            with torch.inference_mode(False):
                return [torch.empty(n, dtype=torch.uint8, device=self.world.device) for n in (sent, received)]
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(f"{rank} has no memory to stage {received} and send {sent} bytes: {remedy}") from error

    @torch.inference_mode()
    def run(self) -> Moved:
        """Brings all experts here that this rank will hold; then all ranks swap. Collective."""
        started = time.perf_counter()
        out, into = self._buffers
        for held, place in self._out.places(out):
            place.copy_(held)
        self.world.all_to_all(into, out, self._into.sizes, self._out.sizes)
        self.world.finish_device_work()
        exchange(self.world, Header("rebalance", -1, 1))
        # From here on nothing waits for another rank until all is swapped.
        for held, place in self._into.places(into):
            held.copy_(place)
        for layer, new in zip(self.layers, self.placements, strict=True):
            layer.adopt_placement(new)
        self.world.finish_device_work()
        words = int((time.perf_counter() - started) * 1e9), into.numel()
        _, by_rank = exchange(self.world, Header("rebalance", -1, 2, words=words))
        longest, largest = (max(column) for column in zip(*by_rank, strict=True))
        return Moved(longest / 1e9, self.slots, largest)


def _require_movable(world: World, layers: Sequence[ExpertParallelMoE], placements: Sequence[ExpertPlacement]) -> None:
    """Raises ConfigError, UsageError, UnsupportedError."""
    world.require_open()
    if world.current_step is not None:
        raise UsageError(f"rebalance inside step {world.current_step.number}: leave the step first")
    if len(layers) != len(placements):
        raise ConfigError(f"{len(placements)} placements for {len(layers)} layers: give one for each")
    if len({id(layer) for layer in layers}) != len(layers):
        raise ConfigError("a layer is given twice: name each once")
    for layer, new in zip(layers, placements, strict=True):
        name = f"layer {layer.dispatcher.layer}"
        if layer.world is not world or layer.dispatcher.closed:
            raise UsageError(f"{name} is closed or of another World: rebalance the layers of one World together")
        for (what, has), given in zip(_sizes(layer.placement).items(), _sizes(new).values(), strict=True):
            if has != given:
                raise ConfigError(
                    f"{name} has {has} {what}, its new placement {given}: memory and captured graphs are of that size; "
                    "plan for it, or build the layer again"
                )
        require_single(new, layer.dispatcher.runtime)
        if not layer.translates_ids and not new.is_identity:
            raise UsageError(
                f"{name} was built with its experts in order and no spare slot, so it translates no ids: build it with "
                "a placement that has slots to spare"
            )


def _sizes(placement: ExpertPlacement) -> dict[str, int]:
    return {
        "experts": placement.num_experts,
        "slots": placement.num_slots,
        "expert-parallel ranks": placement.parallel.ep_size,
        "MoE-TP ranks": placement.parallel.moe_tp_size,
    }


def _slot_tensors(layer: ExpertParallelMoE) -> dict[str, torch.Tensor]:
    """Returns the executor's tensors [L, ...]. Raises UnsupportedError where they can't be moved slot by slot."""
    L, found = layer.placement.num_local_experts, layer.executor.slot_tensors()
    for name, tensor in found.items():
        if tensor.shape[0] != L or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{layer.executor.spec.name} holds {name} as {tuple(tensor.shape)}, strides {tensor.stride()}: "
                f"expected {L} slots, contiguous"
            )
    return found


def _require_one_layout(world: World, signatures: Sequence[int]) -> None:
    """Raises WorldMismatch, on every rank, unless the ranks that exchange weights hold them alike."""
    tp = world.parallel.moe_tp_size
    for first in range(tp):
        alike = signatures[first::tp]
        if len(set(alike)) > 1:
            others = [rank for rank in range(first, world.size, tp) if signatures[rank] != alike[0]]
            mismatch = WorldMismatch(
                f"ranks {others} hold prepared experts in other dtypes or shapes than rank {first}, so they can't be "
                "exchanged (an executor chose its layout by the values of its own experts): load the model again with "
                "the new placement"
            )
            mismatch.shared = True
            raise mismatch
