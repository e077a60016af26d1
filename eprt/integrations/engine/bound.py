"""An engine's quantisation method of a MoE layer, re-classed so that eprt does what comes after loading."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from eprt.errors import EprtError, UsageError
from eprt.integrations.engine.parameters import ParameterLayout, Parameters, expert_weights, mark_unset
from eprt.integrations.engine.ranks import redistribute, unscaled_of, without_scales
from eprt.integrations.engine.reloading import MATRICES, Received, watch
from eprt.integrations.engine.state import EngineState, LayerBinding
from eprt.layer import ExpertParallelMoE
from eprt.tokens import TopK
from eprt.weights import ExpertWeights
from eprt.world.agree import Header, exchange, shared_errors


class BoundLayer:
    """Holds eprt's layer for a method. It is no module, so that no parameter shows up in the engine's model."""

    def __init__(self, state: EngineState, binding: LayerBinding) -> None:
        self.state, self.binding = state, binding
        self.layer: ExpertParallelMoE | None = None
        self.parameters: tuple[str, ...] = ()  # the experts': the engine's module may hold its router's, too
        self.received = Received(binding.name, binding.config.num_experts // binding.world.parallel.ep_size)
        self._freed: dict[str, tuple[torch.Size, torch.dtype, torch.device]] = {}  # what parameters were like
        self._unscaled: set[str] = set()  # matrices that the layer was built without an input scale of
        self._begun: dict[str, int] = {}  # where the memory lies that new weights are loaded into

    def declared(self, own: dict[str, Any], layout: ParameterLayout, layer: Any) -> None:
        """Notes the parameters that the method has just declared in the engine's module, and what their loaders write
        from now on."""
        self.parameters = tuple(own)
        self.received.matrices = {name for name in own if name.endswith(MATRICES)}
        mark_unset(layout, own)
        for name, parameter in own.items():
            watch(layer, name, parameter, self.received, self._make_room)

    def load(
        self,
        layer: Any,
        layout: ParameterLayout,
        *,
        interleaved: bool,
        canonical: Callable[[Parameters], Parameters] = lambda given: given,
    ) -> None:
        """Builds the layer from the loaded parameters of the engine's module, or brings what was loaded since into it;
        then frees them. Collective when it builds, and where experts lie elsewhere than the engine loads them.

        Args:
            canonical: brings an engine's own names and paddings to those that the layout reads.

        Raises:
            CheckpointError: experts of which a part is missing. A layer that was built refuses calls until all came.
        """
        parameters = self._own(layer)
        if self.layer is not None and not any(parameter.numel() for parameter in parameters.values()):
            return  # nothing was loaded since
        self._module = owner = weakref.ref(layer)
        self._again = lambda: self.load(owner(), layout, interleaved=interleaved, canonical=canonical)

        def weights(rows: list[int] | None) -> ExpertWeights:
            tensors = canonical({n: p.data for n, p in parameters.items()})
            tensors = tensors if rows is None else {n: tensor[rows] for n, tensor in tensors.items()}
            found = expert_weights(layout, tensors, interleaved=interleaved, again=self.layer is not None)
            return without_scales(found, self._unscaled)

        if self.layer is None:
            self.layer = self.state.build(self.binding, self._scaled_alike(weights(None)))
        else:
            for name, parameter in parameters.items():
                if not self.received.of(name):
                    self._declare(name, parameter)  # vLLM's layerwise reload leaves undefined what it doesn't load
            self._replace(self.layer, weights)
        for name, parameter in parameters.items():
            watch(layer, name, parameter, self.received, self._make_room)  # vLLM makes some anew before they are loaded
            if parameter.numel():
                self._freed[name] = parameter.shape, parameter.dtype, parameter.device
                parameter.data = parameter.data.new_empty(0)
        self._begun.clear()
        self.received.forget()

    def _scaled_alike(self, loaded: ExpertWeights) -> ExpertWeights:
        """Returns the first weights, less the input scales that a rank lacks: those of later ones go, too."""
        self._unscaled = unscaled_of(self.binding.world, loaded)
        return without_scales(loaded, self._unscaled)

    def finish(self) -> None:
        """Loads what `model.load_weights` has brought since. Raises CheckpointError where experts lack a part."""
        self._again()
        self.state.unfinished.remove(self)

    @property
    def lacking(self) -> str:
        """Says of which experts a part hasn't come yet, or "" where all came whole."""
        return self.received.lacking

    def _replace(self, layer: ExpertParallelMoE, weights: Callable[[list[int] | None], ExpertWeights]) -> None:
        try:
            if not layer.placement.is_identity:
                layer.load_experts(self._placed(layer, weights), agree=False)
            elif len(rows := self.received.experts()) < self.received.num_experts:
                held = layer.placement.shard(layer.world.rank).experts
                layer.load_experts(weights(rows), [held[row] for row in rows], agree=False)
            else:
                layer.load_experts(weights(None), agree=False)
        except EprtError as error:
            layer.refuse_calls(f"{self.binding.name} holds old weights, as new ones failed to load: {error}")
            if self not in self.state.unfinished:
                self.state.unfinished.append(self)
            raise

    def _placed(self, layer: ExpertParallelMoE, weights: Callable[[list[int] | None], ExpertWeights]) -> ExpertWeights:
        """Returns the experts of this rank's slots. Collective: what one rank can't bring is an error on all."""
        header = Header("load", self.binding.number, 3)
        with shared_errors(layer.world, header):
            if len(self.received.experts()) < self.received.num_experts:
                raise UsageError(f"{self.binding.name}: experts that were placed elsewhere are loaded all at once")
            loaded = weights(None)
        exchange(layer.world, header)
        loaded = without_scales(loaded, unscaled_of(layer.world, loaded))
        return redistribute(layer.world, loaded, layer.placement)

    def _own(self, module: Any) -> dict[str, Any]:
        return {name: module.get_parameter(name) for name in self.parameters}

    def _make_room(self, name: str, target: Any) -> None:
        """Gives freed parameters memory, before a loader writes into one, `target`; layers that have all of theirs come
        first, so that one layer's lies beside the model. What memory holds that an engine made anew is undefined: it
        becomes what `_declare` says."""

        def begun() -> bool:
            return target.numel() > 0 and (self.layer is None or self._begun.get(name) == target.data_ptr())

        if begun():
            return
        with self.state.loading:
            if target.numel() > 0:
                if not begun():  # by another thread
                    self._declare(name, target)
                return
            own = self._own(self._module())
            freed = {n: p for n, p in own.items() if p.numel() == 0 and n in self._freed}
            for other in tuple(self.state.unfinished) if freed else ():
                if other.received.complete:
                    other.finish()
            for name, parameter in freed.items():
                shape, dtype, device = self._freed[name]
                parameter.data = torch.empty(shape, dtype=dtype, device=device)
                self._declare(name, parameter)
            if freed and self not in self.state.unfinished:
                self.state.unfinished.append(self)

    def _declare(self, name: str, parameter: Any) -> None:
        """Fills memory as engines declare it: with zeros, as bytes and biases may have padding that nobody writes. Of
        other numbers, which become NaN, none may stay so (`expert_weights`)."""
        numbers = parameter.dtype.is_floating_point and parameter.dtype.itemsize > 1 and not name.endswith("bias")
        parameter.data.fill_(float("nan")) if numbers else parameter.data.zero_()
        self._begun[name] = parameter.data_ptr()

    def ready(self) -> ExpertParallelMoE:
        """Returns the layer for a call; the first one warms up every layer. Raises UsageError before loading."""
        if self.state.cold:
            self.state.warm()
        if self.layer is None:
            raise UsageError(f"{self.binding.name} is called before its weights were loaded")
        return self.layer


