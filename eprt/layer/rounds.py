"""Batches over the capacity: dispatch, experts and combine in rounds that every rank makes, idle ones too.

Also the calls of an engine, which has its own form of the three steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from eprt.dense import SharedExpertMLP
from eprt.engines import Engine, Parts
from eprt.tokens import RouterLogits, TopK


class Given(NamedTuple):
    """The arguments of a layer's call, as `ExpertParallelMoE.forward` documents them."""

    hidden_states: torch.Tensor
    routing: TopK | RouterLogits | None
    token_ids: torch.Tensor | None
    tokens_per_rank: int | None


@dataclass(slots=True)
class LayerCall:
    """One call of a layer, on this rank.

    Attributes:
        tokens: [T, H_model] the slice of them that this rank sends.
        choice: their experts, or logits for an engine that chooses.
        tokens_per_rank: R of the slices, None if the ranks are to agree on it.
        group_tokens: tokens of the attention-TP group together.
        shape: of the caller's hidden states, [..., H_model].
        engine: the engine that makes the call; None: the dispatcher and the executor do.
        dense: the shared expert's output, once it is there.
    """

    tokens: torch.Tensor
    choice: TopK | RouterLogits
    tokens_per_rank: int | None
    group_tokens: int
    shape: torch.Size
    engine: Engine | None
    dense: torch.Tensor | None = None


class Round(NamedTuple):
    """Tokens [T, H] as the experts see them, their TopK (logits for an engine that chooses), and R."""

    hidden: torch.Tensor
    choice: Any
    rows: int

    def part(self, number: int, capacity: int) -> Round:
        """Returns round `number` of at most `capacity` rows per rank."""
        start = number * capacity
        end, rows = start + capacity, min(capacity, self.rows - start)
        return Round(self.hidden[start:end], self.choice.narrow(start, capacity), rows)


class RoundedLayer(Parts, Protocol):
    """An `ExpertParallelMoE`, as its rounds know it."""

    shared: SharedExpertMLP | None
    observe: Any
    see: Any

    def _agree(self, call: LayerCall) -> Round: ...

    def _finish(self, y: torch.Tensor, call: LayerCall) -> torch.Tensor: ...


def run_rounds(layer: RoundedLayer, whole: Round, first: torch.Tensor, call: LayerCall) -> torch.Tensor:
    """Makes the rounds that follow the first of a batch over the capacity; returns the output of the whole call.

    Args:
        whole: all tokens of the call, and the R that the ranks agreed on.
        first: [capacity, H] sums of the first round.
    """
    dispatcher, outputs = layer.dispatcher, [first]
    capacity = dispatcher.capacity.max_tokens_per_rank
    while True:
        now = whole.part(len(outputs), capacity)
        with layer.observe("dispatch"):
            rows = dispatcher.agree(*now, checked=True)
            sent = dispatcher.send(now.hidden, now.choice, rows)
        try:
            if layer.see is not None:
                layer.see("dispatch", sent)
            with layer.observe("experts"):
                y = layer.executor(sent.tokens, out=dispatcher.output_buffer(sent.handle))
            with layer.observe("combine"):
                outputs.append(dispatcher.combine(y, sent.handle))
                if len(outputs) * capacity >= whole.rows:
                    return layer._finish(torch.cat(outputs), call)
        finally:
            sent.handle.close()


def run_engine(layer: RoundedLayer, engine: Engine, call: LayerCall) -> torch.Tensor:
    """Makes a whole call by an engine, in rounds if it is over the capacity."""
    outputs, capacity = list[torch.Tensor](), layer.dispatcher.capacity.max_tokens_per_rank
    whole = Round(call.tokens, call.choice, capacity)
    while True:
        with layer.observe("dispatch"):
            if not outputs:
                whole = layer._agree(call)
            now = whole if whole.rows <= capacity else whole.part(len(outputs), capacity)
            if outputs:
                engine.agree(*now)
            work = engine.begin(*now)
        try:
            with layer.observe("experts"):
                y = engine.compute(work)
            if not outputs:
                with layer.observe("shared"):
                    call.dense = None if layer.shared is None else layer.shared(call.tokens)
            with layer.observe("combine"):
                outputs.append(engine.finish(y, work))
                if len(outputs) * capacity >= whole.rows:
                    return layer._finish(torch.cat(outputs) if len(outputs) > 1 else outputs[0], call)
        finally:
            engine.close(work)
