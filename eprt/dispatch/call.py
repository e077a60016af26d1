"""What a call must look like, for a layer and for a dispatcher, and how the ranks agree on it.

The checks are pure and made before any collective, so that a rank that finds something wrong can tell its peers, in
`agree_on_rows`. None of them reads a tensor's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from eprt.config import MoEConfig, RuntimeConfig
from eprt.dispatch.capacity import KNOB, Capacity, require_agreed
from eprt.dispatch.handle import Handle, HandleOwner
from eprt.dispatch.spec import DispatcherSpec
from eprt.errors import CapacityError, EprtError, InputError, UsageError
from eprt.rounding import ceil_div
from eprt.tokens import RouterLogits, TopK
from eprt.world.agree import Header, exchange
from eprt.world.collectives import Step

if TYPE_CHECKING:
    from eprt.world import World


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
    elif x.dtype not in (torch.bfloat16, torch.float32):
        expected = "expected bfloat16 or float32; use .to(torch.bfloat16)"
    elif x.layout != torch.strided:
        expected = "expected a dense tensor; use .to_dense()"
    elif x.device.type != device.type:
        expected = f"the world runs on {device}; move it there"
    else:
        refused = next(((dtype, taker) for dtype, taker in only if x.dtype != dtype), None)
        if refused is None:
            return
        expected = f"{refused[1]} takes {refused[0]} tokens; use hidden_states.to({refused[0]})"
    raise InputError(f"hidden_states is {tuple(x.shape)} {x.dtype} on {x.device}: {expected}")


def looks_of(*given: object) -> tuple[object, ...] | None:
    """All that `check_hidden` and `TopK.check` read of tensors: equal looks, equal verdicts. None: look closer."""
    found: list[object] = []
    for x in given:
        if not isinstance(x, torch.Tensor) or x.is_nested:
            return None
        found += x.shape, x.dtype, x.device, x.layout
    return tuple(found)


def check_topk(topk: TopK, hidden_states: torch.Tensor, config: MoEConfig) -> None:
    """Raises InputError unless `topk` is a routing of these tokens."""
    topk.check(config.num_experts, config.top_k)
    if topk.ids.device != hidden_states.device or topk.ids.shape[0] != hidden_states.shape[0]:
        raise InputError(
            f"topk is for {topk.ids.shape[0]} tokens on {topk.ids.device}, hidden_states for "
            f"{hidden_states.shape[0]} on {hidden_states.device}: they must agree"
        )


def check_routing(num_tokens: int, routing: object, token_ids: object, config: MoEConfig) -> None:
    """Raises InputError unless what a layer's caller passes is for so many tokens: slices would hide rows too many."""
    if isinstance(routing, TopK):
        given = [("topk_ids", routing.ids, config.top_k), ("topk_weights", routing.weights, config.top_k)]
    elif isinstance(routing, RouterLogits):
        given = [("router logits", routing.logits, config.num_experts)]
    elif routing is None:
        given = []
    else:
        raise InputError(f"routing is a {type(routing).__name__}: expected TopK, RouterLogits or None")
    for name, tensor, width in given:
        found = tuple(tensor.shape) if torch.is_tensor(tensor) else type(tensor).__name__
        if found != (num_tokens, width):
            raise InputError(
                f"{name} is {found}, hidden_states holds {num_tokens} tokens: they must agree; expected [T, {width}]"
            )
    if token_ids is not None and (not isinstance(token_ids, torch.Tensor) or token_ids.numel() != num_tokens):
        raise InputError(f"token_ids must be a tensor of {num_tokens} ids, one for each token of hidden_states")


def check_group_rows(given: object, num_tokens: int, size: int, capacity: Capacity, strict: bool) -> int:
    """R of the slices that `size` attention-TP ranks send, from the caller's own R and tokens.

    Raises:
        InputError: not an R.
        CapacityError: fewer than `num_tokens`; with `strict` also slices over the capacity.
    """
    agreed = require_agreed(given)
    if num_tokens > agreed:
        raise CapacityError(
            f"hidden_states holds {num_tokens} tokens, the agreed tokens_per_rank is {agreed}: pass "
            f"tokens_per_rank >= {num_tokens} on every rank, or None to let the ranks agree"
        )
    part = ceil_div(agreed, size)
    if part > capacity.max_tokens_per_rank and strict:
        raise CapacityError(
            f"tokens_per_rank is {agreed}, {part} for each of {size} attention-TP ranks, over the capacity of "
            f"{capacity.max_tokens_per_rank}: set {KNOB} >= {part} or split the batch"
        )
    return part


def check_derivable(incomplete: bool, capturing: bool) -> None:
    """Raises InputError where the ranks can't agree on an R that nobody passed.

    Args:
        incomplete: a rank is left out.
        capturing: peers would have to be asked during CUDA graph capture.
    """
    if incomplete:
        raise InputError("tokens_per_rank is None and a rank is left out, which can't agree on R: pass it")
    if capturing:
        raise InputError("tokens_per_rank is None during CUDA graph capture: pass R, the same on every rank")


def check_said(step: Step, rank: int, attention_tp_size: int, num_tokens: int, group_tokens: int) -> None:
    """Raises InputError if this rank said fewer tokens when the step began."""
    said = step.tokens[rank]
    if max(group_tokens, (num_tokens - 1) * attention_tp_size + 1) > said:
        raise InputError(
            f"a layer gets {group_tokens or num_tokens} tokens in a step that this rank began with num_tokens="
            f"{said}: say the largest number that a layer gets in the step"
        )


