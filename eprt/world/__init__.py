"""A World is the set of ranks that share one layer's experts, their process groups, and the memory they share.

A `World` numbers its ranks from 0 whatever the host engine's numbering is. Rank r is
`dp_rank * attention_tp_size + attention_tp_rank` before the layer and `ep_rank * moe_tp_size + moe_tp_rank` inside it.
Payload moves over `group` (NCCL on CUDA, gloo on CPU), agreement over a gloo control group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from eprt.config import ParallelConfig
from eprt.errors import ConfigError, RankLost, UsageError
from eprt.garbage import without_collections
from eprt.world.agree import Header, agree_step, exchange
from eprt.world.collectives import Collectives, Membership, Step
from eprt.world.groups import (
    group_of_ranks,
    host_device,
    init_default_group,
    layout_in_words,
    local_device,
    make_meshes,
    place,
    refusals_told,
    rendezvous_in_environment,
    rendezvous_in_group,
    start_guard,
    start_up,
)
from eprt.world.guard import Guard
from eprt.world.lifecycle import Lifecycle, SharedResources, Warmable, not_warmable
from eprt.world.process import require_timeout
from eprt.world.shrink import Shrinking, Survivors

logger = logging.getLogger("eprt")
T = TypeVar("T")

DEFAULT_TIMEOUT_S = 60.0


class World(Collectives):
    """The ranks that share one layer's experts. Make one with `from_env`, `from_group` or `from_mesh`.

    One timeout holds for everything: an operation that a peer doesn't join within `timeout_s` raises RankLost naming
    that peer; a peer without a sign of life raises after min(10 s, timeout_s / 2). The process groups' own timeouts lie
    at twice that, as a last net.

    Attributes:
        warm: whether `warmup` is over, so that lazy compiling or allocating is an error.
        num_dispatchers: how many were built, closed ones included.
        attention_mesh, moe_mesh: DeviceMesh views ("dp", "attention_tp") and ("ep", "moe_tp"); None in a world of one
            around a group that the host engine owns, and after `close`.
    """

    def __init__(
        self, membership: Membership, timeout_s: float, *, owns_default: bool = False, guard: Guard | None = None
    ) -> None:
        require_timeout(timeout_s)
        super().__init__(membership, timeout_s)
        self.warm = False
        self.num_dispatchers = 0
        self.attention_mesh: DeviceMesh | None = None
        self.moe_mesh: DeviceMesh | None = None
        self._resources = SharedResources()
        self._lifecycle = Lifecycle(self, owns_default)
        group = membership.group
        if group is not None and self.size > 1:
            with start_up(timeout_s) as guards:
                if guard is None:
                    layout = layout_in_words(membership.parallel, self.device)
                    met = rendezvous_in_group(dist.get_process_group_ranks(group), self.rank, timeout_s, layout)
                    guard = start_guard(met, timeout_s, self.device)
                guards.append(guard)
                self._lifecycle.start(guard)
        self._shrinking = Shrinking(self, self._lifecycle, self._resources)

    @classmethod
    def from_env(
        cls,
        device: str | None = None,
        *,
        attention_tp_size: int = 1,
        moe_tp_size: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> World:
        """Makes a World from torchrun's environment, or a World of one rank without it.

        Initialises torch.distributed (and ends it in `close`) unless the host already did; then the host's default
        group is used and left alone, and no variables of torchrun are needed.

        Args:
            device: "cpu" or "cuda"; None takes CUDA where there is one GPU for each local rank (LOCAL_WORLD_SIZE, 1
                without it).

        Raises:
            ConfigError: sizes that don't divide, a GPU that isn't there, or an environment that isn't torchrun's.
            RankLost: a rank didn't arrive within the timeout, or was lost on the way.
            WorldMismatch: the ranks give other sizes or devices, or run other versions.
        """
        require_timeout(timeout_s)
        rank, size = place()
        with refusals_told(rank, size, timeout_s):
            parallel, where = ParallelConfig(size, attention_tp_size, moe_tp_size), local_device(device)
        if size == 1 and not dist.is_initialized():
            return cls(Membership(0, 1, where, parallel), timeout_s)
        owns_default = not dist.is_initialized()
        with start_up(timeout_s) as guards:
            layout = layout_in_words(parallel, where)
            if owns_default:
                met = rendezvous_in_environment(rank, size, timeout_s, layout)
            else:
                met = rendezvous_in_group(list(range(size)), rank, timeout_s, layout)
            guard = start_guard(met, timeout_s, where)
            guards.append(guard)
            if owns_default:
                guard.bounded(lambda: init_default_group(met, where, timeout_s), timeout_s)
            meshes, made = guard.bounded(lambda: make_meshes(where, parallel, timeout_s), timeout_s)
        groups = dist.distributed_c10d._get_default_group(), meshes[0].get_group("attention_tp")
        membership = Membership(dist.get_rank(), dist.get_world_size(), where, parallel, *groups)
        world = cls(membership, timeout_s, owns_default=owns_default, guard=guard)
        world.attention_mesh, world.moe_mesh = meshes
        world._lifecycle.own_groups = made
        return world

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        *,
        attention_tp_group: dist.ProcessGroup | None = None,
        moe_tp_size: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> World:
        """Makes a World around a process group that a host engine owns. Collective over `group`, which is left alone.

        Args:
            group: None is torch.distributed's default group.
            device: "cuda" without an index is the GPU that this process made current; no other is chosen.
            attention_tp_group: ranks that hold the same tokens, consecutive in `group`; None: every rank has its own.

        Raises:
            ConfigError: attention-TP ranks that aren't consecutive, sizes that don't divide, a process that isn't in
                the group, or no such device.
            UsageError: torch.distributed isn't initialised.
        """
        require_timeout(timeout_s)
        group = dist.group.WORLD if group is None else group
        if group is None:
            raise UsageError(
                "World.from_group before torch.distributed is initialised: call init_process_group first, or use "
                "World.from_env"
            )
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        attention_tp_size = 1 if attention_tp_group is None else dist.get_world_size(attention_tp_group)
        if min(rank, attention_tp_size) < 0:
            name = "group" if rank < 0 else "attention_tp_group"
            raise ConfigError(f"this process is not in the {name}: make the World on the ranks that are")
        parallel = ParallelConfig(size, attention_tp_size, moe_tp_size)
        if attention_tp_group is not None:
            first = rank // attention_tp_size * attention_tp_size
            expected = dist.get_process_group_ranks(group)[first : first + attention_tp_size]
            if (ranks := dist.get_process_group_ranks(attention_tp_group)) != expected:
                raise ConfigError(
                    f"attention_tp_group holds torch.distributed's ranks {ranks}: expected {expected}, the consecutive "
                    "ones of the world; order the mesh as (dp, attention_tp)"
                )
        return cls(Membership(rank, size, host_device(device), parallel, group, attention_tp_group), timeout_s)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        *,
        attention_tp_dim: str | None = None,
        moe_tp_size: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> World:
        """Makes a World around a DeviceMesh that a host engine owns. Collective over the mesh's ranks.

        Args:
            mesh: 1-D (every rank has its own tokens) or 2-D with the attention-TP dimension last. On CUDA, this
                process has made its GPU the current one.
            attention_tp_dim: name of that last dimension.

        Raises:
            ConfigError: another number of dimensions, the named dimension isn't the last, or this process isn't in it.
        """
        require_timeout(timeout_s)
        if mesh.get_coordinate() is None:
            raise ConfigError("this process is not in the mesh: make the World on the ranks that are")
        names = mesh.mesh_dim_names or ()
        if mesh.ndim == 1 and attention_tp_dim is None:
            group, attention = mesh.get_group(), None
        elif mesh.ndim == 2 and attention_tp_dim is not None and names[-1:] == (attention_tp_dim,):
            group = group_of_ranks(mesh.mesh.flatten().tolist(), timeout_s)
            attention = mesh.get_group(attention_tp_dim)
        else:
            raise ConfigError(
                f"mesh has dimensions {names or mesh.ndim}, attention_tp_dim is {attention_tp_dim!r}: expected a 1-D "
                "mesh, or a 2-D mesh whose last dimension is attention_tp_dim"
            )
        return cls.from_group(
            group, mesh.device_type, attention_tp_group=attention, moe_tp_size=moe_tp_size, timeout_s=timeout_s
        )

    @contextmanager
    def step(self, num_tokens: int, *, number: int | None = None, words: Sequence[int] = ()) -> Iterator[Step]:
        """Opens a step, one forward of the whole model: the ranks agree once for all layers inside. Collective.

            with world.step(hidden.shape[0], number=n) as step:  # 0 on a rank that has nothing
                model(...)

        Layers inside take R from the step unless they are given `tokens_per_rank`, and on GPUs they compare nothing
        more (gloo worlds compare every call, see `agree.py`). A CUDA graph replayed inside is of that R, too.

        What the caller keeps: each rank calls the same layers in the same order, idle ones with T = 0, and none with
        more tokens than its `num_tokens`. Several forwards fit into one step (a draft model's and the target's): say
        the largest. So do prefill on some ranks and decode on others: R is then the prefill's, and `words` tell who
        does what. Under attention TP the ranks of a group say the tokens that they hold together. Threads of a step
        see it; two steps at once are refused.

        An exception passes through. If it was the same on all ranks, go on with the next step; if this rank alone
        raised, its peers wait in the step until it ends its World or process, and are told then (RankLost). On GPUs
        they may get NaN for this rank's part instead of waiting: they are told as they begin their next step, also if
        this rank goes on (WorldMismatch).

        Args:
            num_tokens: T, most tokens this rank hands to a layer inside.
            number: the host's own count of its steps, equal on all ranks: what finds a rank that skipped one. None:
                this World's count of these calls, which can't.
            words: at most 8 int64 for the other ranks (done, bucket, phase); the same number on every rank.

        Raises:
            InputError: not such numbers; the same on every rank.
            WorldMismatch: a table, the same on every rank: other step numbers, another call, other numbers of tokens
                in one attention-TP group, or the ranks' hosts called different layers in their last step.
            RankLost: a peer is gone.
            UsageError: the World is closed, or a step is open.
        """
        self.require_open()
        if self.current_step is not None:
            raise UsageError(
                f"step {self.current_step.number} of this World is open: leave it before the next one begins (several "
                "forwards fit into one step)"
            )
        try:
            step = agree_step(self, num_tokens, number, words)
        except RankLost as lost:
            if self._lifecycle.asked_to_leave and lost.why == "left":  # it was asked, too, and was a step ahead
                self._leave_as_asked()
            raise
        self.step_number = step.number
        self.current_step = step
        try:
            yield step
        except BaseException:
            self.current_step = None
            self._call_log.failed = True
            raise
        self.current_step = None
        self.completed_step = step.number
        if self._lifecycle.asked_to_leave:
            self._leave_as_asked()

    def drain_on_sigterm(self) -> None:
        """Lets SIGTERM end this rank only after the step in flight: it closes its World, exits with code 0, and its
        peers are told that it `left`. Ranks that are all asked at once all end that way. From the main thread.

        Opt in, since a signal's handler belongs to the program; the one before is run by nobody until `close`, but in
        forked children. Raises UsageError in another thread, and after `close`.
        """
        self.require_open()
        self._lifecycle.drain_on_sigterm()

    def _leave_as_asked(self) -> NoReturn:
        logger.info("rank %d leaves after step %d: it got SIGTERM", self.rank, self.step_number)
        self.close()
        raise SystemExit(0)

    def barrier(self) -> None:
        """Waits until every rank is here. Raises WorldMismatch, on every rank, where one makes another call."""
        exchange(self, Header("barrier"))

    def shrink(self, leaving: Iterable[int] = ()) -> Survivors:
        """Goes on without lost ranks after a RankLost, or without ranks that leave. Collective over those that stay.

            try:
                with world.step(hidden.shape[0]) as step:
                    output = layer(hidden)
            except RankLost:  # on every rank, in this step or, where it had all it needed of this one, the next
                found = world.shrink()  # raises RankLost where that can't be: then restart the job
                graphs.capture()  # if there are any

        For layers built with `RuntimeConfig(on_rank_lost="continue")` or "renormalize". Ranks keep their numbers, and
        `alive` says who is left. The experts of the lost ranks count as slots without an expert, unless another rank
        holds a replica. What was in flight is discarded: outputs of the step that raised, and handles that are open.
        What the ranks do together they do without the lost ones from now on, new layers over no memory of shared GPUs
        included. Graphs have to be captured again. A lost rank comes back by a restart of the job.

        Ranks that are lost meanwhile are left out, too; so is one that doesn't come within the World's timeout (twice
        that on GPUs), and a rank whose attention-TP group lost another. Such a rank, should it live, hears that it is
        out. Ranks that are cut off can't go on beside the others: more than half of those that didn't end for certain
        have to agree, or half with the lowest of them. The control store isn't asked.

        Ranks also leave on purpose, between two steps: every other rank calls `shrink(leaving=...)`. A rank that leaves
        is asked for nothing, and may close its World or end once the others have returned; in between it hears that
        they left. All but the discarding of a step is as after a loss; rank 0 may leave, too.
        At interpreter exit a process that went on leaves at once: with code 0, or 1 after an uncaught exception.

        Args:
            leaving: the ranks that leave, equal on all that stay; whole attention-TP groups.

        Raises:
            RankLost: it can't be: no rank is named, this rank is among the lost, too few are left to be sure that no
                others go on, or a kernel that waits for a lost rank can't be freed.
            InputError: `leaving` names this rank, no rank, or a part of an attention-TP group.
            WorldMismatch: ranks name different ones that leave; a table, the same on all of them. Restart the job.
            UsageError: no rank is lost or leaves, a step is open, the World is closed, or memory that ranks share can't
                go on.
        """
        return self._shrinking.shrink(leaving)

    def resource(self, key: Hashable, make: Callable[[], T], close: Callable[[T], None] | None = None) -> T:
        """Returns memory shared by ranks, made once per key and counted; `key` must name all that is baked into it.

        Making is usually collective: every rank asks in the same order. Freed by the last `release`, or by `close`.
        """
        self.require_open()
        with torch.inference_mode(False):  # it outlives this call, and the next may write to it outside of that mode
            return self._resources.acquire(key, make, close)

    def held(self, key: Hashable) -> Any:
        """Returns what `resource(key)` made, or None if this rank doesn't hold it. Counts no user; not collective."""
        return self._resources.held(key)

    def release(self, key: Hashable) -> None:
        """Gives one `resource(key)` back. A key that `close` already freed is ignored."""
        self._resources.release(key)

    @without_collections()
    def warmup(self, *things: Warmable) -> None:
        """Compiles, tunes and allocates now on every rank, then waits for all. Lazy work afterwards is an error.

        Collective.

        Raises:
            WorldMismatch: the ranks warm up different numbers of things, or one makes another call.
            InputError: something without `warmup`.
        """
        self.require_open()
        self.warm = False
        for number, thing in enumerate(things):
            exchange(self, Header("warmup", -1, number), not_warmable(thing))
            thing.warmup()
        self.barrier()
        self.warm = True

    def require_cold(self, what: str) -> None:
        """Raises UsageError if `what` (compiling, allocating) is attempted after `warmup`."""
        if self.warm:
            raise UsageError(
                f"{what} after World.warmup(): pass this layer to warmup() so that no rank stalls its peers"
            )

    def close(self) -> None:
        """Frees shared memory, stops the guard, and ends what this World started. Idempotent.

        The threads and sockets of the process groups it made are given back, too, unless a rank was lost: those of
        groups with unfinished work stay until the process ends.

        Without torchrun the control store lives in rank 0, which therefore waits for the others to close, too, for
        at most the World's timeout.
        """
        if self.closed:
            return
        self.closed = True
        try:
            self._resources.close()
        finally:
            self.attention_mesh = self.moe_mesh = None
            self._lifecycle.end()

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        left = error is None or (isinstance(error, SystemExit) and not error.code)
        if not left and self._guard is not None:
            self._guard.leave(f"raised: {type(error).__name__}: {error}")
        self.close()
