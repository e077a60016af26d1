"""One call of a dispatcher: its handle, how many tokens it may carry, and the checks of what it is given.

T (a rank's own tokens) <= R (agreed by all ranks for this call) <= capacity (what the buffers were sized for). The
layer cuts a call of a larger R into rounds that keep this.

The checks are pure and made before any collective, so that a rank that finds something wrong can tell its peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch

from eprt.config import MAX_TOKENS, MoEConfig, ParallelConfig, RuntimeConfig
from eprt.errors import CapacityError, InputError, UsageError
from eprt.placement import whole_ep_ranks
from eprt.tokens import ExpertMajorTokens, FlatTokens, Payload, RouterLogits, TopK
from eprt.world import World
from eprt.world.collectives import Step

KNOB = "RuntimeConfig.max_tokens_per_rank"
TOKEN_DTYPES = (torch.bfloat16, torch.float32)


class CallState:
    """Holds what a dispatcher's combine needs of its dispatch: each dispatcher has its own subclass."""


S = TypeVar("S", bound=CallState)


@dataclass(frozen=True)
class Traffic:
    """Counts what one call moved between this rank and others in dispatch and combine, local copies left out."""

    rows_sent: int = 0
    rows_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0

    @classmethod
    def of(cls, sent: int, received: int, hidden: Payload, routing: torch.Tensor, output_bytes: int) -> Traffic:
        """Counts the bytes of rows that travel with their routing, and of an output of `output_bytes` back for each."""
        there = sum([x.shape[1] * x.element_size() for x in (hidden.data, hidden.scale, routing) if x is not None])
        return cls(sent, received, sent * there + received * output_bytes, received * there + sent * output_bytes)


@dataclass
class Handle:
    """The state of one call. `combine` consumes it once; `close` (in a `finally`) frees what a failed call left.

    Attributes:
        owner: its `Dispatcher`.
        call: number of this dispatch on its dispatcher, equal on all ranks.
        num_tokens, tokens_per_rank: this rank's T and the agreed R.
        state: the dispatcher's own; dropped on close.
        traffic: what moved, where the host knows it; else None.
        deferred: the rows may still be on their way; `wait` before anything reads them.
        generation: the World's when it was made; calls that were open when a rank was lost are discarded.
        shape: of the expert output that `combine` takes: the tokens' shape.
    """

    owner: Any
    call: int
    num_tokens: int
    tokens_per_rank: int
    dtype: torch.dtype
    state: CallState | None = None
    traffic: Traffic | None = None
    deferred: bool = False
    status: Literal["open", "combined", "closed"] = field(default="open", compare=False)
    shape: tuple[int, ...] = ()
    generation: int = 0

    def kept(self, kind: type[S]) -> S:
        """Returns `state` to the dispatcher that put it there. Raises UsageError: it is gone, as the call has ended."""
        if not isinstance(self.state, kind):
            raise UsageError(f"the handle is {self.status} and holds no {kind.__name__}: dispatch again for a new one")
        return self.state

    def wait(self) -> None:
        """Waits, in stream order, until the rows have arrived. Idempotent; for `dispatch(..., wait=False)` alone."""
        if self.deferred and self.status == "open":
            self.owner._wait(self)
        self.deferred = False

    def close(self) -> None:
        """Gives up a call that wasn't combined. Idempotent."""
        if self.status == "open":
            self.owner._abandon(self)
            self.status = "closed"
        self.state = None


@dataclass(frozen=True)
class Dispatched:
    """The result of `dispatch`: tokens for the executor, and the handle for `combine`."""

    tokens: FlatTokens | ExpertMajorTokens
    handle: Handle


class LostExperts:
    """The physical expert slots on ranks that the World goes on without: tokens do without them.

    Args:
        alive: [W]
        num_experts: E slots, EP rank by EP rank. One whose MoE-TP ranks aren't all there is lost as a whole.
        renormalize: scale a token's other weights to the sum that all of them had.
    """

    def __init__(
        self,
        alive: tuple[bool, ...],
        parallel: ParallelConfig,
        num_experts: int,
        device: torch.device,
        renormalize: bool,
    ) -> None:
        each = num_experts // parallel.ep_size
        gone = [not whole for whole in whole_ep_ranks(alive, parallel) for _ in range(each)]
        self._gone = torch.tensor([*gone, False], device=device)
        self._none, self._renormalize = num_experts, renormalize

    def left_out(self, topk: TopK) -> TopK:
        """Returns [T, K] whose entries of lost slots name no expert. No host sync."""
        ids = torch.where(self._gone[topk.ids.long().clamp(0, self._none)], self._none, topk.ids)
        if not self._renormalize:
            return TopK(ids, topk.weights)
        had, has = (topk.weights.masked_fill(i == self._none, 0).sum(1, keepdim=True) for i in (topk.ids, ids))
        return TopK(ids, topk.weights * torch.where(has == 0, 1.0, had / has))


