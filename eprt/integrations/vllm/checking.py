"""Lets vLLM's weight checker, by which a trainer verifies its updates, see the experts: their parameters are freed."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from eprt.integrations.engine.bound import layers_of
from eprt.integrations.engine.sleeping import experts_of


def with_experts(checksums: dict[str, str], worker: Any) -> dict[str, str]:
    """Adds the experts' digests to what a worker has computed of the other weights."""
    prefix = worker._weight_checksum_prefix()
    added = {
        f"{prefix}{name}.{part}": _digest(tensor)
        for name, layer in layers_of(worker.get_model()).items()
        for part, tensor in experts_of(layer).items()
    }
    return {**checksums, **added}


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
