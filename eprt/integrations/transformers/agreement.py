"""The places where a model calls its expert-parallel layers, and the agreement of all ranks at the first of them.

Any rank may run any number of forwards inside `lockstep`, which is all that generation needs: a rank that has run out
of prompts takes idle steps until all have.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch import nn

from eprt import compiled
from eprt.errors import EprtError, RankLost, UsageError, WorldMismatch
from eprt.integrations.transformers.dense import refuse_capture, refuse_to_copy, sharded_by_fsdp
from eprt.layer import ExpertParallelMoE
from eprt.tokens import TopK
from eprt.world import World
from eprt.world.agree import Header, exchange
from eprt.world.collectives import Step

NUMBER = re.compile(r"\d+")
REMEDY = (
    "Each forward of the model needs all ranks: one that has nothing to feed calls idle_step(model) where the others "
    "call model(...); generate(model, prompts), or `with lockstep(model):` around a loop of your own, does that by "
    "itself (all three in eprt.integrations.transformers)."
)


class Place:
    """One call site of an expert-parallel layer in a model. The module there keeps it as `eprt_place`.

    Attributes:
        world: the ranks that make the same call.
        dtype: that of the hidden states that arrive.
        agreement: shared by the places of one model; None until one was made.
    """

    def __init__(self, world: World, dtype: torch.dtype, layer: ExpertParallelMoE | None = None) -> None:
        self.world, self.dtype = world, dtype
        self.agreement: ForwardAgreement | None = None
        self._layer = layer
        self._number = compiled.register(self)

    @property
    def built(self) -> bool:
        return self._layer is not None

    @property
    def layer(self) -> ExpertParallelMoE:
        """The layer. If it isn't there yet it is built now, on every rank."""
        if self._layer is None:
            self._layer = self._build()
        return self._layer

    def __call__(
        self,
        hidden_states: torch.Tensor,
        routing: TopK | None = None,
        token_ids: torch.Tensor | None = None,
        tokens_per_rank: None = None,  # the step says how many
    ) -> torch.Tensor:
        """Returns the layer's output, whose gradient is refused. Errors say what a rank without a batch has to do."""
        weights = None if routing is None else routing.weights
        if routing is not None and routing.weights.requires_grad:
            routing = TopK(routing.ids, routing.weights.detach())
        if torch.compiler.is_compiling():
            with torch.no_grad():  # what the ranks agree on stays inside the operator
                output = compiled.call(self._number, hidden_states, routing, token_ids, tokens_per_rank)
        elif self.agreement is not None and self.agreement.muted:
            self.idle(hidden_states.dtype)
            output = torch.zeros_like(hidden_states)
        else:
            output = self._call(hidden_states, routing, token_ids)
        if torch.is_grad_enabled() and (hidden_states.requires_grad or (weights is not None and weights.requires_grad)):
            output = _NoBackward.apply(output, hidden_states, weights)
        return output

    def idle(self, dtype: torch.dtype | None = None) -> None:
        """Makes the same call on a rank that has no token. `dtype`: of the others' tokens; None: `self.dtype`."""
        layer = self.layer
        nothing = torch.empty(0, layer.config.input_size, dtype=dtype or self.dtype, device=layer.world.device)
        ids = torch.empty(0, dtype=torch.int64, device=layer.world.device)
        routing = None
        if layer.router is None:
            none = torch.empty(0, layer.config.top_k, dtype=torch.float32, device=layer.world.device)
            routing = TopK(none.to(torch.int32), none)
        self._call(nothing, routing, ids if layer.config.routing.method == "hash" else None)

    def _call(self, x: torch.Tensor, routing: TopK | None, token_ids: torch.Tensor | None) -> torch.Tensor:
        layer, agreement = self.layer, self.agreement
        try:
            with nullcontext() if agreement is None else agreement.at(self, x.numel() // x.shape[-1]):
                return layer(x, routing, token_ids=token_ids)
        except (RankLost, WorldMismatch) as error:
            error.args = (f"{error}\n{REMEDY}", *error.args[1:])
            raise

    def _build(self) -> ExpertParallelMoE:
        raise UsageError("this place has no layer yet")

    __reduce_ex__ = refuse_to_copy


_LAST: WeakValueDictionary[World, ForwardAgreement] = WeakValueDictionary()  # to have opened a step of each World


class ForwardAgreement:
    """Opens one `World.step` per forward, from its first MoE layer to its last.

    In it the ranks agree on R for all layers, and on who still computes. A step that the caller opened around the
    forward is taken instead.

    Attributes:
        places: those of a model, in the order in which it calls them.
        calls: the same, as often as a forward calls each.
        world: theirs.
        known: whether every rank has one. A forward opens no step before: the other ranks' wouldn't.
        muted: the model runs on a dummy token, which its places leave out.
        idle: replaces the places' own step of a rank without tokens.
        decode: graphs of the model that an earlier `generate` captured, or why it couldn't.
        told_of_state: whether `generate` has said that prompts of equal length share a batch.
        in_lockstep: whether this rank is inside of `lockstep`.
    """

    def __init__(self, places: list[Place], calls: list[Place]) -> None:
        self.places, self.calls, self.world = places, calls, places[0].world
        self.known = False
        self.muted = False
        self.idle: Callable[[], None] | None = None
        self.decode: object = None
        self.told_of_state = False
        self.in_lockstep = False
        self._number = self.world.num_dispatchers  # another model's differs: its layers were built before, or after
        self._silent = False
        self._step: AbstractContextManager[Step] | None = None
        self._met = self._broken_off = False

    @contextmanager
    def at(self, place: Place, num_tokens: int) -> Iterator[None]:
        """Surrounds a layer's call. The step begins at the first place, unless the ranks met before, and ends at the
        last. Collective at the first place."""
        if self._silent or not self.known:
            yield
            return
        with self._inside(num_tokens, begins=place is self.places[0], ends=place is self.places[-1]):
            yield

    @contextmanager
    def whole(self, num_tokens: int) -> Iterator[None]:
        """Surrounds a forward whose places may not be called at all, as in a CUDA graph, by one step. Collective."""
        with self._inside(num_tokens, begins=True, ends=True), self.silent():
            yield

    @contextmanager
    def _inside(self, num_tokens: int, *, begins: bool, ends: bool) -> Iterator[None]:
        """Surrounds a part of a forward: its first begins the step, unless the ranks met before; an error ends it."""
        try:
            if begins and not self._met:
                self.meet(num_tokens)
            self._met = False
            yield
        except BaseException as error:
            self.end(error)
            raise
        if ends:
            self.end()

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Lets places inside only call their layers, without a step."""
        before, self._silent = self._silent, True
        try:
            yield
        finally:
            self._silent = before

    def meet(self, num_tokens: int | None) -> bool:
        """Meets the others at the next forward. Collective.

        `num_tokens` is this rank's T, or None if it has left its loop and only waits for the others. Returns whether
        the forward takes place: at least one rank hasn't left.

        Raises:
            UsageError: another rank calls another model of this World, the same on every rank; or a capture.
        """
        _LAST.get(self.world, self).end()  # one that an exception kept from its last layer, in this model or another
        going = True
        if self.world.current_step is None:
            refuse_capture(self.world)
            step = self.world.step(num_tokens or 0, words=(int(num_tokens is None), self._number))
            words = step.__enter__().words
            self._step, _LAST[self.world] = step, self
            here = {rank: said for rank, said in enumerate(words) if self.world.alive[rank]}
            going = not all(left for left, _ in here.values())
            if len({number for _, number in here.values()}) > 1:
                self.end()
                self._refuse_others(here)
        if not going:
            self.end()
        self._met = going
        return going

    def _refuse_others(self, here: dict[int, tuple[int, ...]]) -> NoReturn:
        calls = ", ".join(f"rank {rank} model {number}" for rank, (_, number) in here.items())
        error = UsageError(
            f"the ranks call different models at once ({calls}): inside of lockstep(model) call no other model, and "
            "enter no other's lockstep, unless every rank makes the same calls in the same order"
        )
        error.shared = True
        raise error

    def end(self, error: BaseException | None = None) -> None:
        """Leaves the step, if one is open."""
        step, self._step, self._met = self._step, None, False
        if step is not None:
            self._broken_off = error is not None
            step.__exit__(None if error is None else type(error), error, None)

    def tell(self, error: Exception) -> None:
        """Lets the others raise `error` at their next forward, unless all know of it. Those that wait on GPUs for this
        rank's part of a forward listen to its end alone: then they raise RankLost, which has the error's words.

        Raises:
            EprtError: `error` is one: the same again, in the words that all ranks have.
        """
        self.end(error)
        deaf, self._broken_off = self._broken_off and not self.world.compares_headers(False), False
        known = isinstance(error, RankLost) or (isinstance(error, EprtError) and error.shared)
        if known or deaf or self.world.closed:
            return
        said = error if isinstance(error, EprtError) else UsageError(f"{type(error).__name__}: {error}")
        try:
            exchange(self.world, Header("barrier", -1, 0), said)
        except EprtError:
            if isinstance(error, EprtError):
                raise


def agreement_of(model: nn.Module) -> ForwardAgreement:
    """Returns what the places of the model share, made at the first request. Raises UsageError if it has no place."""
    found = {path: module.__dict__.get("eprt_place") for path, module in model.named_modules()}
    by_path = {path: place for path, place in found.items() if isinstance(place, Place)}
    if not (places := list(by_path.values())):
        raise UsageError(
            f"{type(model).__name__} has no expert-parallel layers: call parallelize(model, world), or load it with "
            'DistributedConfig(..., ep_implementation="eprt")'
        )
    agreement = places[0].agreement or ForwardAgreement(places, _calls(model, by_path))
    for place in places:
        place.agreement = agreement
    return agreement


def layer_of(path: str) -> int:
    """Returns the number of the model's layer, the first in a module's path: of counts as of placement files."""
    return int(NUMBER.findall(path)[0])


def layer_numbers(paths: Iterable[str]) -> dict[str, int]:
    """Returns the number of each module's layer by path, each once.

    Where layers have several experts modules (ERNIE 4.5 VL's, for text and for images), the first ones keep the layers'
    own numbers, and the others' go on after the last layer.
    """
    own = {path: layer_of(path) for path in paths}
    layers, before = max(own.values()) + 1, Counter[int]()
    found: dict[str, int] = {}
    for path, number in own.items():
        found[path] = number + layers * before[number]
        before[number] += 1
    return found


def _calls(model: Any, places: dict[str, Place]) -> list[Place]:
    """Returns the places in the order of a forward's calls: those of looped layers (Inkling 2) come once a pass."""
    config: Any = getattr(model, "config", None)
    text: Any = None if config is None else config.get_text_config(decoder=True)
    if (passes := getattr(text, "loop_num_passes", 1)) == 1:
        return list(places.values())
    looped = range(text.loop_layer_index_start, text.loop_layer_index_end)
    numbered = [(layer_of(path), place) for path, place in places.items()]
    once = [place for number, place in numbered if number in looped]
    before = [place for number, place in numbered if number < looped.start]
    return [*before, *(once * passes), *(place for number, place in numbered if number >= looped.stop)]


def expert_layers(model: nn.Module) -> list[ExpertParallelMoE]:
    """Returns the model's expert-parallel layers, for `World.warmup` and `close`. Collective if they must be built.

    Raises:
        UsageError: it has none.
    """
    agreement = agreement_of(model)
    agreement.known |= not all(place.built for place in agreement.places)
    return [place.layer for place in agreement.places]


def idle_step(model: nn.Module) -> None:
    """Takes part in one forward without tokens: this rank computes what others send in every layer's exchange.

    Raises:
        UsageError: the model has no expert-parallel layers. Else as a layer's forward.
    """
    _idle(agreement_of(model), sharded_by_fsdp(model))


def _idle(agreement: ForwardAgreement, whole: nn.Module | None) -> None:
    if agreement.idle is not None:
        agreement.idle()
        return
    if whole is None:
        for place in agreement.calls:
            place.idle()
        return
    # Weights that FSDP gathers in every forward need the whole model to run: on a token that no expert sees.
    agreement.muted = True
    try:
        token: Any = torch.zeros(1, 1, dtype=torch.int64, device=agreement.world.device)
        whole(token, use_cache=False)
    finally:
        agreement.muted = False


@contextmanager
def lockstep(model: nn.Module) -> Iterator[None]:
    """Lets each rank call `model` as often as it likes, or never; on the way out it idles until all ranks are out.

    Collective: every rank enters. An exception that leaves the block on one rank is raised on all.

    Raises:
        UsageError: the model has no expert-parallel layers, or a step or a lockstep is open. RankLost: a rank died or
            fell behind.
    """
    agreement = agreement_of(model)
    if agreement.in_lockstep:  # a rank that leaves the inner one and a rank that leaves the outer can't be told apart
        raise UsageError(
            "lockstep or generate inside of lockstep, or in two threads at once: leave it first; generate keeps ranks "
            "in step itself, and takes several prompts"
        )
    _LAST.get(agreement.world, agreement).end()  # a forward that an exception broke off between two layers
    if agreement.world.current_step is not None:
        raise UsageError("lockstep or generate inside of World.step: leave the step first, each forward opens its own")
    expert_layers(model)  # built now, if need be
    agreement.known = True
    early = nullcontext() if (whole := sharded_by_fsdp(model)) is None else _meet_before_fsdp(whole, agreement)
    agreement.in_lockstep = True
    closed: GeneratorExit | None = None
    try:
        with early:
            yield
    except GeneratorExit as leaving:  # of a generator around the block that nobody reads on: this rank is out
        closed = leaving
    except Exception as error:
        agreement.tell(error)
        raise
    finally:
        agreement.in_lockstep = False
    while agreement.meet(None):
        _idle(agreement, whole)
    if closed is not None:
        raise closed


@contextmanager
def _meet_before_fsdp(model: nn.Module, agreement: ForwardAgreement) -> Iterator[None]:
    """Lets the ranks agree at the model's own call: FSDP's first collective comes before any layer."""

    def meet(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = kwargs.get("input_ids", args[0] if args else None)
        agreement.meet(kwargs["inputs_embeds"].shape[:-1].numel() if given is None else given.numel())

    hook = model.register_forward_pre_hook(meet, prepend=True, with_kwargs=True)
    try:
        with patch.object(model, "_is_fsdp_managed_module", False, create=True):  # or generate's loop meets theirs
            yield
    finally:
        hook.remove()


class _NoBackward(torch.autograd.Function):
    """Refuses a backward pass, which would silently leave out the experts' part, and the router's: the layers are for
    inference."""

    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, hidden_states: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, compiled.refuse_backward(gradients[0]), None