def check_handle(handle: object, owner: HandleOwner) -> None:
    """Raises UsageError unless combine may consume it."""
    if not isinstance(handle, Handle) or handle.owner is not owner:
        raise UsageError("combine got a handle of another dispatcher: pass the one that the same dispatch returned")
    if handle.status != "open":
        raise UsageError(f"combine on a handle that is already {handle.status}: dispatch again for a new one")
    if handle.generation != owner.world.generation:
        raise UsageError("combine on a handle of a step that was discarded with a lost rank: dispatch again")
    if handle.deferred:
        raise UsageError("combine on a handle that nobody waited for: call handle.wait() before the experts run")


def check_output(expert_output: object, shape: tuple[int, ...] | None, device: torch.device) -> None:
    """Raises InputError unless it is what an executor makes of the tokens; `shape` None: of any shape."""
    if not isinstance(expert_output, torch.Tensor):
        raise InputError(f"expert_output is a {type(expert_output).__name__}: expected a tensor {shape}")
    fits = shape is None or tuple(expert_output.shape) == shape
    if fits and expert_output.is_floating_point() and expert_output.device.type == device.type:
        return
    raise InputError(
        f"expert_output is {tuple(expert_output.shape)} {expert_output.dtype} on {expert_output.device}: expected "
        f"{shape or 'the shape of the tokens'}, a row for each of the tokens' rows, float on {device.type}"
    )


class Party(Protocol):
    """A dispatcher, as one that agrees with its peers."""

    spec: ClassVar[DispatcherSpec]
    world: World
    config: MoEConfig
    layer: int
    capacity: Capacity
    settings: dict[str, str]
    fingerprint: int
    full_validation: bool

    @property
    def incomplete(self) -> bool: ...


def check_call(
    party: Party,
    hidden_states: object,
    topk: object,
    tokens_per_rank: object,
    accepted: tuple[object, ...] | None,
    *,
    capturing: bool,
    cut: bool,
) -> tuple[object, ...] | None:
    """Checks what a dispatch gets: its tensors, and R, which may be None where the ranks can agree on it.

    Args:
        accepted: what this returned for the last call that was right. One that looks the same is right too, but for
            values, which are read where they are to be checked.
        cut: an R over the capacity is right.

    Raises:
        InputError: tensors or an R that can't be. CapacityError: an R that doesn't fit.
    """
    if not isinstance(hidden_states, torch.Tensor) or not isinstance(topk, TopK):
        kinds = f"{type(hidden_states).__name__} and {type(topk).__name__}"
        raise InputError(f"dispatch got {kinds}: expected a tensor of hidden states and a TopK")
    looks = looks_of(hidden_states, topk.ids, topk.weights)
    found = None if looks is None or type(tokens_per_rank) is not int else (*looks, tokens_per_rank, cut)
    if found is None or found != accepted:
        only = () if "f32" in party.spec.payloads else ((torch.bfloat16, party.spec.name),)
        H, device = party.config.hidden_size, party.world.device
        check_hidden(hidden_states, H, device, meaning="the hidden size the experts see", flat=True, only=only)
        check_topk(topk, hidden_states, party.config)
        if tokens_per_rank is None:
            check_derivable(party.incomplete, capturing and party.world.size > 1)
        else:
            agreed = require_agreed(tokens_per_rank)
            if not cut:
                party.capacity.check_rows(agreed)
    if not capturing:
        if party.full_validation or party.world.device.type == "cpu":
            topk.check_ids(party.config.num_experts)
        if party.full_validation:
            topk.check_weights()
    return found


def unwanted_token(config: MoEConfig, device: torch.device) -> tuple[torch.Tensor, TopK]:
    """For warm-up: [1, H] bf16, and slots that name no expert."""
    token = torch.zeros(1, config.hidden_size, dtype=torch.bfloat16, device=device)
    ids = token.new_full((1, config.top_k), config.num_experts, dtype=torch.int32)
    return token, TopK(ids, ids.float())


def settings_of(dispatcher: str, world: World, config: MoEConfig, runtime: RuntimeConfig) -> dict[str, str]:
    """What must be equal on all ranks."""
    return {
        **config.settings(),
        "dispatcher": dispatcher,
        "payload": str(runtime.payload),
        "combine_payload": str(runtime.combine_payload),
        "rank_mask": str(runtime.rank_mask),
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


def agree_on_rows(
    party: Party,
    operation: str,
    call: int,
    num_tokens: int,
    tokens_per_rank: int | None,
    dtype: torch.dtype,
    error: EprtError | None,
    *,
    group_tokens: int = 0,
    cut: bool = False,
) -> int:
    """R for this call. Compares headers with the peers where the world asks for it, else checks locally.

    Args:
        operation: "dispatch" or "combine".
        error: what this rank found wrong with its call; raised on every rank that compares, here anyway.
        cut: an R over the capacity is returned, not refused.
    """
    world = party.world
    derive = tokens_per_rank is None and operation == "dispatch"
    compare = world.size > 1 and (derive or world.compares_headers(party.full_validation))
    if not compare or party.incomplete:
        if error is not None:
            raise error
        if tokens_per_rank and num_tokens <= tokens_per_rank:
            return tokens_per_rank
        return party.capacity.agree((num_tokens,), tokens_per_rank or 0, cut)
    header = Header(
        operation=operation,
        layer=party.layer,
        call=call,
        num_tokens=num_tokens,
        tokens_per_rank=0 if error else tokens_per_rank or 0,
        dtype=dtype,
        fingerprint=party.fingerprint,
        settings=party.settings,
        group_tokens=group_tokens,
    )
    peers = exchange(world, header, error)
    return party.capacity.agree(peers.tokens, tokens_per_rank or 0, cut)
