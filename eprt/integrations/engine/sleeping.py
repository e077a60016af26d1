"""Keeps what a layer needs beside its experts, while an engine gives the memory of its weights away.

At sleep level 2 vLLM drops everything that was allocated while the model was loaded, keeps the addresses, and restores
the model's own buffers only. Experts are loaded again afterwards; tables, counters and constants of a layer aren't.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from eprt.errors import UnsupportedError
from eprt.experts.grouped import four_bit
from eprt.experts.in_place import leaves
from eprt.layer import ExpertParallelMoE

ASLEEP = "its experts were given away (sleep level 2): load all weights before the next call"


class Kept:
    """Copies of the tensors that sleep would take from some layers, on the CPU."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, layers: Iterable[ExpertParallelMoE], lost: Callable[[torch.Tensor], bool]) -> None:
        """Copies the tensors of which `lost` is true, less the experts; calls are then refused until those are loaded.

        Sleeping twice keeps the first copies: later ones would be of memory that is gone.
        """
        first = not self._copies
        for layer in layers:
            experts = _experts(layer)
            found = {id(t): t for t in leaves(layer).values() if isinstance(t, torch.Tensor)} if first else {}
            for tensor in found.values():
                if _address(tensor) not in experts and lost(tensor):
                    self._copies.append((tensor, tensor.to("cpu", copy=True)))
            layer.refuse_calls(f"layer {layer.dispatcher.layer}: {ASLEEP}")

    @torch.inference_mode()
    def restore(self) -> None:
        """Writes the copies back where they were."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies.clear()
        four_bit.forget_tables()


def _experts(layer: ExpertParallelMoE) -> set[int]:
    """Returns the addresses of what a load of experts writes."""
    try:
        tensors = layer.executor.slot_tensors()
    except UnsupportedError:
        tensors = {name: value for name, value in leaves(layer.executor).items() if isinstance(value, torch.Tensor)}
    return {_address(tensor) for tensor in tensors.values()}


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
