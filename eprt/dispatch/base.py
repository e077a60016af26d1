"""How tokens travel: the contract every dispatcher keeps.

`dispatch` checks the call, agrees on R with the peers and moves the payload; `combine` brings the weighted sums back.
A dispatcher fills in at least `_dispatch` and `_combine`; its `DispatcherSpec` is a row of `eprt.dispatch.DISPATCHERS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NoReturn
from weakref import WeakValueDictionary

import torch

import eprt.dispatch.call as checks
from eprt.config import MoEConfig, RuntimeConfig, TokenFormat
from eprt.dispatch.call import Capacity, Dispatched, Handle, LostExperts
from eprt.dispatch.spec import DispatcherSpec
from eprt.errors import ConfigError, EprtError, UsageError
from eprt.placement import ExpertPlacement
from eprt.quant import encode_payload
from eprt.rounding import ceil_div
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, TopK
from eprt.world import World
from eprt.world.agree import Header, exchange, fingerprint_of
from eprt.world.collectives import BROKEN_OFF


class Dispatcher(ABC):
    """Carries one layer's tokens over a World.

    Every rank makes the same calls in the same order; several handles may be open at once. A rank without tokens
    calls with T = 0. Making one allocates nothing shared: `make_dispatcher` compares the ranks' settings first.

    Args:
        world: who takes part; owns all shared memory.
        config: the layer's maths, its experts counted in slots (`ExpertPlacement.in_slots`).
        runtime: capacity, payload, validation.
        token_format: one of `spec.formats`; None: the first.
        layer: number that the ranks compare, so that a wrong layer order is caught.

    Attributes:
        spec: its row of the table.
        placement, shard: all ranks' slots, and this rank's.
        payload_scale: second-level scale of `nvfp4` tokens, float32 [1] on the world's device, equal on all ranks;
            1 until `make_dispatcher` sets it. None for other tokens.
        settings, fingerprint: settings that must be equal on all ranks, and their hash.

    Raises:
        ConfigError: an option of `runtime` that this dispatcher doesn't have, slots that don't divide over the ranks.
    """

    spec: ClassVar[DispatcherSpec]
    closed = False
    _calls = 0
    _generation: int | None = None  # of the World when it made its last call
    _lost: LostExperts | None = None

    def __init__(
        self,
        world: World,
        config: MoEConfig,
        runtime: RuntimeConfig,
        token_format: TokenFormat | None = None,
        layer: int = 0,
    ) -> None:
        if lacks := self.spec.lacks(runtime):
            raise ConfigError(f"{self.spec.name}: {lacks}")
        self.world, self.config, self.runtime, self.layer = world, config, runtime, layer
        self.token_format: TokenFormat = token_format or self.spec.formats[0]
        self._set_up()
        self.placement = ExpertPlacement(config.num_experts, world.parallel)
        if not self.placement.is_identity:
            raise ConfigError(
                f"{config.num_experts} experts don't divide over {world.parallel.ep_size} expert-parallel ranks: a "
                "dispatcher counts slots, so give it ExpertPlacement.in_slots(config) and ids of slots (a layer does)"
            )
        self.shard = self.placement.shard(world.rank)
        self.capacity = Capacity(runtime.max_tokens_per_rank, self.bytes_per_token())
        packed = runtime.payload == "nvfp4"
        self.payload_scale = torch.ones(1, dtype=torch.float32, device=world.device) if packed else None
        self.settings = checks.settings_of(self.spec.name, world, config, runtime)
        self.fingerprint = fingerprint_of(self.settings)
        self.full_validation = runtime.validate == "full"
        # The only dtype of tokens that it takes, and its name; empty: bf16 and float32.
        self.dtypes = () if "f32" in self.spec.payloads else ((torch.bfloat16, self.spec.name),)
        self._open: WeakValueDictionary[int, Handle] = WeakValueDictionary()

    def _set_up(self) -> None:
        """Completes the construction; allocates nothing shared. Raises ConfigError for what the library refuses."""

    @abstractmethod
    def _dispatch(self, hidden: Payload, topk: TopK, handle: Handle) -> FlatTokens | ExpertMajorTokens:
        """Moves payload, and keeps what combine needs in `handle.state`. All checks are done, R is agreed."""

    @abstractmethod
    def _combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Brings the sums back: [T, H] in `handle.dtype`."""

    def bytes_per_token(self) -> int:
        """Returns the bytes of kept buffers per rank and unit of max_tokens_per_rank. 0: nothing is kept."""
        return 0

    def max_rows(self) -> int:
        """Returns the most rows that an executor can get: N of FlatTokens, or M of ExpertMajorTokens."""
        return self.world.size * self.runtime.max_tokens_per_rank

    def output_buffer(self, handle: Handle) -> torch.Tensor | None:
        """Returns the memory into which the executor may write so that combine needs no copy, or None."""
        return None

    def _shared(self) -> object | None:
        """Returns the memory whose buffers its calls take, whichever dispatcher of equal geometry made it; None before
        that, and without one."""

    def _require_buffer(self) -> None:
        """Raises UsageError if that memory has no free buffer."""

    def _wait(self, handle: Handle) -> None:
        """Receives what a deferred dispatch only asked for. Dispatchers that can't defer have received it already."""

    def _release(self, handle: Handle) -> None:
        """Gives back what a handle holds that closes without having been combined."""

    def _close(self) -> None:
        """Gives back what the dispatcher holds."""

    def warmup(self) -> None:
        """Allocates, compiles and connects, by a dispatch and combine of a token that no expert wants. Collective."""
        token, topk = checks.unwanted_token(self.config, self.world.device)
        handle = Handle(self, -1, 1, 1, token.dtype, generation=self.world.generation)
        tokens = self._dispatch(self._encode(token), topk, handle)
        self._combine(token.new_zeros((*tokens.hidden.data.shape[:-1], token.shape[1])), handle)
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk: TopK,
        tokens_per_rank: int | None = None,
        *,
        group_tokens: int = 0,
        wait: bool = True,
    ) -> Dispatched:
        """Sends T tokens to the ranks that hold their experts.

        Args:
            hidden_states: [T, H] bf16 or float32 on the world's device, T >= 0. Read until combine returns. Gradients
                don't travel.
            topk: their routing.
            tokens_per_rank: R, the same on every rank, T <= R <= capacity. None takes it from the step that is open
                (`World.step`), or agrees on it by a small collective, which a CUDA graph capture can't.
            group_tokens: tokens that this rank's attention-TP group holds together, compared within the group.
            wait: False returns once the sends are issued, where the dispatcher can (deepep), so that other work
                overlaps them; then call `handle.wait()` before anything reads the tokens.

        Raises:
            InputError, CapacityError: bad input on some rank; the same error on every rank that compares headers.
            WorldMismatch: the ranks make different calls.
            RankLost: a peer is gone.
            UsageError: the dispatcher or its world is closed.
        """
        rows = self.agree(hidden_states, topk, tokens_per_rank, group_tokens=group_tokens)
        return self.send(hidden_states, topk, rows, wait=wait)

    def agree(
        self,
        hidden_states: torch.Tensor,
        topk: TopK,
        tokens_per_rank: int | None = None,
        *,
        group_tokens: int = 0,
        cut: bool = False,
        checked: bool = False,
    ) -> int:
        """Does the first half of `dispatch`: checks the call, and agrees on R with the peers. `send` is the second.

        Args:
            cut: an R over the capacity is returned, not refused: the caller sends in rounds, each agreed on by itself.
            checked: the caller has checked `hidden_states`; a layer does, before it routes them.
        """
        world, capturing, error = self.world, self._capturing(), None
        self._require_world()
        step = world.current_step if tokens_per_rank is None else None
        if step is not None:
            tokens_per_rank = self._rows_of_step()
        facts = self._calls, 0, tokens_per_rank, torch.bfloat16
        try:
            self._require_open()
            checks.check_call(hidden_states, topk, self.config, world.device, None if checked else self.dtypes)
            checks.check_rows(tokens_per_rank, self.capacity, capturing and world.size > 1, cut)
            if not capturing and (self.full_validation or world.device.type == "cpu"):
                topk.check_ids(self.config.num_experts)
            if not capturing and self.full_validation:
                topk.check_weights()
            self._require_buffer()
            if step is not None:
                checks.check_said(step, world, hidden_states.shape[0], group_tokens)
            facts = self._calls, hidden_states.shape[0], tokens_per_rank, hidden_states.dtype
        except EprtError as found:
            error = found
        return self._compare("dispatch", facts, error, group_tokens, cut)

    def _compare(
        self,
        operation: str,
        facts: tuple[int, int, int | None, torch.dtype],
        error: EprtError | None,
        group_tokens: int = 0,
        cut: bool = False,
    ) -> int:
        """Returns R of a call. Compares headers with the peers where the World asks for it, else checks locally.

        Args:
            operation: "dispatch" or "combine".
            facts: the number of the call, T, R if it is known, and the dtype of the rows.
            error: the fault that this rank found in its call; raised on every rank that compares, here anyway.
        """
        call, num_tokens, given, dtype = facts
        derive = given is None and operation == "dispatch"
        if self.world.size == 1 or not (derive or self.world.compares_headers(self.full_validation)):
            if error is not None:
                raise error
            return given if given and num_tokens <= given else self.capacity.agree((num_tokens,), given or 0, cut)
        rows, own = 0 if error else given or 0, self.fingerprint
        header = Header(operation, self.layer, call, num_tokens, rows, dtype, own, group_tokens, settings=self.settings)
        tokens, _ = exchange(self.world, header, error)
        return self.capacity.agree(tokens, given or 0, cut)

    def send(self, hidden_states: torch.Tensor, topk: TopK, rows: int, *, wait: bool = True) -> Dispatched:
        """Does the second half of `dispatch`: sends the tokens that `agree` has checked or, where R was over the
        capacity, those of a round. `rows`: R of this round, at most the capacity."""
        T, dtype = hidden_states.shape[0], hidden_states.dtype
        handle = self._open[self._calls] = Handle(
            self, self._calls, T, rows, dtype, deferred=not wait, generation=self.world.generation
        )
        self._calls += 1
        if not self._capturing():  # what is captured runs later, and in other steps
            self.world.log_call(self.layer, self.fingerprint)
        try:
            if topk.weights.requires_grad:
                topk = TopK(topk.ids, topk.weights.detach())
            if self._lost is not None:
                topk = self._lost.left_out(topk)
            x = hidden_states.detach() if hidden_states.requires_grad else hidden_states
            tokens = self._dispatch(self._encode(x), topk, handle)
        except BaseException:
            handle.close()
            raise
        handle.shape = (*tokens.hidden.data.shape[:-1], self.config.hidden_size)
        return Dispatched(tokens, handle)

    def combine(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Returns the weighted sums of this rank's tokens: [T, H] in their own dtype. Consumes the handle.

        Args:
            expert_output: FlatTokens: [N, H], row for row. ExpertMajorTokens: [L, M, H], unweighted.

        Raises:
            UsageError: the handle is another dispatcher's, was combined before, or is closed.
            InputError, WorldMismatch, RankLost: as in dispatch.
        """
        self._require_world()
        error, facts = None, (-1, 0, 1, torch.bfloat16)  # of a call that nobody makes
        try:
            self._require_open()
            checks.check_handle(handle, self, self.world.generation)
            checks.check_output(expert_output, handle.shape, self.world.device)
            facts = handle.call, handle.num_tokens, handle.tokens_per_rank, expert_output.dtype
        except EprtError as found:
            if not self._open and not self.closed:  # no call of ours waits for this: no peer can be in a combine
                raise
            error = found
        self._compare("combine", facts, error)
        return self.bring_back(expert_output, handle)

    def bring_back(self, expert_output: torch.Tensor, handle: Handle) -> torch.Tensor:
        """Does the second half of `combine`, without its checks and its agreement with the peers."""
        y = expert_output.detach() if expert_output.requires_grad else expert_output
        output = self._combine(y, handle)
        handle.status = "combined"
        handle.state = None
        self._open.pop(handle.call, None)
        return output

    def refuse(self, error: EprtError, tokens_per_rank: int | None = None) -> NoReturn:
        """Tells the peers that this rank can't make its next dispatch, so that all raise `error`. The caller's
        `tokens_per_rank` decides whether they compare headers."""
        self._require_world()
        try:
            self._require_open()
        except UsageError as closed:  # the first thing that is wrong with a call, for every rank that makes it
            error = closed
        if tokens_per_rank is None:
            tokens_per_rank = self._rows_of_step()
        facts = self._calls, 0, tokens_per_rank, torch.bfloat16
        self._compare("dispatch", facts, error)
        raise error

    def check_peers(self) -> None:
        """Raises RankLost or WorldMismatch: the World's verdict, or an earlier kernel's report. Makes no device sync;
        for a loop that only replays graphs."""
        self.world.raise_if_lost()

    def close(self) -> None:
        """Closes the open handles, then gives back what is shared. Idempotent."""
        if self.closed:
            return
        for handle in sorted(self._open.values(), key=lambda handle: handle.call):  # in one order on all ranks
            handle.close()
        self.closed = True
        self._close()

    def _abandon(self, handle: Handle) -> None:
        """Gives up an open handle. Peers that combine it may get NaN for this rank's part: the next step says so,
        unless all ranks broke this call off."""
        if self._open.get(handle.call) is handle:
            del self._open[handle.call]
            if not self._capturing():
                self.world.log_call(self.layer, BROKEN_OFF)
        if handle.generation == self.world.generation:
            self._release(handle)

    def _require_open(self) -> None:
        if self.closed or self.world.closed:
            self._require_world()
            raise UsageError(f"{self.spec.name}: the dispatcher is closed; make a new one")

    def _require_world(self) -> None:
        """Raises UsageError without an open world, where no peer can be told anything."""
        self.world.require_open()
        if self._generation != self.world.generation:
            self._follow()

    def _follow(self) -> None:
        """Numbers calls from zero: at the first call, and once the World went on without lost ranks, as ranks may have
        made more or fewer calls in the step that was discarded."""
        self._calls, self._generation = 0, self.world.generation
        self._open.clear()
        if all(self.world.alive):
            return
        refusal = ""
        if self.runtime.on_rank_lost == "restart":
            refusal = (
                "built with on_rank_lost='restart', and its World went on without a rank: build layers with "
                "RuntimeConfig(on_rank_lost='continue') or 'renormalize'"
            )
        elif self._capturing():
            refusal = "the first call since ranks were lost can't be captured: make one, then capture"
        if refusal:
            self._generation = None  # the next call is refused, too
            raise UsageError(f"{self.spec.name}: {refusal}")
        world, scale = self.world, self.runtime.on_rank_lost == "renormalize"
        self._lost = LostExperts(world.alive, world.parallel, self.config.num_experts, world.device, scale)

    def _rows_of_step(self) -> int | None:
        """Returns R of the slices that this step's ranks send; None outside of a step. Where fewer tokens than a strict
        capacity were rounded up to a bucket over it, R is that capacity."""
        step, size = self.world.current_step, self.world.parallel.attention_tp_size
        if step is None:
            return None
        rows = step.tokens_per_rank if size == 1 else ceil_div(step.tokens_per_rank, size)
        if self.runtime.strict_capacity:
            rows = min(rows, max(self.capacity.max_tokens_per_rank, ceil_div(max(step.tokens), size)))
        return rows

    def _capturing(self) -> bool:
        return self.world.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def _encode(self, hidden_states: torch.Tensor) -> Payload:
        """Encodes the tokens in the number format that travels: `runtime.payload`, or their own."""
        if self.runtime.payload is None:
            return Payload.plain(hidden_states)
        return encode_payload(hidden_states, self.runtime.payload, self.payload_scale)
