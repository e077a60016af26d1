"""Collectives of a World. Every operation is bounded: it returns, or raises RankLost naming a rank."""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn
from weakref import WeakSet

import torch
import torch.distributed as dist

from eprt.config import ParallelConfig
from eprt.errors import UsageError
from eprt.tokens import as_bytes
from eprt.world.guard import Guard
from eprt.world.process import restarts
from eprt.world.shared_exchange import MAX_WORDS, SharedExchange

CORES = os.cpu_count() or 1  # of the host: ranks that are pinned apart see few each, but share none
SPIN_S = 300e-6
LONGEST_SLEEP_S = 1e-3
POLL_S = 1e-3  # a wait for a GPU only polls for this long; then it also asks for the peers, and sleeps in between
BROKEN_OFF = -1  # in a call log, for a layer: its last call was dispatched and never combined

# torch 2.13 renamed these; 2.10 has the old names only.
_all_gather: Callable[..., dist.Work | None] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., dist.Work | None] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Membership:
    """One rank's place among the ranks of a World.

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


@dataclass(frozen=True)
class Step:
    """The step that `World.step` opened; the same on every rank.

    Attributes:
        number: the caller's own count, or the World's.
        tokens: [W], every rank's num_tokens.
        words: [W], every rank's words.
        buckets: sizes that R is rounded up to, ascending (`Collectives.buckets`).
    """

    number: int
    tokens: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]
    buckets: tuple[int, ...] = ()

    @cached_property
    def tokens_per_rank(self) -> int:
        """Returns R of every layer called inside: the largest num_tokens, at least 1, rounded up to a bucket."""
        return rounded(max(1, *self.tokens), self.buckets)


def rounded(tokens_per_rank: int, buckets: Sequence[int]) -> int:
    """Returns the smallest of the ascending `buckets` that holds R; R itself above the largest."""
    return next((rows for rows in buckets if rows >= tokens_per_rank), tokens_per_rank)


@dataclass
class CallLog:
    """The layer calls that this rank's host made in a step: the next step compares them.

    Attributes:
        calls: (layer number, fingerprint) of each, in order.
    """

    calls: list[tuple[int, int]] = field(default_factory=list)
    failed: bool = False

    @property
    def fingerprint(self) -> int:
        """Returns 63 bits; 0 where a whole step passed without a call, as one that replays a CUDA graph does."""
        if not self.calls:
            return int(self.failed)
        raw = array("q", [fingerprint for _, fingerprint in self.calls]).tobytes()
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little") >> 1

    @property
    def settings(self) -> dict[str, str]:
        """Returns what the fingerprint was made of, for the table of ranks that disagree."""
        names = " ".join(
            f"({layer} broken off)" if fingerprint == BROKEN_OFF else str(layer) for layer, fingerprint in self.calls
        )
        return {"layers of the last step": f"{names or 'none'}{', then an error' if self.failed else ''}"}


class Collectives:
    """One rank's view of a World: payload travels over its process group, agreement over its control group.

    Ranks that were lost keep their numbers (`World.shrink`): what is gathered has a row for each of the `size` ranks,
    which stays empty for those.

    Attributes:
        rank, size, device, parallel: see `Membership`.
        group: process group of the ranks that are left; None where this is the only one.
        alive: [W], False for ranks that the others went on without.
        timeout_s: how long any operation waits for a peer.
        current_step: the step that `World.step` opened, for the layers called inside it; None outside. It is the
            World's, not a thread's: threads that a step starts see it.
        step_number: of the current step, or else of the last one; compared between ranks in every header.
        completed_step: number of the last step that this rank left without an exception; -1: none.
        generation: counts restarts of the job and `shrink`s; handles of another generation are refused.
        nonce: drawn when the ranks met, compared in every header; 0 in a world of one.
        closed: whether the World has ended; it has in a forked child of its process.
        buckets: sizes that the R of a step is rounded up to, ascending; what graphs were captured for.
        graphs: CUDA graphs that hold this World's collectives, as long as anybody keeps them; `close` resets them.
        padding: inside a batch that was filled up to a bucket: bool [rows, 1], True where a row holds no token.
    """

    def __init__(self, membership: Membership, timeout_s: float) -> None:
        self.rank, self.size = membership.rank, membership.size
        self.device, self.parallel = membership.device, membership.parallel
        self.group = membership.group
        self.alive: tuple[bool, ...] = (True,) * membership.size
        self.timeout_s = timeout_s
        self.current_step: Step | None = None
        self.step_number = 0
        self.completed_step = -1
        self.generation = restarts()
        self.nonce = 0
        self.closed = False
        self.buckets: tuple[int, ...] = ()
        self.padding: torch.Tensor | None = None
        self.graphs: WeakSet[Any] = WeakSet()
        self._ranks = list(range(membership.size))  # those that are alive
        self._attention_tp_group = membership.attention_tp_group
        self._control: dist.ProcessGroupGloo | None = None
        self._guard: Guard | None = None
        self._shared: SharedExchange | None = None
        # gloo's threads let go of tensors a little after the operation. The last to let go needs the GIL, and a thread
        # that asks for it while the interpreter ends takes the process down: so these outlive the operation.
        self._moved: tuple[torch.Tensor, ...] = ()
        self._call_log = CallLog()
        self._abandoned = False  # a collective was left unfinished: torch would wait for it at the end

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

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, missing: int = 0) -> None:
        """Gathers every rank's x[n] to out[W * n], in rank order. Rows of lost ranks hold `missing`."""
        self.require_open()
        alone, whole = len(self._ranks) == 1, len(self._ranks) == self.size
        found = x if alone else out if whole else x.new_empty((len(self._ranks) * x.shape[0], *x.shape[1:]))
        if not alone:
            self._moved = as_bytes(found), as_bytes(x)
            self._run(_all_gather(*self._moved, group=self.group, async_op=True))
        if found is not out:
            rows = as_bytes(found).view(len(self._ranks), *x.shape)
            self._spread(as_bytes(out).view(self.size, *x.shape), rows, missing)

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor) -> None:
        """Sums this rank's n rows of every rank's x[W * n] to out[n]."""
        self.require_open()
        x = x.contiguous()
        if len(self._ranks) < self.size:
            parts = x.chunk(self.size)
            x = torch.cat([parts[rank] for rank in self._ranks])
        if len(self._ranks) == 1:
            out.copy_(x)
        elif self.device.type == "cuda":
            _reduce_scatter(out, x, group=self.group)
        else:
            # gloo's reduce-scatter work never reports completion (torch 2.13), so it can't be bounded. The same bytes
            # as an all-to-all can, and the sum is then made in float32.
            received, splits = torch.empty_like(x), [out.shape[0]] * len(self._ranks)
            self._exchange(received, x, splits, splits)
            out.copy_(received.view(len(self._ranks), *out.shape).sum(0, dtype=torch.float32))

    def all_to_all(self, out: torch.Tensor, x: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        """Sends rows of x to ranks by in_splits [W]; out receives theirs by out_splits, which must be what they send.
        Both are 0 for lost ranks."""
        self.require_open()
        if len(self._ranks) == 1:
            out.copy_(x)
        else:
            self._exchange(out, x, *([splits[rank] for rank in self._ranks] for splits in (out_splits, in_splits)))

    def _exchange(self, out: torch.Tensor, x: torch.Tensor, out_splits: list[int], in_splits: list[int]) -> None:
        self._moved = out, x = as_bytes(out), as_bytes(x)
        self._run(dist.all_to_all_single(out, x, out_splits, in_splits, group=self.group, async_op=True))

    def _spread(self, out: torch.Tensor, found: torch.Tensor, missing: int = 0) -> None:
        """Copies a row of each rank that is left, [A, ...], to its place in out [W, ...]."""
        if len(self._ranks) < self.size:
            out.fill_(missing)
        for rank, row in zip(self._ranks, found, strict=True):
            out[rank] = row

    def gather_attention_tp(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers [n, ...] of each attention-TP rank to [attention_tp_size * n, ...] on all of them."""
        self.require_open()
        size = self.parallel.attention_tp_size
        if size == 1:
            return x
        out = x.new_empty((size * x.shape[0], *x.shape[1:]))
        first = self.rank - self.attention_tp_rank
        self._moved = out, x.contiguous()
        self._run(_all_gather(*self._moved, group=self._attention_tp_group, async_op=True), range(first, first + size))
        return out

    def finish_device_work(self, ranks: Iterable[int] | None = None, check: Callable[[], None] = lambda: None) -> None:
        """Waits on the host, bounded, for what it has issued to this rank's stream, and for `ranks` (None: all) alone.
        A kernel that waits for a lost rank doesn't return, so `check` asks for what is known of them meanwhile.

        Raises RankLost: the World's verdict or, after its timeout, the rank that is furthest behind. And what `check`
        raises.
        """
        if self.device.type != "cuda":
            return
        done, begun = torch.cuda.Event(), time.monotonic()
        done.record()
        while not done.query():
            if (waited := time.monotonic() - begun) > POLL_S:
                check()
                self.raise_if_lost(waited, ranks)
                time.sleep(50e-6)

    def compares_headers(self, full: bool) -> bool:
        """Returns whether calls compare headers: always on gloo, on GPUs with full validation, never in capture."""
        if len(self._ranks) == 1:
            return False
        if self.device.type == "cpu":
            return True
        return full and not torch.cuda.is_current_stream_capturing()

    def gather_control(self, x: torch.Tensor) -> torch.Tensor:
        """Gathers a CPU tensor x[n] of each rank to [W, n], over the control group; zeros for lost ranks."""
        self.require_open()
        if len(self._ranks) == 1:
            found = x[None]
        else:
            if self._control is None:
                raise UsageError("the world is closed; make a new one")
            found = x.new_empty((len(self._ranks), *x.shape))
            gather = self._control._allgather_base  # pyright: ignore[reportAttributeAccessIssue]
            self._moved = found.view(-1), x.flatten()
            self._wait(gather(*self._moved))
        if len(self._ranks) == self.size:
            return found
        out = x.new_empty((self.size, *x.shape))
        self._spread(out, found)
        return out

    def gather_words(self, words: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns every rank's int64 words, equally many, in rank order; zeros for lost ones. Through shared memory
        where all ranks are on one host, else over the control group."""
        self.require_open()
        if self.size == 1:
            return [tuple(words)]
        if self._shared is None or len(words) > MAX_WORDS:
            own = torch.tensor(words, dtype=torch.int64, device="cpu")
            return [tuple(row) for row in self.gather_control(own).tolist()]
        if self._guard is not None:
            self._guard.note()
        found = self._shared.gather(words, self._pauses(self._ranks))
        if len(self._ranks) == self.size:
            return found
        rows = dict(zip(self._ranks, found, strict=True))
        return [rows.get(rank, (0,) * len(words)) for rank in range(self.size)]

    @property
    def shares_words(self) -> bool:
        """Returns whether `gather_words` goes through shared memory."""
        return self._shared is not None

    def log_call(self, layer: int, fingerprint: int) -> None:
        """Records that this rank's host calls a layer inside a step: the next step compares what the ranks called."""
        if self.current_step is not None:
            self._call_log.calls.append((layer, fingerprint))

    def take_call_log(self) -> CallLog:
        """Returns what was logged since the last time, and starts a new log."""
        log, self._call_log = self._call_log, CallLog()
        return log

    def note(self, where: str, layer: int | None = None) -> None:
        """Records this rank's progress, as peers will read it in a RankLost."""
        if self._guard is not None:
            self._guard.note(where if layer is None else f"{where} of layer {layer}, step {self.step_number}")

    def raise_if_lost(self, waited_s: float = 0.0, ranks: Iterable[int] | None = None) -> None:
        """Raises RankLost if the world already has a verdict; for who has waited for `ranks` (None: all), also if one
        of them has ended or, after the World's timeout, is behind."""
        if self._guard is not None:
            ranks = self._ranks if ranks is None else ranks
            self._guard.raise_if_lost(ranks if waited_s else ())
            if waited_s > self.timeout_s:
                self._guard.raise_behind(waited_s, ranks)

    def add_buckets(self, buckets: Iterable[int]) -> None:
        """Adds sizes that graphs are captured for, equal on every rank. A rank that runs eagerly takes the same R, so
        it agrees with ranks that replay a graph."""
        self.buckets = tuple(sorted({*self.buckets, *buckets}))

    def require_open(self) -> None:
        """Raises UsageError after `close`."""
        if self.closed:
            raise UsageError("the world is closed, as it is in any forked child; make a new one")

    def require_whole(self, what: str) -> None:
        """Raises UsageError once a rank is lost."""
        if not all(self.alive):
            lost = [rank for rank, alive in enumerate(self.alive) if not alive]
            raise UsageError(f"{what} needs all ranks, and ranks {lost} are lost: restart the job")

    @property
    def broken(self) -> bool:
        """Returns whether peers may never reach a common call: a rank is lost, or this one leaves by an error."""
        return self._guard is not None and self._guard.failing

    @property
    def whole(self) -> bool:
        """Returns whether all ranks may still reach a common call: none is lost, or has left."""
        return all(self.alive) and not self.broken and (self._guard is None or not self._guard.somebody_ended)

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise UsageError("a World, and what holds one, as layers do, can't be copied or pickled: make it anew")

    def _run(self, work: dist.Work | None, ranks: Iterable[int] | None = None) -> None:
        """Waits for payload: on CUDA the stream waits, on CPU the host does."""
        if work is None:
            return
        if self.device.type == "cuda":
            work.wait()
            self._moved = ()  # the next one may be long in coming
        else:
            self._wait(work, ranks)

    def _wait(self, work: dist.Work, ranks: Iterable[int] | None = None) -> None:
        """Waits for the work, or raises RankLost naming one of the `ranks` that take part (None: all)."""
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
            if self._guard is not None:
                self._guard.raise_broken(error)
            raise

    def _pauses(self, ranks: Iterable[int]) -> Iterator[None]:
        """Pauses between two looks at what one of the `ranks` still has to do. Raises RankLost where it won't be done.

        At first it only yields the CPU; then it sleeps, longer the longer it has waited, so that ranks that share cores
        don't starve the one they wait for. Where ranks outnumber the cores, it sleeps at once.
        """
        start = time.monotonic()
        spin_s = SPIN_S if (self.parallel.ranks_per_host or self.size) <= CORES else 0.0
        while True:
            waited = time.monotonic() - start
            if waited < spin_s:
                os.sched_yield()
            else:
                self.raise_if_lost(waited, ranks)
                time.sleep(min(waited / 10, LONGEST_SLEEP_S))
            yield