def require_agreed(tokens_per_rank: object) -> int:
    """Returns a caller's R. Raises InputError unless it is an int from 1 to 2^31 - 1."""
    if not isinstance(tokens_per_rank, int) or isinstance(tokens_per_rank, bool) or tokens_per_rank < 1:
        raise InputError(
            f"tokens_per_rank {tokens_per_rank!r}: expected an int of at least 1, also when every rank is idle"
        )
    if tokens_per_rank > MAX_TOKENS:
        raise InputError(f"tokens_per_rank {tokens_per_rank}: expected at most 2^31 - 1")
    return tokens_per_rank


@dataclass(frozen=True)
class Capacity:
    """The number of tokens that a dispatcher's buffers were sized for.

    Attributes:
        max_tokens_per_rank: the knob `RuntimeConfig.max_tokens_per_rank`.
        bytes_per_token: bytes of buffers that each rank pays per unit of the knob (0: buffers aren't kept).
    """

    max_tokens_per_rank: int
    bytes_per_token: int = 0

    def agree(self, tokens: Sequence[int], agreed: int, cut: bool = False) -> int:
        """Returns R from every rank's T; 0 in `agreed` means "derive it". Same verdict on every rank.

        Raises CapacityError, with `cut` not for an R over the capacity. `agreed` was already found equal on all ranks
        and within `check_rows`.
        """
        largest = max(tokens)
        rows = agreed or max(largest, 1)
        if largest > rows:
            rank = tokens.index(largest)
            raise CapacityError(
                f"rank {rank} has {largest} tokens, the agreed tokens_per_rank is {rows}: "
                f"pass tokens_per_rank >= {largest} on every rank, or None to let the ranks agree"
            )
        if not agreed and not cut:
            self.check(f"rank {tokens.index(largest)} has", rows)
        return rows

    def check(self, who: str, needed: int) -> None:
        """Raises CapacityError unless `needed` tokens fit. `who` names them."""
        if needed <= self.max_tokens_per_rank:
            return
        cost = f" ({needed * self.bytes_per_token:,} bytes a rank)" if self.bytes_per_token else ""
        raise CapacityError(
            f"{who} {needed} tokens, over the capacity of {self.max_tokens_per_rank}: "
            f"set {KNOB} >= {needed}{cost} or split the batch"
        )


def check_rows(tokens_per_rank: object, capacity: Capacity, capturing: bool, cut: bool) -> None:
    """Checks the R of a dispatch, which is None where the ranks are to agree on it.

    Args:
        capturing: peers would have to be asked during CUDA graph capture.
        cut: an R over the capacity is right.

    Raises:
        InputError: not an R, or None where the ranks can't agree. CapacityError: an R over the capacity.
    """
    if tokens_per_rank is not None:
        agreed = require_agreed(tokens_per_rank)
        if not cut:
            capacity.check("tokens_per_rank is", agreed)
    elif capturing:
        raise InputError("tokens_per_rank is None during CUDA graph capture: pass R, the same on every rank")


def check_said(step: Step, world: World, num_tokens: int, group_tokens: int) -> None:
    """Raises InputError if this rank said fewer tokens when the step began."""
    said = step.tokens[world.rank]
    if max(group_tokens, (num_tokens - 1) * world.parallel.attention_tp_size + 1) > said:
        raise InputError(
            f"a layer gets {group_tokens or num_tokens} tokens in a step that this rank began with num_tokens="
            f"{said}: say the largest number that a layer gets in the step, and let one thread at a time run a model"
        )


def check_hidden(
    x: torch.Tensor,
    width: int,
    device: torch.device,
    *,
    meaning: str,
    flat: bool,
    only: Sequence[tuple[torch.dtype, str]] = (),
) -> None:
    """Raises InputError unless `x` holds hidden states.

    Args:
        width, meaning: the last dimension, and what it is.
        device: the world's.
        flat: [T, width]; False: any number of leading dimensions, at least one.
        only: dtypes, and what takes no other.
    """
    leading = "T" if flat else "..."
    if x.is_nested:  # has no shape to describe
        raise InputError(
            f"hidden_states is a nested tensor: expected a dense one, [{leading}, {width}]; concatenate its rows"
        )
    if x.shape[-1:] != (width,) or (x.dim() != 2 if flat else x.dim() < 2):
        expected = f"expected [{leading}, {width}] ({meaning})"
    elif x.dtype not in TOKEN_DTYPES:
        expected = "expected bfloat16 or float32; use .to(torch.bfloat16)"
    elif x.layout != torch.strided:
        expected = "expected a dense tensor; use .to_dense()"
    elif x.device != device:  # on another GPU, too: this one's stream doesn't wait for what writes there
        expected = f"the world runs on {device}; move it there"
    else:
        refused = next(((dtype, taker) for dtype, taker in only if x.dtype != dtype), None)
        if refused is None:
            return
        dtype, taker = refused
        remedy = f"hidden_states.to({dtype})" if dtype in TOKEN_DTYPES else "layer.to(torch.bfloat16)"
        expected = f"{taker} takes {dtype} tokens; use {remedy}"
    raise InputError(f"hidden_states is {tuple(x.shape)} {x.dtype} on {x.device}: {expected}")


