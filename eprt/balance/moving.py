"""Moves experts between two steps: in the executors' own layout, into the memory that calls read."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eprt.errors import CapacityError, ConfigError, EprtError, UnsupportedError, UsageError, WorldMismatch
from eprt.layer import ExpertParallelMoE
from eprt.placement import EMPTY, ExpertPlacement
from eprt.rounding import round_up
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of

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


@dataclass(frozen=True)
class Transfer:
    """A copy of the expert in slot `source` to slot `target`; both count over the whole world."""

    source: int
    target: int


def transfers(old: ExpertPlacement, new: ExpertPlacement) -> tuple[Transfer, ...]:
    """Lists what has to travel, in the order of the targets.

    Each expert comes from the nearest of its old slots: of its own rank, then of its host, then of the rank that sends
    least so far.
    """
    L, parallel = old.num_local_experts, old.parallel
    per_host = parallel.ranks_per_host or parallel.world_size

    def host(slot: int) -> int:
        return slot // L * parallel.moe_tp_size // per_host

    sent: Counter[int] = Counter()
    found: list[Transfer] = []
    for target, (before, after) in enumerate(zip(old.slots, new.slots, strict=True)):
        if after in (EMPTY, before):
            continue
        source = min(
            old.replicas[after], key=lambda s: (s // L != target // L, host(s) != host(target), sent[s // L], s)
        )
        sent[source // L] += source // L != target // L
        found.append(Transfer(source, target))
    return tuple(found)


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
    move: _Move | None = None
    error: EprtError | None = None
    settings: dict[str, str] = {}
    try:
        world.require_whole("rebalance")
        _require_movable(world, layers, placements)
        settings = {
            f"layer {place}": f"{layer.dispatcher.layer}: {layer.placement.fingerprint()} -> {new.fingerprint()}"
            for place, (layer, new) in enumerate(zip(layers, placements, strict=True))
        }
        move = _Move(world, layers, placements, most_bytes)
    except EprtError as found:
        error = found
    signature = 0 if move is None else move.signature
    header = Header("rebalance", -1, 0, fingerprint=fingerprint_of(settings), words=(signature,), settings=settings)
    peers = exchange(world, header, error)
    if move is None:
        raise UsageError("the ranks agreed on a rebalance that this one can't make: report this")
    _require_one_layout(world, [words[0] for words in peers.words])
    started = time.perf_counter()
    move.stage()
    exchange(world, Header("rebalance", -1, 1))
    move.commit()
    pause = time.perf_counter() - started
    words = int(pause * 1e9), move.received
    peers = exchange(world, Header("rebalance", -1, 2, words=words))
    longest, largest = (max(column) for column in zip(*peers.words, strict=True))
    return Moved(longest / 1e9, move.slots, largest)


class _Move:
    """One rank's part of a rebalance. Nothing of a layer changes before `commit`.

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
        self.slots = 0
        self.world, self.layers, self.placements = world, layers, placements
        self.tensors = [list(layer.executor.slot_tensors().items()) for layer in layers]
        for layer, tensors in zip(layers, self.tensors, strict=True):
            _require_slots(layer, tensors)
        self.signature = _signature(self.tensors)
        own, tp = world.ep_rank, world.parallel.moe_tp_size
        # Of each peer, (layer, local slot) in one order on both sides.
        self._out: list[list[tuple[int, int]]] = [[] for _ in range(world.size)]
        self._into: list[list[tuple[int, int]]] = [[] for _ in range(world.size)]
        for index, (layer, new) in enumerate(zip(layers, placements, strict=True)):
            L = layer.placement.num_local_experts
            for transfer in transfers(layer.placement, new):
                self.slots += 1
                source, target = transfer.source // L, transfer.target // L
                if source == own:
                    self._out[target * tp + world.moe_tp_rank].append((index, transfer.source % L))
                if target == own:
                    self._into[source * tp + world.moe_tp_rank].append((index, transfer.target % L))
        self._sent, self._received = (
            [sum(self._slot_bytes(layer) for layer, _ in pieces) for pieces in side] for side in (self._out, self._into)
        )
        self.received, sent = sum(self._received), sum(self._sent)
        if most_bytes is not None and self.received > most_bytes:
            raise CapacityError(
                f"rank {world.rank} would stage {self.received} bytes, most_bytes is {most_bytes}: move fewer layers "
                "at a time"
            )
        try:
            with torch.inference_mode(False):
                self._buffers = [torch.empty(n, dtype=torch.uint8, device=world.device) for n in (sent, self.received)]
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CapacityError(
                f"rank {world.rank} has no memory to stage {self.received} and send {sent} bytes: move fewer layers "
                "at a time"
            ) from error

    def _slot_bytes(self, layer: int) -> int:
        return sum(round_up(tensor[0].nbytes, ALIGNMENT) for _, tensor in self.tensors[layer])

    def _pieces(
        self, side: list[list[tuple[int, int]]], buffer: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns (bytes in the executor, their place in the buffer), for every tensor of every piece of that side."""
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        start = 0
        for layer, slot in (piece for peer in side for piece in peer):
            for _, tensor in self.tensors[layer]:
                held = tensor[slot : slot + 1].view(-1).view(torch.uint8)
                found.append((held, buffer[start : start + held.numel()]))
                start += round_up(held.numel(), ALIGNMENT)
        return found

    @torch.inference_mode()
    def stage(self) -> None:
        """Brings all experts here that this rank will hold. Collective."""
        out, into = self._buffers
        for held, place in self._pieces(self._out, out):
            place.copy_(held)
        self.world.all_to_all(into, out, self._received, self._sent)
        self.world.finish_device_work()

    @torch.inference_mode()
    def commit(self) -> None:
        """Swaps the experts. Not collective, and nothing in it waits for another rank."""
        for held, place in self._pieces(self._into, self._buffers[1]):
            held.copy_(place)
        for layer, new in zip(self.layers, self.placements, strict=True):
            layer.adopt_placement(new)
        self.world.finish_device_work()


def _require_movable(world: World, layers: Sequence[ExpertParallelMoE], placements: Sequence[ExpertPlacement]) -> None:
    """Raises ConfigError, UsageError."""
    world.require_open()
    if world.current_step is not None:
        raise UsageError(f"rebalance inside step {world.current_step.number}: leave the step first")
    if len(layers) != len(placements):
        raise ConfigError(f"{len(placements)} placements for {len(layers)} layers: give one for each")
    if len({id(layer) for layer in layers}) != len(layers):
        raise ConfigError("a layer is given twice: name each once")
    for layer, new in zip(layers, placements, strict=True):
        old, name = layer.placement, f"layer {layer.dispatcher.layer}"
        if layer.world is not world or layer.dispatcher.closed:
            raise UsageError(f"{name} is closed or of another World: rebalance the layers of one World together")
        sizes = [
            ("experts", old.num_experts, new.num_experts),
            ("slots", old.num_slots, new.num_slots),
            ("expert-parallel ranks", old.parallel.ep_size, new.parallel.ep_size),
            ("MoE-TP ranks", old.parallel.moe_tp_size, new.parallel.moe_tp_size),
        ]
        for what, has, given in sizes:
            if has != given:
                raise ConfigError(
                    f"{name} has {has} {what}, its new placement {given}: memory and captured graphs are of that size; "
                    "plan for it, or build the layer again"
                )
        if not layer.translates_ids and not new.is_identity:
            raise UsageError(
                f"{name} was built with its experts in order and no spare slot, so it translates no ids: build it with "
                "a placement that has slots to spare"
            )


def _require_slots(layer: ExpertParallelMoE, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raises UnsupportedError where the executor's tensors can't be moved slot by slot."""
    L = layer.placement.num_local_experts
    for name, tensor in tensors:
        if tensor.shape[0] != L or not tensor.is_contiguous():
            raise UnsupportedError(
                f"{layer.executor.spec.name} holds {name} as {tuple(tensor.shape)}, strides {tensor.stride()}: "
                f"expected {L} slots, contiguous"
            )


def _signature(layers: Sequence[Sequence[tuple[str, torch.Tensor]]]) -> int:
    """Returns 63 bits that stand for names, dtypes and shapes."""
    text = repr([[(name, str(t.dtype), tuple(t.shape)) for name, t in tensors] for tensors in layers])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


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
