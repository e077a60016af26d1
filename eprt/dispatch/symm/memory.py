"""The symmetric memory of one geometry: receive and output regions, flags, and who may use which buffer.

Every rank allocates the same layout and maps every peer's copy, so one offset means the same thing everywhere. A buffer
serves one dispatch/combine pair at a time; dispatchers of equal geometry (the layers of a model) share the buffers.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

from eprt.config import PayloadFormat
from eprt.dispatch.shared_memory import Geometry, InFlightBuffers, silent, unmapped
from eprt.dispatch.spec import SYMM_MAX_RANKS, SYMM_R_BITS
from eprt.errors import WorldMismatch
from eprt.rounding import round_up
from eprt.tokens import PAYLOADS, FlatTokens, Payload
from eprt.world import World
from eprt.world.lifecycle import RankMemory

NUM_BUFFERS = 2
MAX_RANKS = SYMM_MAX_RANKS
ALIGNMENT = 256  # of regions; also the room for a buffer's flags: two phases, one int64 for each source
R_BITS = SYMM_R_BITS  # of a flag: the R that its source used

REGIONS = ("data", "scale", "ids", "weights", "output")
# Lines of the address book, as the kernels index them.
ENTRIES = ("raise_dispatch", "raise_combine", "see_dispatch", "see_combine", "fault", "host_fault")


@dataclass(frozen=True)
class SymmGeometry(Geometry):
    """`hidden_size`, `top_k` and `payload` say what a row is."""

    hidden_size: int
    top_k: int
    payload: PayloadFormat

    @cached_property
    def row_bytes(self) -> dict[str, int]:
        """Returns the bytes that one received token takes in each region."""
        H, routing, facts = self.hidden_size, 4 * self.top_k, PAYLOADS[self.payload]
        return dict(zip(REGIONS, (facts.data_bytes(H), facts.scale_bytes(H), routing, routing, 2 * H), strict=True))

    @property
    def bytes_per_token(self) -> int:
        return NUM_BUFFERS * self.num_ranks * sum(self.row_bytes.values())

    @cached_property
    def offsets(self) -> dict[str, int]:
        """Returns the byte offset of each region in a buffer; `end` is the buffer's size."""
        rows = self.num_ranks * self.tokens_per_rank
        sizes = [round_up(rows * size, ALIGNMENT) for size in self.row_bytes.values()]
        return dict(zip((*REGIONS, "end"), itertools.accumulate(sizes, initial=0), strict=True))

    def buffer_start(self, index: int) -> int:
        """Returns the byte offset of a buffer; the flags of all buffers come before the first."""
        return NUM_BUFFERS * ALIGNMENT + index * self.offsets["end"]

    @property
    def num_bytes(self) -> int:
        return self.buffer_start(NUM_BUFFERS)


