"""A stand-in for the package behind `--enable-memory-saver`, which knows CUDA's memory alone.

What was made within a region, and still lives, holds other bytes after a pause: zeros, as new memory has, and of the
weights others, so that no table of theirs is right by chance.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch


class MemorySaver:
    enabled = True

    def __init__(self) -> None:
        self._made: dict[str, list[Any]] = defaultdict(list)  # by tag: weak references

    @contextmanager
    def region(self, tag: str, enable_cpu_backup: bool = False) -> Iterator[None]:
        before = _storages()
        yield
        if not enable_cpu_backup:
            self._made[tag] += [weakref.ref(tensor) for at, tensor in _storages().items() if at not in before]

    def pause(self, tag: str) -> None:
        for reference in self._made[tag]:
            if (tensor := reference()) is not None and tensor.numel():
                tensor.untyped_storage().fill_(77 if tag == "weights" else 0)

    def resume(self, tag: str) -> None:
        """Does nothing: what was there is gone."""


def _storages() -> dict[int, torch.Tensor]:
    """Returns a tensor of each storage of this process, by its address."""
    tensors = (each for each in gc.get_objects() if isinstance(each, torch.Tensor) and not each.is_meta)
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def configure_subprocess() -> AbstractContextManager[None]:
    return nullcontext()


torch_memory_saver = MemorySaver()
