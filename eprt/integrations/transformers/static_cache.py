"""A key/value cache that stays where it is: every batch size sees the first rows of the same memory.

transformers' own StaticCache belongs to one batch size, and its sliding layers decide on the host what they do, which a
CUDA graph can't replay. Here each layer is as long as the whole sequence; what a window leaves out is the mask's part.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, StaticLayer, get_layer_types_and_kwargs

_FULL = ("full_attention", "sliding_attention", "chunked_attention")


def refusal(config: Any) -> str:
    """Why a model can't be run over such a cache, or nothing."""
    types, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    others = sorted({kind for kind in types if kind not in (*_FULL, "dummy")})
    return f"its cache has layers of {', '.join(others)}" if others else ""


class StaticRows:
    """The cache of at most `rows` sequences of at most `length` tokens.

    Attributes:
        position: int64 [] on the device: where the next token is written, in every sequence. The caller moves it.
        begun: whether something was written since `begin`.
    """

    def __init__(self, config: Any, rows: int, length: int, device: torch.device) -> None:
        self.rows, self.length, self.begun = rows, length, True
        self._kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
        self._memory = [_Memory(rows, length) for _ in self._kinds]
        self._views: dict[int, Cache] = {}
        with torch.inference_mode(False):
            self.position = torch.zeros((), dtype=torch.int64, device=device)

    def begin(self) -> None:
        """Sequences of no tokens. What is left in memory is behind the mask."""
        self.position.zero_()
        self.begun = False

    def view(self, rows: int) -> Any:
        """transformers' Cache of the first `rows` sequences."""
        if rows not in self._views:
            layers = [_layer(kind, memory, rows, self) for kind, memory in zip(self._kinds, self._memory, strict=True)]
            self._views[rows] = Cache(layers=layers)
        return self._views[rows]

    def owns(self, cache: Any) -> bool:
        return any(cache is view for view in self._views.values())


class _Memory:
    """Keys and values of one layer, made in its first forward, whose heads and widths they have."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows, self._length = rows, length
        self._tensors: tuple[torch.Tensor, ...] = ()

    def first(self, rows: int, *like: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not self._tensors:
            with torch.inference_mode(False):
                self._tensors = tuple(
                    torch.zeros(self._rows, x.shape[1], self._length, x.shape[3], dtype=x.dtype, device=x.device)
                    for x in like
                )
        return tuple(tensor[:rows] for tensor in self._tensors)


class _Layer(StaticLayer):
    """The first rows of a memory."""

    def __init__(self, memory: _Memory, rows: int, owner: StaticRows) -> None:
        super().__init__(max_cache_len=owner.length)
        self._memory, self._rows, self._owner = memory, rows, owner
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        keys, values = self._memory.first(self._rows, key_states, value_states)
        positions = torch.arange(key_states.shape[-2], device=keys.device) + self._owner.position
        keys.index_copy_(2, positions, key_states)
        values.index_copy_(2, positions, value_states)
        return keys, values

    def get_seq_length(self) -> Any:
        """A tensor from the second forward on, as transformers' own static layers have it: nothing may be read on the
        host inside a graph."""
        return self._owner.position if self._owner.begun else 0


def _layer(kind: str, memory: _Memory, rows: int, owner: StaticRows) -> Any:
    return DummyLayer() if kind == "dummy" else _Layer(memory, rows, owner)
