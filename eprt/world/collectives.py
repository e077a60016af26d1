"""What the ranks of a World exchange. Every operation is bounded: it returns, or raises RankLost naming a rank."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist

from eprt.config import ParallelConfig
from eprt.errors import RankLost, UsageError
from eprt.world.guard import Guard
from eprt.world.members import restarts
from eprt.world.shared_exchange import MAX_WORDS, SharedExchange
from eprt.world.step import CallLog, Step

CORES = os.cpu_count() or 1  # of the host: ranks that are pinned apart see few each, but share none
SPIN_S = 300e-6
LONGEST_SLEEP_S = 1e-3

# torch 2.13 renamed these; 2.10 has the old names only.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Seat:
    """Where a rank sits.

    Attributes:
        rank, size: in the World's numbering.
        device: where payload lives.
        parallel: DP x attention-TP and EP x MoE-TP sizes.
        group: process group of all ranks, for payload; None in a world of one.
        attention_tp_group: of the ranks that hold the same tokens; None: every rank has its own.
    """

    rank: int
    size: int
    device: torch.device
    parallel: ParallelConfig
    group: dist.ProcessGroup | None = None
    attention_tp_group: dist.ProcessGroup | None = None


class Collectives:
    """A rank's place in a World, payload over its process group, agreement over its control group.

    Ranks that were lost keep their numbers (`World.shrink`): what is gathered has a row for each of the `size` ranks,
    which stays empty for those.

    Attributes:
        rank, size, device, parallel: see `Seat`.
        group: process group of the ranks that are left; None where this is the only one.
        alive: [W], False for ranks that the others went on without.
        timeout_s: how long any operation waits for a peer.
        current_step: the step that `World.step` opened, for the layers called inside it; None outside. It is the
            World's, not a thread's: threads that a step starts see it.
        step_number: of the current step, or else of the last one; compared between ranks in every header.
        generation: counts restarts of the job and `shrink`s; handles of another generation are refused.
        nonce: drawn when the ranks met, compared in every header; 0 in a world of one.
        closed: whether the World has ended.
        buckets: sizes that the R of a step is rounded up to, ascending; what graphs were captured for.
        graphs: CUDA graphs that hold this World's collectives, as long as anybody keeps them; `close` resets them.
        padding: inside a batch that was filled up to a bucket: bool [rows, 1], True where a row holds no token.
    """

    def __init__(self, seat: Seat, timeout_s: float) -> None:
        self.rank, self.size, self.device, self.parallel = seat.rank, seat.size, seat.device, seat.parallel
        self.group = seat.group
        self.alive = (True,) * seat.size
        self.timeout_s = timeout_s
        self.current_step: Step | None = None
        self.step_number = 0
        self.generation = restarts()
        self.nonce = 0
        self.closed = False
        self.buckets: tuple[int, ...] = ()
        self.padding: torch.Tensor | None = None
        self.graphs: WeakSet[Any] = WeakSet()
        self._ranks = list(range(seat.size))  # those that are alive
        self._attention_tp_group = seat.attention_tp_group
        self._control: dist.ProcessGroupGloo | None = None
        self._guard: Guard | None = None
        self._shared: SharedExchange | None = None
        # gloo's threads let go of tensors a little after the operation. The last to let go needs the GIL, and a thread
        # that asks for it while the interpreter ends takes the process down: so these outlive the operation.
        self._moved: tuple[torch.Tensor, ...] = ()
        self._call_log = CallLog()
        self._abandoned = False  # a collective was left unfinished: torch would wait for it at the end

    # ---- coordinates ----------------------------------------------------------------------------------------

    @property
    def ep_rank(self) -> int:
        return self.rank // self.parallel.moe_tp_size

    @property
    def moe_tp_rank(self) -> int:
        return self.rank % self.parallel.moe_tp_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.parallel.attention_tp_size

    @property
    def attention_tp_rank(self) -> int:
        return self.rank % self.parallel.attention_tp_size

    # ---- payload --------------------------------------------------------------------------------------------

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, missing: int = 0) -> None:
        """out[W * n] = every rank's x[n], in rank order; equal n everywhere. Rows of lost ranks hold `missing`."""
        alone, whole = len(self._ranks) == 1, len(self._ranks) == self.size
        found = x if alone else out if whole else x.new_empty((len(self._ranks) * x.shape[0], *x.shape[1:]))
        if not alone:
            self._moved = _wire(found), _wire(x)
            self._run(_all_gather(*self._moved, group=self.group, async_op=True))
        if found is not out:
            self._spread(_wire(out).view(self.size, *x.shape), _wire(found).view(len(self._ranks), *x.shape), missing)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """out[n] = sum over ranks of their x[W * n], this rank's n rows."""
        x = self._gathered(x)
        if len(self._ranks) == 1:
            out.copy_(x)
        elif self.device.type == "cuda":
            _reduce_scatter(out, x, group=self.group)
        else:
            # gloo's reduce-scatter work never reports completion (torch 2.13), so it can't be bounded. The same bytes
            # as an all-to-all can, and the sum is then made in float32.
            parts, splits = torch.empty_like(x), [out.shape[0]] * len(self._ranks)
            self._exchange(parts, x, splits, splits)
            out.copy_(parts.view(len(self._ranks), *out.shape).sum(0, dtype=torch.float32))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        """Rows of x go to ranks by in_splits [W]; out holds what they sent, by out_splits (which must be their truth).
        Both are 0 for lost ranks."""
        if len(self._ranks) == 1:
            out.copy_(x)
        else:
            self._exchange(out, x, *([splits[rank] for rank in self._ranks] for splits in (out_splits, in_splits)))

    def _exchange(self, out: torch.Tensor, x: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        self._moved = out, x = _wire(out), _wire(x)
        self._run(dist.all_to_all_single(out, x, out_splits, in_splits, group=self.group, async_op=True))

    def _spread(self, out: torch.Tensor, found: torch.Tensor, missing: int = 0) -> None:
        """What each of the ranks that are left said, [A, ...], to their places in out [W, ...]."""
        if len(self._ranks) < self.size:
            out.fill_(missing)
        for rank, row in zip(self._ranks, found, strict=True):
            out[rank] = row

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """[W * n] -> the parts of the ranks that are left, [A * n]."""
        if len(self._ranks) == self.size:
            return x
        parts = x.view(self.size, x.shape[0] // self.size, *x.shape[1:])
        return torch.cat([parts[rank] for rank in self._ranks])

    def gather_attention_tp(self, x: torch.Tensor) -> torch.Tensor:
        """[n, ...] on each attention-TP rank -> [attention_tp_size * n, ...] on all of them."""
        size = self.parallel.attention_tp_size
        if size == 1:
            return x
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        first = self.rank - self.attention_tp_rank
        self._moved = out, x.contiguous()
        self._run(_all_gather(*self._moved, group=self._attention_tp_group, async_op=True), range(first, first + size))
        return out

    def finish_device_work(self) -> None:
        """The host waits, bounded, for what it has issued to this rank's stream. Raises RankLost."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()
        done.record()
        pauses = self._pauses(self._ranks)
        while not done.query():
            next(pauses)

    # ---- agreement ------------------------------------------------------------------------------------------

    def compares_headers(self, full: bool) -> bool:
        """Whether calls compare headers: always on gloo, on GPUs with full validation, never under graph capture."""
        if len(self._ranks) == 1:
            return False
        if self.device.type == "cpu":
            return True
        return full and not torch.cuda.is_current_stream_capturing()

    def gather_control(self, x: torch.Tensor) -> torch.Tensor:
        """CPU tensor x[n] -> [W, n], over the control group; zeros for lost ranks."""
        self.require_open()
        if self.size == 1:
            return x[None]
        found = x.new_empty((len(self._ranks), *x.shape))
        if len(self._ranks) == 1:
            found.copy_(x)
        else:
            if self._control is None:
                raise UsageError("the world is closed; make a new one")
            gather = self._control._allgather_base  # pyright: ignore[reportAttributeAccessIssue]
            self._moved = found.view(-1), x.flatten()
            self._wait(gather(*self._moved))
        if len(self._ranks) == self.size:
            return found
        out = x.new_empty((self.size, *x.shape))
        self._spread(out, found)
        return out

    def gather_words(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Every rank's int64 words, in rank order; equally many on every rank, zeros for lost ones. Through shared
        memory where all ranks are on one host, else over the control group."""
        self.require_open()
        if self.size == 1:
            return [tuple(words)]
        if self._shared is None or len(words) > MAX_WORDS:
            return [tuple(row) for row in self.gather_control(torch.tensor(words, dtype=torch.int64)).tolist()]
        if self._guard is not None:
            self._guard.note()
        found = self._shared.gather(words, self._pauses(self._ranks))
        if len(self._ranks) == self.size:
            return found
        rows = dict(zip(self._ranks, found, strict=True))
        return [rows.get(rank, (0,) * len(words)) for rank in range(self.size)]

    @property
    def shares_words(self) -> bool:
        """Whether `gather_words` goes through shared memory."""
        return self._shared is not None

    def log_call(self, layer: int, fingerprint: int) -> None:
        """Inside a step, this rank's host calls a layer: the next step compares what the ranks called."""
        if self.current_step is not None:
            self._call_log.calls.append((layer, fingerprint))

    def take_call_log(self) -> CallLog:
        """What was logged since the last time."""
        log, self._call_log = self._call_log, CallLog()
        return log

    def note(self, where: str, layer: int | None = None) -> None:
        """Progress, as peers will read it in a RankLost."""
        if self._guard is not None:
            self._guard.note(where if layer is None else f"{where} of layer {layer}, step {self.step_number}")

    def raise_if_lost(self, waited_s: float = 0.0) -> None:
        """Raises RankLost if the world already has a verdict; for who has waited for all ranks, also if one of them
        has ended or, after the World's timeout, is behind."""
        if self._guard is not None:
            self._guard.raise_if_lost(self._ranks if waited_s else ())
            if waited_s > self.timeout_s:
                self._guard.raise_behind(waited_s, self._ranks)

    def add_buckets(self, buckets: Iterable[int]) -> None:
        """Sizes that graphs are captured for; the same on every rank. Whoever runs eagerly takes the same R then, so
        that ranks which replay a graph and ranks which don't understand each other."""
        self.buckets = tuple(sorted({*self.buckets, *buckets}))

    def require_open(self) -> None:
        """Raises UsageError after `close`."""
        if self.closed:
            raise UsageError("the world is closed; make a new one")

    @property
    def broken(self) -> bool:
        """Whether peers may never come to a meeting point: a rank is lost, or this one is leaving through an error."""
        return self._guard is not None and self._guard.failing

    # ---- waiting --------------------------------------------------------------------------------------------

    def _run(self, work: dist.Work | None, ranks: Iterable[int] | None = None) -> None:
        """Payload: on CUDA the stream waits, on CPU the host does."""
        if work is None:
            return
        if self.device.type == "cuda":
            work.wait()
        else:
            self._wait(work, ranks)

    def _wait(self, work: dist.Work, ranks: Iterable[int] | None = None) -> None:
        """Bounded: returns, or raises RankLost naming one of the `ranks` that take part (None: all)."""
        ranks = self._ranks if ranks is None else ranks
        if self._guard is not None:
            self._guard.note()
        pauses = self._pauses(ranks)
        try:
            while not work.is_completed():
                next(pauses)
        except BaseException:  # Ctrl-C, too
            self._abandoned = True
            raise
        try:
            work.wait()
        except RuntimeError as error:
            if self._guard is None:
                raise RankLost(f"a collective failed before the guard started: {error}", -1, "unknown") from error
            self._guard.raise_broken(error)

    def _pauses(self, ranks: Iterable[int]) -> Iterator[None]:
        """Between two looks at what one of the `ranks` still has to do. Raises RankLost where it won't be done.

        First the CPU is only yielded, for what is nearly there; then this rank sleeps, longer the longer it has waited,
        so that ranks that share cores don't starve the one they wait for. Where they are more than the cores, it sleeps
        at once.
        """
        start = time.monotonic()
        spin_s = SPIN_S if (self.parallel.ranks_per_host or self.size) <= CORES else 0.0
        while True:
            waited = time.monotonic() - start
            if waited < spin_s:
                os.sched_yield()
            else:
                if self._guard is not None:
                    self._guard.raise_if_lost(ranks)
                    if waited > self.timeout_s:
                        self._guard.raise_behind(waited, ranks)
                time.sleep(min(waited / 10, LONGEST_SLEEP_S))
            yield


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """gloo and NCCL move FP8 as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
