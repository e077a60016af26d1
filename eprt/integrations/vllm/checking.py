"""Lets vLLM's weight checker, by which a trainer verifies its updates, see the experts: their parameters are freed."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

import torch

from eprt.integrations.engine.bound import layers_of
from eprt.integrations.engine.sleeping import experts_of
from eprt.integrations.engine.state import EngineState


def watch_checksums(state: EngineState, worker: Any) -> None:
    """Adds the experts' digests to what a class of workers computes of the other weights. Idempotent."""
    inner = getattr(worker, "compute_weight_checksums", None)
    if inner is None or hasattr(inner, "eprt"):
        return

    @functools.wraps(inner)
    def compute_weight_checksums(self: Any) -> dict[str, str]:
        state.before_step(forward=False)  # what was loaded last may still lie in parameters
        prefix = self._weight_checksum_prefix()
        added = {
            f"{prefix}{name}.{part}": _digest(tensor)
            for name, layer in layers_of(self.get_model()).items()
            for part, tensor in experts_of(layer).items()
        }
        return {**inner(self), **added}

    compute_weight_checksums.eprt = True  # type: ignore[attr-defined]
    worker.compute_weight_checksums = compute_weight_checksums


@torch.inference_mode()
def zero_experts(worker: Any) -> None:
    """Zeroes the experts of a worker's model, as vLLM's reset does the other weights: an update that lacks some shows.

    Raises:
        UnsupportedError: an executor whose experts can't be told from its other tensors.
    """
    for layer in layers_of(worker.get_model()).values():
        for tensor in layer.executor.slot_tensors().values():
            tensor.zero_()


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().flatten().view(torch.uint8).numpy().data).hexdigest()