class SymmetricMemory(RankMemory):
    """One rank's allocation, its peers' addresses, and the state of its buffers.

    Args:
        geometry, rank: what and whose.
        memory: uint8 [geometry.num_bytes], flags zero.
        bases: where each rank's copy is mapped here, in rank order.
        owner: kept alive as long as the mapping is used.

    Attributes:
        peers: of each buffer, every rank's copy of it as mapped here, in rank order.
        books: int64 [NUM_BUFFERS, len(ENTRIES), MAX_RANKS], addresses for the kernels.
        in_flight: which buffer is free.
        lost: ranks that this one goes on without.
        states: int64 [NUM_BUFFERS, 4], the kernels' generation and CTA count of each buffer.
    """

    def __init__(
        self, geometry: SymmGeometry, rank: int, memory: torch.Tensor, bases: list[int], owner: object = None
    ) -> None:
        device = memory.device
        self.geometry = geometry
        self.rank = rank
        self._memory = memory
        self._owner = owner
        self._nowhere: torch.Tensor | None = None  # where kernels write what is for lost ranks
        self._raised: tuple[torch.cuda.Stream, torch.Tensor] | None = None
        self._fault = torch.zeros(MAX_RANKS, dtype=torch.int32, device=device)
        self._host_fault = torch.zeros(MAX_RANKS, dtype=torch.int32, device="cpu", pin_memory=memory.is_cuda)
        self._seen_fault = self._host_fault.numpy().data  # one read of host memory, without a device sync
        self.states = torch.zeros(NUM_BUFFERS, 4, dtype=torch.int64, device=device)
        self.peers = [tuple(base + geometry.buffer_start(index) for base in bases) for index in range(NUM_BUFFERS)]
        self.lost: list[int] = []
        self.books = torch.tensor([self._book(index, bases) for index in range(NUM_BUFFERS)], device=device)
        self.in_flight = InFlightBuffers(NUM_BUFFERS, "symm", device)
        self._views: dict[tuple[str, int], torch.Tensor] = {}  # by region and buffer, for the R it was used with last
        self._tokens: dict[int, tuple[tuple[int, int, int], FlatTokens]] = {}  # likewise, by buffer

    @classmethod
    def allocate(cls, world: World, geometry: SymmGeometry) -> SymmetricMemory:
        """Makes the memory and maps the peers'. Collective. Raises ConfigError if a rank's GPU can't."""
        if world.group is None:
            memory = torch.zeros(geometry.num_bytes, dtype=torch.uint8, device=world.device)
            return cls(geometry, 0, memory, [memory.data_ptr()])
        import torch.distributed._symmetric_memory as symm_mem

        memory = symm_mem.empty(geometry.num_bytes, dtype=torch.uint8, device=world.device)
        try:
            mapping = symm_mem.rendezvous(memory, world.group.group_name)
        except RuntimeError as error:
            raise unmapped("symm", world, error, "with peer access between all GPUs") from error
        memory[: NUM_BUFFERS * ALIGNMENT].zero_()
        found = cls(geometry, world.rank, memory, list(mapping.buffer_ptrs), mapping)
        torch.cuda.synchronize(world.device)
        world.barrier()  # nobody raises a flag that a peer is still going to zero
        return found

    def close(self) -> None:
        """Waits for this rank's kernels and drops the memory. Peers that still write keep their own mapping of it."""
        torch.cuda.synchronize(self._memory.device)
        self._views.clear()
        self._tokens.clear()
        del self._memory, self._owner, self.books

    def release(self) -> None:
        """Raises all flags that kernels wait for in this rank's own memory: from a stream that doesn't wait for the
        kernels, by a copy that needs no SM."""
        if not self._memory.is_cuda:
            return
        if self._raised is None:
            flags = torch.full(self._flags.shape, 255, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._raised = torch.cuda.Stream(self._memory.device), flags
        stream, flags = self._raised
        with torch.cuda.stream(stream):
            self._flags.copy_(flags, non_blocking=True)
        stream.synchronize()

    def resume(self, alive: tuple[bool, ...]) -> None:
        """Starts flags and states of all calls again. Routing for a lost rank goes to a place of this rank's own (no
        row travels there), and this rank's own flag is seen in place of its: so the kernels need not know."""
        self.lost = lost = [rank for rank, here in enumerate(alive) if not here]
        start, end = (self.geometry.offsets[region] for region in ("ids", "output"))
        self._nowhere = torch.empty(end - start + ALIGNMENT, dtype=torch.uint8, device=self._memory.device)
        base, flag = self._nowhere.data_ptr() - start, self._nowhere.data_ptr() + end - start
        self.peers = [tuple(p if here else base for p, here in zip(peers, alive, strict=True)) for peers in self.peers]
        books = self.books.cpu()
        for phase in ("dispatch", "combine"):
            books[:, ENTRIES.index(f"raise_{phase}"), lost] = flag
            seen = ENTRIES.index(f"see_{phase}")
            books[:, seen, lost] = books[:, seen, self.rank, None]
        self.books.copy_(books)
        for state in (self._flags, self.states, self._fault, self._host_fault):
            state.zero_()
        self.in_flight.reset()
        if self._memory.is_cuda:
            torch.cuda.synchronize(self._memory.device)

    @property
    def _flags(self) -> torch.Tensor:
        return self._memory[: NUM_BUFFERS * ALIGNMENT]

    def tokens(self, index: int, R: int, num_experts: int, global_scale: torch.Tensor | None) -> FlatTokens:
        key, kept = (R, num_experts, id(global_scale)), self._tokens.get(index)  # kept tokens hold their scale
        if kept is None or kept[0] != key:
            tokens = FlatTokens(self.payload(index, R, global_scale), *self.routing(index, R), num_experts)
            kept = self._tokens[index] = key, tokens
        return kept[1]

    def payload(self, index: int, R: int, global_scale: torch.Tensor | None) -> Payload:
        """Returns the received rows [W * R, ...], rank by rank."""
        facts = PAYLOADS[self.geometry.payload]
        scale = None if facts.scale_dtype is None else self._rows("scale", index, R, facts.scale_dtype)
        return Payload(self._rows("data", index, R, facts.dtype), self.geometry.payload, scale, global_scale)

    def routing(self, index: int, R: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the received ids and weights, [W * R, K]."""
        return self._rows("ids", index, R, torch.int32), self._rows("weights", index, R, torch.float32)

    def output(self, index: int, R: int) -> torch.Tensor:
        """Returns [W * R, H] bf16, from where the peers pull."""
        return self._rows("output", index, R, torch.bfloat16)

    def _rows(self, region: str, index: int, R: int, dtype: torch.dtype) -> torch.Tensor:
        rows, kept = self.geometry.num_ranks * R, self._views.get((region, index))
        if kept is None or kept.shape[0] != rows:
            size = self.geometry.row_bytes[region]
            start = self.geometry.buffer_start(index) + self.geometry.offsets[region]
            with torch.inference_mode(False):  # calls outside of it may come, and write
                kept = self._memory[start : start + rows * size].view(dtype).view(rows, size // dtype.itemsize)
            self._views[region, index] = kept
        return kept

    def _book(self, index: int, bases: list[int]) -> list[list[int]]:
        flags = {"dispatch": index * ALIGNMENT, "combine": index * ALIGNMENT + MAX_RANKS * 8}
        peers = range(len(bases))
        lines: dict[str, list[int]] = {}
        for phase, flag in flags.items():
            lines[f"raise_{phase}"] = [bases[p] + flag + 8 * self.rank for p in peers]
            lines[f"see_{phase}"] = [bases[self.rank] + flag + 8 * p for p in peers]
        lines["fault"] = [self._fault.data_ptr() + 4 * p for p in peers]
        lines["host_fault"] = [self._host_fault.data_ptr() + 4 * p for p in peers]
        return [lines[entry] + [0] * (MAX_RANKS - len(bases)) for entry in ENTRIES]

    def raise_faults(self, timeout_s: float) -> None:
        """Raises what the kernels reported, without a device sync: RankLost for a peer that raised no flag within the
        limit, WorldMismatch for one that made the call with another R."""
        if not any(self._seen_fault):
            return
        if missing := [rank for rank, word in enumerate(self._seen_fault) if word < 0]:
            raise silent(missing, f"symm waited {timeout_s:g} s for its flag")
        others = {rank: int(word) for rank, word in enumerate(self._seen_fault) if word}
        raise WorldMismatch(
            f"tokens_per_rank differs between ranks: others than rank {self.rank}'s are {others}; pass the same value "
            "on every rank, and make a new World: outputs since then are garbage"
        )
