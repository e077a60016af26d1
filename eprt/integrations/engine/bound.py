"""An engine's quantisation method of a MoE layer, re-classed so that eprt does what comes after loading."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from eprt.errors import UsageError
from eprt.integrations.engine.parameters import ParameterLayout, Parameters, expert_weights, mark_unset
from eprt.integrations.engine.state import EngineState, LayerBinding
from eprt.layer import ExpertParallelMoE


class BoundLayer:
    """Holds eprt's layer for a method. It is no module, so that no parameter shows up in the engine's model."""

    def __init__(self, state: EngineState, binding: LayerBinding) -> None:
        self.state, self.binding = state, binding
        self.layer: ExpertParallelMoE | None = None
        self.parameters: tuple[str, ...] = ()  # the experts': the engine's module may hold its router's, too

    def declared(self, own: Parameters, layout: ParameterLayout) -> None:
        """Notes the parameters that the method has just declared."""
        self.parameters = tuple(own)
        mark_unset(layout, own)

    def load(
        self,
        layer: Any,
        layout: ParameterLayout,
        *,
        interleaved: bool,
        canonical: Callable[[Parameters], Parameters] = lambda given: given,
    ) -> None:
        """Builds the layer from the loaded parameters of the engine's module, then frees them. Collective.

        Args:
            canonical: brings an engine's own names and paddings to those that the layout reads.
        """
        if self.layer is not None:
            raise UsageError(
                f"{self.binding.name} is loaded a second time: eprt keeps experts in another layout; restart instead"
            )
        parameters = {name: layer.get_parameter(name) for name in self.parameters}
        tensors = {name: parameter.data for name, parameter in parameters.items()}
        weights = expert_weights(layout, canonical(tensors), interleaved=interleaved)
        self.layer = self.state.build(self.binding, weights)
        for parameter in parameters.values():
            parameter.data = parameter.data.new_empty(0)

    def ready(self) -> ExpertParallelMoE:
        """Returns the layer for a call; the first one warms up every layer. Raises UsageError before loading."""
        if self.state.cold:
            self.state.warm()
        if self.layer is None:
            raise UsageError(f"{self.binding.name} is called before its weights were loaded")
        return self.layer


def adopted(method: Any, mixin: type, bound: BoundLayer) -> Any:
    """Returns `method` with the mixin in front of its class and `bound` as its `eprt`."""
    made: Any = object.__new__(_mixed(type(method), mixin))
    made.__dict__.update(method.__dict__)  # what its constructor made: the configuration of parameters and loading
    made.eprt = bound
    return made


@functools.cache
def _mixed(kind: type, mixin: type) -> type:
    """Makes a subclass under the same name: engines' weight loaders go by it."""
    return type(kind.__name__, (mixin, kind), {"__module__": mixin.__module__})


def ids_of(topk_ids: torch.Tensor, num_experts: int, padding: torch.Tensor | None = None) -> torch.Tensor:
    """Returns ids in int32; rows that `padding` [T] marks get `num_experts`, which is sent to no expert."""
    ids = topk_ids.to(torch.int32)
    return ids if padding is None else ids.masked_fill(padding[: ids.shape[0], None], num_experts)