def adopted(method: Any, mixin: type, bound: BoundLayer) -> Any:
    """Returns `method` with the mixin in front of its class and `bound` as its `eprt`."""
    made: Any = object.__new__(mixed(type(method), mixin))
    made.__dict__.update(method.__dict__)  # what its constructor made: the configuration of parameters and loading
    made.eprt = bound
    return made


@functools.cache
def mixed(kind: type, mixin: type) -> type:
    """Makes a subclass under the same name: engines' weight loaders go by it."""
    return type(kind.__name__, (mixin, kind), {"__module__": mixin.__module__})


def bound_to(module: Any) -> BoundLayer | None:
    """Returns what eprt runs in an engine's module of experts, or None."""
    return getattr(getattr(module, "quant_method", None), "eprt", None)


def layers_of(model: nn.Module) -> dict[str, ExpertParallelMoE]:
    """Returns eprt's layers of one model by their names; a draft is another model."""
    found = {id(bound): bound for module in model.modules() if (bound := bound_to(module)) is not None}
    return {bound.binding.name: bound.layer for bound in found.values() if bound.layer is not None}


def run(layer: ExpertParallelMoE, hidden: torch.Tensor, topk: TopK, tokens_per_rank: int) -> torch.Tensor:
    """Calls a layer with an engine's tokens. Those in float16, as most AWQ models have them, travel and are computed in
    bfloat16: experts that are packed are less exact than either."""
    if hidden.dtype == torch.float16:
        return run(layer, hidden.to(torch.bfloat16), topk, tokens_per_rank).to(torch.float16)
    return layer(hidden, topk, tokens_per_rank=tokens_per_rank)


def ids_of(
    topk_ids: torch.Tensor, num_experts: int, padding: torch.Tensor | None = None, *, signed: bool = False
) -> torch.Tensor:
    """Returns ids in int32; rows that `padding` [T] marks get `num_experts`, which is sent to no expert.

    Args:
        signed: ids may be -1, which is sent to no expert either.
    """
    ids = topk_ids.to(torch.int32)
    ids = ids.remainder(num_experts + 1) if signed else ids
    return ids if padding is None else ids.masked_fill(padding[: ids.shape[0], None], num_experts)
