"""Keeps what an engine's sleep would take from layers: it drops all that was allocated while the model was loaded.

The engine keeps the addresses, restores the model's own buffers, and has experts loaded again; tables, counters and
constants of a layer are eprt's to bring back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from eprt.errors import UnsupportedError
from eprt.experts.grouped import four_bit
from eprt.experts.in_place import leaves
from eprt.layer import ExpertParallelMoE


class Kept:
    """Copies of the tensors that sleep would take from some layers, on the CPU."""

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def save(self, layers: Iterable[ExpertParallelMoE], lost: Callable[[torch.Tensor], bool]) -> None:
        """Copies the tensors of which `lost` is true, less the experts.

        Sleeping twice keeps the first copies: later ones would be of memory that is gone.
        """
        if self._copies:
            return
        for layer in layers:
            experts = {address(tensor) for tensor in experts_of(layer).values()}
            for tensor in _tensors(layer):
                if address(tensor) not in experts and lost(tensor):
                    self._copies.append((tensor, tensor.to("cpu", copy=True)))

    @torch.inference_mode()
    def restore(self) -> None:
        """Writes the copies back where they were."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)
        self._copies.clear()
        four_bit.table_on.cache_clear()  # its tables lay in memory that the engine took


def addresses(layers: Iterable[ExpertParallelMoE]) -> set[int]:
    """Returns where everything lies that some layers hold."""
    return {address(tensor) for layer in layers for tensor in _tensors(layer)}


def address(tensor: torch.Tensor) -> int:
    """Returns where a tensor's storage begins."""
    return tensor.untyped_storage().data_ptr()


def _tensors(layer: ExpertParallelMoE) -> list[torch.Tensor]:
    found = {id(value): value for value in leaves(layer).values() if isinstance(value, torch.Tensor)}
    return list(found.values())


def experts_of(layer: ExpertParallelMoE) -> dict[str, torch.Tensor]:
    """Returns what a load of experts writes, by names that are equal in every process."""
    try:
        return layer.executor.slot_tensors()
    except UnsupportedError:
        found = leaves(layer.executor)
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}