def check_call(
    x: object, topk: object, config: MoEConfig, device: torch.device, only: Sequence[tuple[torch.dtype, str]] | None
) -> None:
    """Checks the tensors of a dispatch. Raises InputError.

    Args:
        x, topk: [T, H] hidden states, and their routing.
        only: as in `check_hidden`; None: a layer has checked `x`, before it routed it.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(topk, TopK):
        kinds = f"{type(x).__name__} and {type(topk).__name__}"
        raise InputError(f"dispatch got {kinds}: expected a tensor of hidden states and a TopK")
    if only is not None:
        check_hidden(x, config.hidden_size, device, meaning="the hidden size the experts see", flat=True, only=only)
    topk.check(config.top_k)
    if topk.ids.device != x.device or topk.ids.shape[0] != x.shape[0]:
        raise InputError(
            f"topk is for {topk.ids.shape[0]} tokens on {topk.ids.device}, hidden_states for {x.shape[0]} on "
            f"{x.device}: they must agree"
        )


def check_routing(num_tokens: int, routing: object, token_ids: object, config: MoEConfig) -> None:
    """Raises InputError unless a layer's caller passes a routing of `num_tokens` tokens: slices hide extra rows."""
    given: list[tuple[str, object, int]] = []
    if isinstance(routing, TopK):
        given = [("topk_ids", routing.ids, config.top_k), ("topk_weights", routing.weights, config.top_k)]
    elif isinstance(routing, RouterLogits):
        given = [("router logits", routing.logits, config.num_experts)]
    elif routing is not None:
        raise InputError(f"routing is a {type(routing).__name__}: expected TopK, RouterLogits or None")
    if token_ids is not None:
        given.append(("token_ids", token_ids, 0))
    for name, tensor, width in given:
        found: object = type(tensor).__name__
        if isinstance(tensor, torch.Tensor):
            if tensor.is_nested or tensor.layout != torch.strided:
                kind = "nested" if tensor.is_nested else tensor.layout
                raise InputError(f"{name} is a {kind} tensor: expected a dense one")
            found = tuple(tensor.shape)
        if width and found != (num_tokens, width):
            raise InputError(
                f"{name} is {found}, hidden_states holds {num_tokens} tokens: they must agree; expected [T, {width}]"
            )
    if token_ids is not None and (not isinstance(token_ids, torch.Tensor) or token_ids.numel() != num_tokens):
        raise InputError(f"token_ids must be a tensor of {num_tokens} ids, one for each token of hidden_states")


def check_handle(handle: object, owner: object, generation: int) -> None:
    """Raises UsageError unless `owner`, in a World of that generation, may combine `handle`."""
    if not isinstance(handle, Handle) or handle.owner is not owner:
        raise UsageError("combine got a handle of another dispatcher: pass the one that the same dispatch returned")
    if handle.status != "open":
        raise UsageError(f"combine on a handle that is already {handle.status}: dispatch again for a new one")
    if handle.generation != generation:
        raise UsageError("combine on a handle of a step that was discarded with a lost rank: dispatch again")
    if handle.deferred:
        raise UsageError("combine on a handle that nobody waited for: call handle.wait() before the experts run")


def check_output(expert_output: object, shape: tuple[int, ...], device: torch.device) -> None:
    """Raises InputError unless `expert_output` fits the dispatched tokens."""
    if not isinstance(expert_output, torch.Tensor):
        raise InputError(f"expert_output is a {type(expert_output).__name__}: expected a tensor {shape}")
    fits = tuple(expert_output.shape) == shape and expert_output.is_floating_point()
    if fits and expert_output.device == device:
        return
    raise InputError(
        f"expert_output is {tuple(expert_output.shape)} {expert_output.dtype} on {expert_output.device}: expected "
        f"{shape}, a row for each of the tokens' rows, float on {device}"
    )


def unwanted_token(config: MoEConfig, device: torch.device) -> tuple[torch.Tensor, TopK]:
    """Returns a token for warm-up: [1, H] bf16, and a TopK that names no expert."""
    token = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16, device=device)
    ids = token.new_full((1, config.top_k), config.num_experts, dtype=torch.int32)
    return token, TopK(ids, ids.float())


def settings_of(dispatcher: str, world: World, config: MoEConfig, runtime: RuntimeConfig) -> dict[str, str]:
    """Returns the settings that must be equal on all ranks, by name."""
    return {
        **config.settings(),
        "dispatcher": dispatcher,
        "payload": str(runtime.payload),
        "combine_payload": str(runtime.combine_payload),
        "on_rank_lost": runtime.on_rank_lost,
        "validate": runtime.validate,
        "layer_graphs": str(runtime.layer_graphs),
        "max_tokens_per_rank": str(runtime.max_tokens_per_rank),
        "strict_capacity": str(runtime.strict_capacity),
        "attention_tp_size": str(world.parallel.attention_tp_size),
        "moe_tp_size": str(world.parallel.moe_tp_size),
        # Tells layers of equal numbers and settings apart: ranks that call them in different orders are told so.
        "dispatchers_before": str(world.num_dispatchers),
    }
